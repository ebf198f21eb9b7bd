"""Every method's model of the same uploads: ours, and Flower's own strategies."""

import hashlib
from collections.abc import Mapping, Sequence

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedMedian, FedTrimmedAvg, Krum, MultiKrum
from rivals.outliers import without_outliers
from torch import Tensor

from flwr_fisher.merge import LocalPosterior, fedfisher
from flwr_fisher.strategies import Policy
from flwr_fisher.testing import LocalGrid
from studies.attacks.tables import BOTH, DEFAULT, ROBUST, STRICT
from studies.attacks.uploads import within_policy

OUTLIER = 1.5
Params = Mapping[str, Tensor]


def merged_by_flower(
    strategy: FedAvg, uploads: Sequence[LocalPosterior], start: Params
) -> Params:
    """Return what a strategy of Flower's makes of the clients' parameters."""
    app = ClientApp()

    @app.train()
    def reply(message: Message, context: Context) -> Message:
        upload = uploads[int(context.node_config["partition-id"])]
        arrays = ArrayRecord({k: v.contiguous() for k, v in upload.params.items()})
        metrics = MetricRecord({"num-examples": int(upload.num_examples)})
        content = RecordDict({"arrays": arrays, "metrics": metrics})
        return Message(content, reply_to=message)

    grid = LocalGrid(app, len(uploads), seed=0)
    initial = ArrayRecord({k: v.clone() for k, v in start.items()})
    result = strategy.start(grid, initial, num_rounds=1)
    state = result.arrays.to_torch_state_dict()
    return {name: value.to(start[name]) for name, value in state.items()}


def rivals(clients: int, attackers: int) -> dict[str, FedAvg]:
    """Return Flower's strategies, told of so many attackers."""
    known = max(1, attackers)
    krum = {"num_malicious_nodes": known, "fraction_evaluate": 0.0}
    return {
        "FedAvg": FedAvg(fraction_evaluate=0.0),
        "Krum": Krum(**krum),
        "MultiKrum": MultiKrum(num_nodes_to_select=clients - known, **krum),
        "trimmed mean": FedTrimmedAvg(beta=known / clients, fraction_evaluate=0.0),
        "median": FedMedian(fraction_evaluate=0.0),
    }


def models(
    uploads: Sequence[LocalPosterior], start: dict[str, Tensor], attackers: int
) -> dict[str, Params]:
    """Return every method's model of the same uploads."""
    checked = within_policy(uploads, start, Policy())
    strict = within_policy(uploads, start, Policy.strict())
    ours: dict[str, Params] = {
        DEFAULT: fedfisher(checked).params,
        ROBUST: fedfisher(without_outliers(checked, OUTLIER).posteriors).params,
        STRICT: fedfisher(strict).params,
        BOTH: fedfisher(without_outliers(strict, OUTLIER).posteriors).params,
    }
    theirs = rivals(len(uploads), attackers)
    return ours | {
        name: merged_by_flower(strategy, uploads, start)
        for name, strategy in theirs.items()
    }


def digest(params: Params) -> bytes:
    """Return what tells models apart."""
    tensors = (value.contiguous().numpy().tobytes() for value in params.values())
    return hashlib.sha256(b"".join(tensors)).digest()
