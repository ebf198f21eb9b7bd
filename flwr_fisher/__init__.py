"""Curvature-based federated learning for Flower.

Two wings on one mathematics: :mod:`flwr_fisher.curvature` (what a loss looks like
around a model's parameters) carries :mod:`~flwr_fisher.merge` (one shot),
:mod:`~flwr_fisher.rounds` (many rounds) and :mod:`~flwr_fisher.tangent` (TCT's convex
problem); on :mod:`~flwr_fisher.wire` (what travels) stand :mod:`~flwr_fisher.client`
and :mod:`~flwr_fisher.server`; on both, :mod:`~flwr_fisher.strategies`. Importing this
package loads none of them.
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
    """Finds the strategies where a checkout has them: beside this package."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != f"{__name__}.strategies":
            return None
        folder = _HERE.parent / "strategies"
        return spec_from_file_location(
            fullname,
            folder / "__init__.py",
            submodule_search_locations=[str(folder)],
        )


if not (_HERE / "strategies").exists():
    sys.meta_path.insert(0, _Beside())
