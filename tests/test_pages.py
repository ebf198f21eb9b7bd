"""Every example of the documentation runs, and its own parts do what they say."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"
ALONE = ("crashes", "hostile-clients", "secure-sums")  # whose blocks need nothing


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("name", ALONE)
def test_blocks_that_need_nothing_run(name, capsys):
    found = blocks(DOCS / f"{name}.md")
    assert found
    for block in found:
        exec(compile(block, name, "exec"), {})


def test_every_page_with_an_example_is_in_a_test():
    sources = "".join(p.read_text() for p in Path(__file__).parent.glob("test_*.py"))
    pages = [page.stem for page in DOCS.glob("*.md") if blocks(page)]
    assert len(pages) > 8
    for name in pages:
        assert f'"{name}.md"' in sources or name in (*ALONE, "moving-from-fedavg")


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
