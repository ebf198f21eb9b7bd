"""``kill -9`` of servers and clients: the resumed run is the uninterrupted one."""

import json
from contextlib import redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import killing
import pytest

# SCAFFOLD's clients keep something from round to round, too.
TRIALS = {
    "named": ["--named", "1"],
    "random": ["--random", "4", "--strategy", "scaffold"],
}


# A child of a process with threads, of which it needs none.
pytestmark = pytest.mark.filterwarnings("ignore:.*is multi-threaded")


def kill(folder: Path) -> None:
    """Print the verdicts into a file for each kind of trials."""
    for name, options in TRIALS.items():
        with (folder / f"{name}.txt").open("w") as told, redirect_stdout(told):
            killing.main([str(folder / name), *options])


@pytest.fixture(scope="module")
def trials(tmp_path_factory: Any) -> dict[str, list[dict[str, Any]]]:
    """The verdicts of ``killing.py`` by its trials, the uninterrupted run's first.

    All in one fork of this process, which has imported what they need. What a killed
    process wrote is there all the same: no test takes away the power.
    """
    folder = tmp_path_factory.mktemp("trials")
    (fork := get_context("fork").Process(target=kill, args=[folder])).start()
    fork.join()
    assert fork.exitcode == 0
    texts = {name: (folder / f"{name}.txt").read_text() for name in TRIALS}
    return {k: [json.loads(line) for line in v.splitlines()] for k, v in texts.items()}


def assert_as_if_nothing_had_happened(verdict: dict[str, Any]) -> None:
    """Bit for bit, and no epoch twice."""
    assert verdict["same-model"], verdict
    assert verdict["same-history"], verdict
    assert verdict["twice"] == [], verdict


def test_killed_at_every_named_point(trials: dict[str, Any]) -> None:
    whole, *killed = trials["named"]
    assert whole["epochs"] == 2 * 2 * 2
    assert len(killed) >= 12
    for verdict in killed:
        assert verdict["died"], verdict
        assert verdict["lives"] == 2, verdict
        assert_as_if_nothing_had_happened(verdict)


def test_killed_at_random_moments(trials: dict[str, Any]) -> None:
    _, *killed = trials["random"]
    assert sum(verdict["kills"] for verdict in killed) >= 3
    for verdict in killed:
        assert_as_if_nothing_had_happened(verdict)
