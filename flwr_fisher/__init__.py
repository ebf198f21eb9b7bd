"""Curvature-based federated learning for Flower.

Two wings on one mathematics: :mod:`flwr_fisher.curvature` (what a loss looks like
around a model's parameters) carries :mod:`~flwr_fisher.merge` (one shot),
:mod:`~flwr_fisher.rounds` (many rounds) and :mod:`~flwr_fisher.tangent` (TCT's convex
problem); on :mod:`~flwr_fisher.wire` (what travels) stand :mod:`~flwr_fisher.client`
and :mod:`~flwr_fisher.server`; on both, :mod:`~flwr_fisher.strategies`. Importing this
package loads none of them.
"""

from pathlib import Path

__version__ = "0.2.0"

_HERE = Path(__file__).parent
if not (_HERE / "strategies").exists():  # a checkout, where they stand beside it
    __path__.append(str(_HERE.parent))
