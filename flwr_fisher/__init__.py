"""Curvature-based federated learning for Flower.

:mod:`~flwr_fisher.strategies` has the strategies for Flower's server, and
:mod:`~flwr_fisher.client` the client app that answers them. Their mathematics is in
packages of its own: :mod:`~flwr_fisher.curvature` (a loss's curvature at a model's
parameters), :mod:`~flwr_fisher.merge` (one-shot merging), :mod:`~flwr_fisher.rounds`
(methods with many rounds) and :mod:`~flwr_fisher.tangent` (TCT's convex problem).
:mod:`~flwr_fisher.wire` defines the payloads, and :mod:`~flwr_fisher.server` runs a
round. Importing this package loads none of them.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

__version__ = "0.3.0"

_HERE = Path(__file__).parent


class _Beside(MetaPathFinder):
    """Finds the strategies of a checkout, in the folder beside this package."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != f"{__name__}.strategies":
            return None
        beside = _HERE.parent / "strategies/__init__.py"
        return spec_from_file_location(fullname, beside)


if not (_HERE / "strategies").exists():
    sys.meta_path.insert(0, _Beside())
