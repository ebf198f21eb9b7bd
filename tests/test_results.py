"""The pages that are made from committed numbers: none is stale, each claim holds."""

import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def scripts():
    """The benchmarks import each other from their own folder."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("name", ["README.md", "chooser.md"])
def test_a_page_is_what_make_results_writes(name: str) -> None:
    import summary

    written = (BENCHMARKS / "results" / name).read_text()
    assert written == summary.PAGES[name]() + "\n", "it is stale: run `make results`"


def test_every_recommendation_is_what_its_table_says() -> None:
    import summary

    numbers = cache(summary.numbers_of)
    for choose in summary.CHOICES:
        choice = choose(numbers)
        assert choice.holds, choice
        assert (BENCHMARKS / "results" / f"{choice.page}.md").exists()


def test_every_figure_of_the_papers_has_a_word_and_those_not_run_a_reason() -> None:
    import summary

    papers = tomllib.loads(summary.PAPERS.read_text())
    for paper, readers in summary.READERS.items():
        assert set(readers) <= set(papers[paper])
        for where, said in papers[paper].items():
            if where == "title":
                continue
            assert said["says"], where
            assert said["theirs"], where
            assert "data" not in said or said["run"], where
            assert "data" not in said or where not in readers, where


def test_the_readmes_one_shot_table_has_the_pages_figures() -> None:
    from rivals import ALPHAS, numbers_of, results_in
    from studies.rivals.tables import accuracy_of, shown

    results = [results_in(numbers_of(f"rivals_{n}"), n) for n in ("mnist", "cifar10")]
    readme = (BENCHMARKS.parent / "README.md").read_text()
    rows = readme.split("| CIFAR-10: α = 0.2 |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(rows) > 8
    for row in rows:
        name, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        splits = [found[alpha] for found in results for alpha in ALPHAS]
        every = [accuracy_of(own, name.strip("*")) for own in splits]
        every = every if any(every) else [accuracy_of(own, name) for own in splits]
        assert cells == [shown(own) if own else "–" for own in every], name


def test_the_readmes_figures_of_the_papers_are_the_pages() -> None:
    readme = (BENCHMARKS.parent / "README.md").read_text()
    page = (BENCHMARKS / "results" / "README.md").read_text()
    section = readme.split("## The papers' figures")[1].split("\n## ")[0]
    count, rows = section.split(".")[0].strip(), section.split("|---|\n")[1]
    assert count in page
    papers = {part.split(" (")[0]: part for part in page.split("\n## ")}
    found = [row.strip("| ").split(" | ") for row in rows.strip().splitlines()]
    assert len(found) == 5
    for where, claim, ours, word in found:
        paper, _, figure = where.partition(", ")
        line = next(x for x in papers[paper].splitlines() if f"| {figure} |" in x)
        assert all(f"| {cell} |" in line for cell in (claim, ours, word)), where
