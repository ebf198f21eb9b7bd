"""``kill -9`` of servers and clients: the resumed run is the uninterrupted one."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
# SCAFFOLD's clients keep something from round to round, too.
TRIALS = {
    "named": ["--named", "1"],
    "random": ["--random", "5", "--strategy", "scaffold"],
}


@pytest.fixture(scope="module")
def trials() -> dict[str, list[dict[str, Any]]]:
    """The verdicts of ``killing.py`` by its trials, the uninterrupted run's first.

    All in one process, in memory where there is such a place: every life waits for its
    disk often. What a killed process wrote is there all the same: no test takes away
    the power.
    """
    memory = Path("/dev/shm")
    where = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=where) as folder:
        calls = [[f"{folder}/{name}", *options] for name, options in TRIALS.items()]
        code = "import json, sys; sys.path.append(sys.argv[1]); import killing\n"
        code += "for each in json.loads(sys.argv[2]): killing.main(each); print()"
        command = [sys.executable, "-c", code, str(TOOLS), json.dumps(calls)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = done.stdout.strip().split("\n\n")
    verdicts = [[json.loads(line) for line in text.splitlines()] for text in told]
    return dict(zip(TRIALS, verdicts, strict=True))


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
