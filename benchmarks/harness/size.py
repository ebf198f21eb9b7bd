"""How much a benchmark runs: all of it, or just enough to see that it works."""

import os
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
FOLDER = "BENCHMARKS_SMOKE"
# Where smoke.py has a script's cache and pages; None where the script runs as a whole.
SMOKE = Path(os.environ[FOLDER]) if FOLDER in os.environ else None


def sized(whole: T, small: T) -> T:
    """Return how much is run: the whole, or in :mod:`smoke` the small."""
    return whole if SMOKE is None else small
