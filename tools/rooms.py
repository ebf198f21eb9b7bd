"""The drawing of the library's rooms and who imports whom, from its code."""

import ast
from collections.abc import Iterator, Mapping
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean

import flwr_fisher
from flwr_fisher import strategies

PACKAGE = "flwr_fisher"
GROUND = "errors, params, …"  # the files that are no room's
HIGH, ACROSS, DOWN = 30, 16, 44  # a box, and the gaps between boxes
# Colours for a bright page as for a dark one.
LINE, PAPER, INK = "#8c959f", "#f6f8fa", "#1f2328"
Graph = Mapping[str, set[str]]  # each room with those that it imports


def imports() -> Graph:
    """Return which rooms each room imports, but the ground, which all stand on."""
    rooms: dict[str, set[str]] = {}
    folders = [Path(flwr_fisher.__file__).parent, Path(strategies.__file__).parent]
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            names = [*path.relative_to(folder).parts[:-1]]
            names = ["strategies", *names] if folder is folders[1] else names
            if names:
                own = rooms.setdefault(names[0], set())
                own |= {*_imported(path)} - {names[0]}
    # In the order of names, wherever the strategies are: a checkout has them apart.
    return {room: found & rooms.keys() for room, found in sorted(rooms.items())}


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == PACKAGE and rest:
                yield rest.split(".")[0]


def shortest(graph: Graph) -> Graph:
    """Return the arrows that no longer way of others stands for."""

    def reached(room: str) -> set[str]:
        return graph[room].union(*map(reached, graph[room]))

    return {
        room: found - set().union(*(reached(other) for other in found))
        for room, found in graph.items()
    }


def heights(graph: Graph) -> dict[str, int]:
    """Return how many rooms each stands on, one above the other."""
    found: dict[str, int] = {}

    def height(room: str) -> int:
        if room not in found:
            found[room] = 1 + max(map(height, graph[room]), default=0)
        return found[room]

    return {room: height(room) for room in graph}


def paths(graph: Graph) -> list[list[str]]:
    """Return each arrow as the places that it passes, one a row."""
    high = heights(graph) | {GROUND: 0}
    found = []
    for room, others in graph.items():
        for other in sorted(others) or [GROUND]:
            between = range(high[room] - 1, high[other], -1)
            passed = [f"{room} over {other}, {height}" for height in between]
            found.append([room, *passed, other])
    return found


def rows_of(graph: Graph, arrows: list[list[str]]) -> list[list[str]]:
    """Return rows from the top, each place below and above its neighbours."""
    high = heights(graph)
    rows: list[list[str]] = [[] for _ in range(max(high.values()) + 1)]
    near: dict[str, set[str]] = {}
    for arrow in arrows:
        for depth, place in enumerate(arrow, len(rows) - 1 - high[arrow[0]]):
            if place not in near:
                rows[depth].append(place)
                near[place] = set()
        for upper, lower in pairwise(arrow):
            near[upper].add(lower)
            near[lower].add(upper)
    for _ in range(8):
        for row, other in [*pairwise(rows), *pairwise(rows[::-1])]:
            order = {place: index / len(row) for index, place in enumerate(row)}
            other.sort(key=lambda x: fmean([order[y] for y in near[x] & {*row}] or [0]))
    return rows


def drawing() -> str:
    """Return the rooms as SVG, each above those that it imports."""
    graph = shortest(imports())
    arrows = paths(graph)
    rows = rows_of(graph, arrows)
    spans = [[_width(place) + ACROSS for place in row] for row in rows]
    width = max(map(sum, spans))
    at: dict[str, tuple[float, float]] = {}
    for depth, (row, own) in enumerate(zip(rows, spans, strict=True)):
        gap = (width - sum(own)) / len(row)
        ends = accumulate(span + gap for span in own)
        for place, end, span in zip(row, ends, own, strict=True):
            at[place] = (end - (span + gap) / 2, depth * (HIGH + DOWN))
    lines = [_arrow([at[place] for place in arrow]) for arrow in arrows]
    boxes = [_box(room, at[room]) for room in (*graph, GROUND)]
    tall = len(rows) * (HIGH + DOWN) - DOWN + 2
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" '
            f'height="{tall}" viewBox="0 -1 {width:.0f} {tall}" '
            'font-family="sans-serif" font-size="13">',
            "<title>Rooms, each above those that it imports</title>",
            _MARKER,
            *lines,
            *boxes,
            "</svg>\n",
        ]
    )


def _width(place: str) -> int:
    return 150 if place == GROUND else 0 if " over " in place else 104


_MARKER = (
    '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
    f'markerHeight="7" orient="auto"><path fill="{LINE}" d="M0 0L8 4L0 8z"/></marker>'
)


def _arrow(places: list[tuple[float, float]]) -> str:
    (x, y), *_ = places
    path = f"M{x:.0f} {y + HIGH:.0f}"
    for (x1, y1), (x2, y2) in pairwise(places):
        middle = (y1 + HIGH + y2) / 2
        path += f"L{x1:.0f} {y1 + HIGH:.0f}C{x1:.0f} {middle:.0f} "
        path += f"{x2:.0f} {middle:.0f} {x2:.0f} {y2:.0f}"
    return f'<path d="{path}" fill="none" stroke="{LINE}" marker-end="url(#tip)"/>'


def _box(room: str, place: tuple[float, float]) -> str:
    x, y = place
    wide = _width(room)
    return (
        f'<rect x="{x - wide / 2:.0f}" y="{y:.0f}" width="{wide}" height="{HIGH}" '
        f'rx="5" fill="{PAPER}" stroke="{LINE}"/>'
        f'<text x="{x:.0f}" y="{y + HIGH / 2 + 4.5:.0f}" fill="{INK}" '
        f'text-anchor="middle">{escape(room)}</text>'
    )
