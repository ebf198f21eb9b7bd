"""Figures of the pages of results, quoted on other pages, and made anew there.

A figure in a line is a link to its page, whose title names the row and the column::

    costs [1.7](../benchmarks/results/engine.md "ours, sampled :: LeNet, batch 128")

A row is named by its first cells, with ` · ` between; a column may go by its number.
Before both may stand how a section of the page begins: "MNIST :: all examples :: 2".

A table stands between two comments, with the columns that are named, and the rows that
have one of the cells named, or all::

    <!--= table fedfish#Scores :: 1; 2; 3; global :: FedAvg; FedFish -->
    <!--=-->

What else stands between comments is made by a function, `KINDS` of `summary.py`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from harness.page import RESULTS
from harness.tables import head, row

FIGURE = re.compile(r'\[([^]]*)\]\((\S*results/(\w+)\.md\S*)\s+"([^"]+?\s::\s[^"]+)"\)')
BLOCK = re.compile(r"^<!--= (.+?) -->$(.*?)^<!--=-->$", re.DOTALL | re.MULTILINE)
Kinds = Mapping[str, Callable[..., list[str]]]  # lines, of the other words

Quoted = TypeVar("Quoted", str, list[str])


class QuoteError(Exception):
    """What a page wants to quote is not there."""


@dataclass(frozen=True)
class Table:
    """A table of a page of results."""

    section: str
    columns: list[str]
    rows: list[list[str]]

    def index(self, column: str) -> int:
        """Return where a column is, by its title or its number."""
        if column in self.columns:
            return self.columns.index(column)
        if column.isdigit() and 0 < int(column) <= len(self.columns):
            return int(column) - 1
        raise QuoteError(f"no column {column!r}")

    def row(self, name: str) -> list[str]:
        """Return the row whose first cells are the name."""
        names = name.split(" · ")
        for cells in self.rows:
            if [_plain(cell) for cell in cells[: len(names)]] == names:
                return cells
        raise QuoteError(f"no row {name!r}")

    def cell(self, name: str, column: str) -> str:
        """Return a cell of the row whose first cells are the name."""
        index = self.index(column)
        return _plain(self.row(name)[index])

    def excerpt(self, columns: list[str], cells: list[str]) -> list[str]:
        """Return the lines of some columns, of the rows with one of some cells."""
        kept = [self.index(column) for column in columns] or range(len(self.columns))
        there = {_plain(cell) for own in self.rows for cell in own}
        if missing := [cell for cell in cells if cell not in there]:
            raise QuoteError(f"no row with one of {missing}")
        rows = [r for r in self.rows if not cells or {*map(_plain, r)} & {*cells}]
        titles = [self.columns[index] for index in kept]
        return [*head(*titles), *(row(*(own[i] for i in kept)) for own in rows)]


def _plain(cell: str) -> str:
    return cell.replace("**", "").strip("* ")


def tables(text: str) -> Iterator[Table]:
    """Yield the tables of a page."""
    section, lines = "", list[list[str]]()
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            lines.append([cell.strip() for cell in line.strip()[1:-1].split("|")])
            continue
        if lines:
            yield Table(section, lines[0], lines[2:])
            lines = []
        section = line.strip("# ") if re.match("#+ ", line) else section


@cache
def _tables_of(page: str) -> list[Table]:
    path = RESULTS / f"{page}.md"
    return list(tables(path.read_text())) if path.exists() else []


def first(page: str, section: str, take: Callable[[Table], Quoted]) -> Quoted:
    """Return what the first table has that has it, in a section of a page."""
    missing = []
    for table in _tables_of(page):
        if table.section.startswith(section):
            try:
                return take(table)
            except QuoteError as error:
                missing.append(str(error))
    said = "; ".join(dict.fromkeys(missing)) or f"no table in {section or 'it'}"
    raise QuoteError(f"{page}: {said}")


def _figure(page: str, title: str) -> str:
    *section, name, column = _split(title, "::")
    return first(page, *section or [""], lambda table: table.cell(name, column))


def _lines(words: str, kinds: Kinds) -> list[str]:
    name, *rest = _split(words, "::")
    if name in kinds:
        return kinds[name](*rest)
    if not name.startswith("table "):
        raise QuoteError(f"no {name!r} to quote, but table, {', '.join(kinds)}")
    page, _, section = name.removeprefix("table ").partition("#")
    columns, cells = (*(_split(each, ";") for each in rest), [], [])[:2]
    return first(page, section, lambda table: table.excerpt(columns, cells))


def _split(text: str, mark: str) -> list[str]:
    words = " ".join(text.split()).split(mark)
    return [word.strip() for word in words if word.strip()]


def requoted(page: Path, kinds: Kinds) -> str:
    """Return a page's text with its quotes made anew."""

    def figure(match: re.Match[str]) -> str:
        made = _figure(match[3], match[4])
        return f'[{made}]({match[2]} "{match[4]}")'

    def block(match: re.Match[str]) -> str:
        made = "\n".join(_lines(match[1], kinds))
        return f"<!--= {match[1]} -->\n{made}\n<!--=-->"

    try:
        return BLOCK.sub(block, FIGURE.sub(figure, page.read_text()))
    except QuoteError as error:
        raise QuoteError(f"{page.name}: {error}") from error
