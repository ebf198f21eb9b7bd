"""Curvature-based federated learning for Flower.

Two wings on one mathematics: :mod:`flwr_fisher.curvature` (what a loss looks like
around a model's parameters) carries :mod:`~flwr_fisher.merge` (one shot),
:mod:`~flwr_fisher.rounds` (many rounds) and :mod:`~flwr_fisher.tangent` (TCT's convex
problem); on :mod:`~flwr_fisher.wire` (what travels) stand :mod:`~flwr_fisher.client`
and :mod:`~flwr_fisher.server`; on both, :mod:`~flwr_fisher.strategies`. Importing this
package loads none of them.
"""

from importlib.util import find_spec

__version__ = "0.2.0"

if find_spec(f"{__name__}.strategies") is None:
    raise ImportError(
        f"{__path__[0]} is a checkout's folder, and its strategies stand beside it. "
        "Run from another folder, where the installed package is found; or, to work on "
        "the library, `make develop`"
    )
