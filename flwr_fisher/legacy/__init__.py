"""Apps of Flower's older API, ``NumPyClient`` and ``server_fn``, translated.

It can be removed when Flower removes them.
"""

from flwr_fisher.legacy.client import client_app as client_app
from flwr_fisher.legacy.client import from_numpy_client as from_numpy_client
from flwr_fisher.legacy.server import History as History
from flwr_fisher.legacy.server import Server as Server
from flwr_fisher.legacy.server import as_legacy as as_legacy
from flwr_fisher.legacy.server import server_app as server_app
