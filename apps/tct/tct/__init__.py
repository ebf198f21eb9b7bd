"""TCT (train, convexify, train): FedAvg, and then a convex problem for all clients."""

from importlib.util import find_spec

if find_spec("flwr_fisher") is None:
    raise ImportError(
        "flwr-fisher is not installed where this app runs: `pip install "
        "'/path/to/flwr-fisher[all]'` in the environment of `flwr run`, then end a "
        'SuperLink of another environment, by `pkill -u "$(id -un)" -f '
        '"flower-superlink .*127.0.0.1:39093"`'
    )
