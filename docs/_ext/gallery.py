"""The tutorials: their order, the pictures that they save, and when they run again."""

import re
import shutil
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx_gallery.scrapers import figure_rst

import flwr_fisher
from flwr_fisher import strategies

ORDER = (
    *("one_shot", "many_rounds", "real_federation"),
    *("without_flower", "own_method", "own_state", "own_exchanges"),
    *("pretrained", "hugging_face", "fedfish_toy"),
)
# Of one script, which can be downloaded by itself.
_ZIP = re.compile(r"\n *\.\. container::.*-zip\n\n.*\n")
_began = {"at": 0.0}


def place(filename: str) -> tuple[int, str]:
    """Return where a tutorial stands; a new one is the last."""
    name = Path(filename).stem
    return ORDER.index(name) if name in ORDER else len(ORDER), name


def begin(conf: dict[str, Any], filename: str) -> None:
    """Note when a tutorial begins."""
    _began["at"] = time.time()


def saved(block: object, script: dict[str, Any], conf: dict[str, Any]) -> str:
    """Show the pictures that a tutorial has written to files, and take them away.

    Another tutorial may run at the same time, in the same folder: a picture's name
    begins with its tutorial's.
    """
    own = Path.cwd().rglob(f"{Path(script['src_file']).stem}*.png")
    new = [path for path in own if path.stat().st_mtime >= _began["at"]]
    paths = [script["image_path_iterator"].next() for _ in new]
    for picture, path in zip(sorted(new), paths, strict=True):
        shutil.move(picture, path)
    return figure_rst(paths, conf["src_dir"]) if paths else ""


def _forget_stale(app: Sphinx) -> None:
    """Have tutorials run again where the library is another than when they ran."""
    here = Path(app.srcdir, app.config.sphinx_gallery_conf["gallery_dirs"])
    here.mkdir(exist_ok=True)
    ran, now = here / "library.sha256", sha256()
    for package in (flwr_fisher, strategies):
        for path in sorted(Path(package.__file__).parent.rglob("*.py")):
            now.update(path.read_bytes())
    if not ran.exists() or ran.read_text() != now.hexdigest():
        for path in here.glob("*.py.md5"):  # sphinx-gallery's sign that it need not run
            path.unlink()
        ran.write_text(now.hexdigest())


def _without_zip(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname.startswith("tutorials/"):
        source[0] = _ZIP.sub("\n", source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Let sphinx-gallery make pages of them."""
    app.setup_extension("sphinx_gallery.gen_gallery")
    app.connect("builder-inited", _forget_stale, priority=100)
    app.connect("source-read", _without_zip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
