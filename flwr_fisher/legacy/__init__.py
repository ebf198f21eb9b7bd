"""Apps of Flower's older API, ``NumPyClient`` and ``server_fn``, translated.

It can be removed when Flower removes them.
"""

from flwr_fisher.legacy.client import client_app, from_numpy_client
from flwr_fisher.legacy.server import History, Server, as_legacy, server_app

__all__ = [
    "History",
    "Server",
    "as_legacy",
    "client_app",
    "from_numpy_client",
    "server_app",
]
