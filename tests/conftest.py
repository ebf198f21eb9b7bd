"""Lets the tests import their shared oracles: ``from oracles import …``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
