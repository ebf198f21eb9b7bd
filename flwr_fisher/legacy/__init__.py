"""Apps of Flower's older API: translated at the door.

``NumPyClient``, and what ``ServerApp(server_fn=...)`` takes, moved to ``flwr.compat``.
This room goes when Flower drops them. No other imports it; it imports none of them.
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
