"""Finds what the benchmarks compare with: ``import rivals_path`` before ``rivals``."""

import sys
from pathlib import Path

# Last: the benchmarks' scripts have names that others have, too.
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
