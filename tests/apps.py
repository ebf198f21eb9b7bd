"""Flower apps, loaded in this process as Flower loads them."""

import runpy
import sys
from pathlib import Path
from typing import Any

APPS = Path(__file__).parents[1] / "apps"


def globals_of(app: Path, side: str) -> dict[str, Any]:
    """What the ``client`` or the ``server`` app's file holds.

    Its folder is first on the path while it is read.
    """
    sys.path.insert(0, str(app))
    try:
        return runpy.run_path(str(app / f"{side}_app.py"))
    finally:
        sys.path.remove(str(app))
        sys.modules.pop("my_data", None)  # every app has one


def load(app: Path, side: str) -> Any:
    """The ``client`` or the ``server`` app."""
    return globals_of(app, side)["app"]
