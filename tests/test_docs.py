"""The documentation is built without a warning, and asks nothing of the network."""

import socket
from pathlib import Path

import pytest
from sphinx.application import Sphinx
from sphinx_gallery.scrapers import ImagePathIterator

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_every_page_is_read_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("the build asked for an address")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    told = tmp_path / "warnings.txt"
    with told.open("w") as warnings:
        app = Sphinx(
            DOCS, DOCS, tmp_path / "out", tmp_path / "doctrees", "dummy",
            {"plot_gallery": "False"}, None, warnings,
        )  # fmt: skip
        app.build()
    assert told.read_text() == ""


def test_a_page_shows_its_own_tutorials_pictures(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "_ext")
    import gallery

    monkeypatch.chdir(tmp_path)
    (tmp_path / "shown").mkdir()
    for name in ("mine_1", "mine_2", "other"):
        Path(f"{name}.png").touch()
    pictures = ImagePathIterator(tmp_path / "shown" / "{0}.png")
    script = {"src_file": "examples/mine.py", "image_path_iterator": pictures}
    text = gallery.saved(None, script, {"src_dir": tmp_path})
    assert "/shown/1.png" in text
    assert "/shown/2.png" in text
    left = sorted(path.name for path in tmp_path.rglob("*.png"))
    assert left == ["1.png", "2.png", "other.png"]
