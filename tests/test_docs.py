"""The documentation is built without a warning, and asks nothing of the network."""

import importlib.util
import socket
from pathlib import Path
from types import ModuleType

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


@pytest.fixture(scope="module")
def rooms() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rooms", DOCS / "_ext" / "rooms.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_drawing_has_every_room_above_those_that_it_imports(rooms):
    graph = rooms.imports()
    assert {"curvature", "merge", "wire", "client", "server", "strategies"} <= {*graph}
    assert "curvature" in graph["merge"]
    assert {"server", "merge"} <= graph["strategies"]
    heights = rooms.heights(graph)
    assert all(heights[a] > heights[b] for a, found in graph.items() for b in found)
    drawn = rooms.drawing(graph, {"merge": "merge.html"})
    assert all(f">{room}</text>" in drawn for room in graph)
    assert drawn.count('<a href="merge.html">') == 1


def test_an_arrow_that_a_longer_way_says_is_left_out(rooms):
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"a", "c"}}
    assert rooms.shortest(graph) == {"a": {"b"}, "b": {"c"}, "c": set(), "d": {"a"}}
    arrows = rooms.paths({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    assert ["a", "a over c, 2", "c"] in arrows
    assert ["c", rooms.GROUND] in arrows
