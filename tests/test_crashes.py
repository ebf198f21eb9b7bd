"""``kill -9`` of servers and clients: the resumed run is the uninterrupted one."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "killing.py"


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where there is such a place: every life waits for its disk often.

    What a killed process wrote is there all the same: no test takes away the power.
    """
    memory = Path("/dev/shm")
    where = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=where) as name:
        yield Path(name)


def trials(where: Path, *options: str) -> list[dict[str, Any]]:
    """The verdicts of ``killing.py``, the uninterrupted run's first."""
    command = [sys.executable, str(TOOL), str(where), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_as_if_nothing_had_happened(verdict: dict[str, Any]) -> None:
    """Bit for bit, and no epoch twice."""
    assert verdict["same-model"], verdict
    assert verdict["same-history"], verdict
    assert verdict["twice"] == [], verdict


def test_killed_at_every_named_point(folder: Path) -> None:
    whole, *killed = trials(folder, "--named", "1")
    assert whole["epochs"] == 2 * 2 * 2
    assert len(killed) >= 12
    for verdict in killed:
        assert verdict["died"], verdict
        assert verdict["lives"] == 2, verdict
        assert_as_if_nothing_had_happened(verdict)


def test_killed_at_random_moments(folder: Path) -> None:
    """Of SCAFFOLD: its clients keep something from round to round, too."""
    _, *killed = trials(folder, "--random", "5", "--strategy", "scaffold")
    assert sum(verdict["kills"] for verdict in killed) >= 3
    for verdict in killed:
        assert_as_if_nothing_had_happened(verdict)
