"""For your own tests: virtual clients in milliseconds, without Ray."""

from flwr_fisher.testing.local_grid import LocalGrid

__all__ = ["LocalGrid"]
