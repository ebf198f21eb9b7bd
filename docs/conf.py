"""How the documentation is built: see `make docs`."""

import shutil
import sys
from importlib.metadata import metadata
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
_package = metadata("flwr-fisher")

project, version = _package["Name"], _package["Version"]
author = copyright = "The flwr-fisher authors"  # the name is Sphinx's
extensions = ["mathml", "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme, html_title = "furo", f"{project} {version}"
html_math_renderer = "mathml"
myst_enable_extensions, myst_heading_anchors = ["dollarmath"], 3
autodoc_typehints, autodoc_member_order = "description", "bysource"
napoleon_google_docstring, napoleon_use_rtype = False, False
# What is ours has to be there; no other site is asked for what is not.
nitpicky = True
# Rooms' own types, which a signature shows and no caller makes.
_INNER = (
    r"flwr_fisher\.(client\.store|curvature\.(estimate|operators\.factors)|secure\."
    r"aggregator|server\.(driver|policy)|wire\.(options|tangent_upload))\..*"
)
nitpick_ignore_regex = [("py:.*", r"(?!flwr_fisher\.).*"), ("py:class", _INNER)]

_here = Path(__file__).parent
_results, _pages = _here.parent / "benchmarks" / "results", _here / "benchmarks"


def _copy_results(app: Sphinx) -> None:
    """Take in the pages of results; their README.md is that of the papers."""
    _pages.mkdir(exist_ok=True)
    for path in (*_results.glob("*.md"), *_results.glob("*.png")):
        shutil.copy(path, _pages / path.name.replace("README", "papers"))


def _link_results(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = source[0].replace("../benchmarks/results/README", "benchmarks/papers")
    source[0] = source[0].replace("../benchmarks/results/", "benchmarks/")


def setup(app: Sphinx) -> None:
    """Let pages link to results as they do in the repository."""
    app.connect("builder-inited", _copy_results)
    app.connect("source-read", _link_results)
