"""Every table and figure of the papers, and what was found of it here.

    make results

A row's word is *reproduced* where all of the claim holds in our figures, *in part*
where some of it does, *not* where none does; claims are checked by the page's script
against the numbers behind the pages of results, so no word is written by hand. What
could not be run here has its reason, and the command that would run it. Nothing was
tuned on test data; data sets and models are often smaller than a paper's, as each
reading and page says. TCT's appendices were not at hand, and have no rows.
"""

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from harness.page import RESULTS, blocks, numbers_of, opening
from harness.quotes import requoted
from harness.tables import head, row
from studies.papers import fagh, fedfish, fedfisher, tct
from studies.papers.chooser import CHOICES
from studies.papers.found import IN_PART, NO_RESULT, NOT, NOT_RUN, REPRODUCED
from studies.papers.quotes import KINDS

PAPERS = Path(__file__).with_name("papers.toml")
READERS = {
    "fedfisher": fedfisher.READERS,
    "fedfish": fedfish.READERS,
    "fagh": fagh.READERS,
    "tct": tct.READERS,
}
NOT_YET = "not measured yet"
ORDER = (REPRODUCED, IN_PART, NOT, NOT_RUN, NO_RESULT, NOT_YET)


def verdict_and_cells(paper: str, where: str, said: Mapping[str, Any]) -> list[str]:
    """Return a figure's word, ours, the reading and the command."""
    read = READERS[paper].get(where)
    found = read(cache(numbers_of)) if read else None
    if found is not None:
        page = f"[{found.page.removesuffix('.md')}]({found.page})"
        return [found.verdict, found.shown, found.reading, f"`{found.command}`, {page}"]
    if "data" in said:
        return [NOT_RUN, "", f"Needs {said['data']}.", f"`{said['run']}`"]
    return [NO_RESULT if said.get("drawing") else NOT_YET, "", "", ""]


def sections(papers: Mapping[str, Mapping[str, Any]]) -> Iterator[str | list[str]]:
    """Return each paper's title and table; the first lines count the words."""
    tables: list[str | list[str]] = []
    words: Counter[str] = Counter()
    for paper, entries in papers.items():
        lines = head("", "claim", "theirs", "ours", "", "reading", "made by")
        for where, said in entries.items():
            if where == "title":
                continue
            word, *cells = verdict_and_cells(paper, where, said)
            words[word] += 1
            ours, reading, command = cells
            lines.append(
                row(
                    where, said["says"], said["theirs"], ours, f"**{word}**", reading,
                    command,
                )
            )  # fmt: skip
        tables += [f"## {entries['title']}", lines]
    counted = (f"{words[word]} {word}" for word in ORDER if words[word])
    yield f"Of {words.total()} rows of tables and figures: {', '.join(counted)}."
    yield from tables


def page() -> str:
    """Return the page."""
    papers = tomllib.loads(PAPERS.read_text())
    return "\n".join(blocks(opening("The papers' figures", __doc__), *sections(papers)))


CHOOSER = """\
# Which method?

By what a federation can do; each row with the figure of ours that speaks for it, and
the page that has it with its setting and spread. What has a ± is a mean of paired
differences and its standard error. `make results` makes the page; a test fails when a
table no longer says what its row says."""


def chooser() -> str:
    """Return the page that recommends."""
    found = [choose(cache(numbers_of)) for choose in CHOICES]
    lines = head("situation", "take", "because", "table")
    lines += [
        row(each.situation, each.method, each.figure, f"[{each.page}]({each.page}.md)")
        for each in found
    ]
    return "\n".join(blocks(CHOOSER, lines))


PAGES = {"README.md": page, "chooser.md": chooser}
ROOT = Path(__file__).parents[1]
# These are written by hand, but for the figures that they quote.
QUOTING = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def main() -> None:
    """Write the pages, and the figures that other pages quote."""
    for name, write in PAGES.items():
        (RESULTS / name).write_text(write() + "\n")
    for path in QUOTING:
        path.write_text(requoted(path, KINDS))


if __name__ == "__main__":
    main()
