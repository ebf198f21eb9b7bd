"""The documentation is built without a warning, and asks nothing of the network."""

import socket
from pathlib import Path

import pytest
from sphinx.application import Sphinx

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
