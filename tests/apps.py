"""Flower apps, loaded in this process as Flower loads them."""

import json
import runpy
import sys
import tomllib
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from flwr_fisher.testing import LocalGrid

APPS = Path(__file__).parents[1] / "apps"


def globals_of(app: Path, side: str) -> dict[str, Any]:
    """What the ``client`` or the ``server`` app's file holds.

    Its folder is first on the path while it is read.
    """
    sys.path.insert(0, str(app))
    try:
        return runpy.run_module(f"{app.name}.{side}_app")
    finally:
        sys.path.remove(str(app))


def load(app: Path, side: str) -> Any:
    """The ``client`` or the ``server`` app."""
    return globals_of(app, side)["app"]


def defaults(app: str) -> dict[str, Any]:
    """The run config of an app's ``pyproject.toml``."""
    project = tomllib.loads((APPS / app / "pyproject.toml").read_text())
    config: dict[str, Any] = project["tool"]["flwr"]["app"]["config"]
    return config


def run(
    app: str,
    path: Path,
    clients: int,
    kind: type[LocalGrid] = LocalGrid,
    **options: Any,
) -> tuple[Any, Any]:
    """Run an app as Flower does; what it says in ``metrics.json``, and its grid."""
    own = defaults(app)
    config = own | {"output-dir": str(path)}
    if "state-dir" in own:
        config |= {"state-dir": str(path / "state")}
    config |= {key.replace("_", "-"): value for key, value in options.items()}
    assert config.keys() == own.keys()
    grid = kind(load(APPS / app, "client"), clients, run_config=config)
    load(APPS / app, "server")(grid, Context(1, 1, {}, RecordDict(), config))
    return json.loads((path / "metrics.json").read_text()), grid
