"""Curvature-based federated learning for Flower.

The rooms, from the maths outwards: :mod:`flwr_fisher.curvature` (what a loss looks
like around a model's parameters), :mod:`flwr_fisher.merge` (the server's algebra),
:mod:`flwr_fisher.wire` (what travels), :mod:`flwr_fisher.client`,
:mod:`flwr_fisher.strategies`, :mod:`flwr_fisher.testing` and
:mod:`flwr_fisher.tasks`. Importing this package loads none of them.
"""

__version__ = "0.1.0"
