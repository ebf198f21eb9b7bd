"""Adapters for apps of Flower's older API.

``NumPyClient``, and what ``ServerApp(server_fn=...)`` takes, moved to ``flwr.compat``.
This room will be removed when Flower drops them. No other room imports it, and it does
not import Flower's older classes.
"""

from flwr_fisher.legacy.numpy_client import client_app, from_numpy_client
from flwr_fisher.legacy.server import History, Server, server_app
from flwr_fisher.legacy.strategy import as_legacy

__all__ = [
    "History",
    "Server",
    "as_legacy",
    "client_app",
    "from_numpy_client",
    "server_app",
]
