"""Virtual clients for your own tests, in milliseconds and without Ray."""

from flwr_fisher.testing.local_grid import LocalGrid

__all__ = ["LocalGrid"]
