"""How the documentation is built: see `make docs`."""

import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
# Not of what is installed, whose version may be an earlier checkout's.
_package = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())

project, version = (_package["project"][key] for key in ("name", "version"))
author = copyright = "The flwr-fisher authors"  # the name is Sphinx's
extensions = ["mathml", "myst_parser"]
exclude_patterns = ["_build"]
html_theme, html_title = "furo", f"{project} {version}"
html_static_path, html_css_files = ["_static"], ["tables.css"]
html_math_renderer = "mathml"
myst_enable_extensions, myst_heading_anchors = ["dollarmath"], 3
# As GitHub writes an equation of several lines.
myst_fence_as_directive = ["math"]
nitpicky = True

_here = Path(__file__).parent
_root = _here.parent
_results = _root / "benchmarks" / "results"
# Pages that stand elsewhere in the repository, by what they are called here.
_elsewhere = {
    "more/contributing": _root / "CONTRIBUTING.md",
    "more/federation": _root / "federation" / "README.md",
    "more/changelog": _root / "CHANGELOG.md",
    "more/releasing": _root / "RELEASING.md",
    "more/security": _root / "SECURITY.md",
    **{
        f"benchmarks/{path.stem.replace('README', 'papers')}": path
        for path in sorted(_results.glob("*.md"))
    },
}
_names = {path: f"{name}.md" for name, path in _elsewhere.items()}
_pictures = {path: f"benchmarks/{path.name}" for path in _results.glob("*.png")}
_names |= _pictures
_link = re.compile(r"(?<=\]\()(?!\w+:)([^)\s#]+)")
# Pages whose lists of pages are the site's tree: the first page has these as its own.
_overviews = {
    "index",
    *("start", "tutorials", "how-to", "methods", "reference", "results"),
    "supernodes",
    "more/contributing",
}
_item = re.compile(r"^- \[([^\]]+)\]\((\S+)\.\w+\)", re.MULTILINE)


def _take_in(app: Sphinx) -> None:
    """Take in the pages that stand elsewhere, and the pictures of results."""
    for folder in ("more", "benchmarks"):  # pages of an earlier version
        for stale in (_here / folder).glob("*.md"):
            stale.unlink()
    for path in (*_elsewhere.values(), *_pictures):
        here = _here / _names[path]
        here.parent.mkdir(exist_ok=True)
        shutil.copy(path, here)


def _put_links_right(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let a page link as it does in the repository, wherever it stood there."""
    stood = _elsewhere.get(docname, _here / f"{docname}.md").parent
    here = (_here / docname).parent

    def right(match: re.Match[str]) -> str:
        there = (stood / match[1]).resolve()
        target = _here / _names[there] if there in _names else there
        return os.path.relpath(target, here) if there.exists() else match[1]

    source[0] = _link.sub(right, source[0])


def _list_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make the tree of pages of the lists that overviews have of them."""
    if docname not in _overviews:
        return
    listed = [f"{name} <{path}>" for name, path in _item.findall(source[0])]
    lines = ["```{toctree}", ":hidden:", "", *listed, "```"]
    source[0] += "\n" + "\n".join(lines) + "\n"


def setup(app: Sphinx) -> None:
    """Let the site have pages that stand elsewhere in the repository."""
    app.connect("builder-inited", _take_in)
    app.connect("source-read", _put_links_right)
    app.connect("source-read", _list_pages)
