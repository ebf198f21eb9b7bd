"""The pages that are made from committed numbers: none is stale, each claim holds."""

import sys
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
def test_a_page_is_what_make_results_writes(name):
    import summary

    written = (BENCHMARKS / "results" / name).read_text()
    assert written == summary.PAGES[name]() + "\n", "it is stale: run `make results`"


def test_every_recommendation_is_what_its_table_says():
    import summary

    numbers = cache(summary.numbers_of)
    for choose in summary.CHOICES:
        choice = choose(numbers)
        assert choice.holds, choice
        assert (BENCHMARKS / "results" / f"{choice.page}.md").exists()


def test_every_benchmark_is_run_in_small_or_left_out_with_a_reason():
    import smoke

    scripts = {path.stem for path in BENCHMARKS.glob("*.py")}
    assert scripts == smoke.SCRIPTS.keys() | smoke.LEFT_OUT.keys()
    assert all(smoke.LEFT_OUT.values())


def test_no_page_quotes_a_figure_that_the_results_have_not():
    import summary

    for path in summary.QUOTING:
        made = summary.requoted(path, summary.KINDS)
        assert made == path.read_text(), f"{path.name} is stale: run `make results`"
