"""The methods' strategies."""

from collections.abc import Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord

from flwr_fisher.curvature import Diagonal
from flwr_fisher.params import Params
from flwr_fisher.strategies import Exchange, FedFish
from flwr_fisher.wire import FisherUpload, arrays_to_tensors

AVG, FISH = "FedAvg", "FedFish"
LATE, PRODUCT = "FedFish, last-epoch", "FedFish, product"
BALANCED, ROOT = "FedFish, balance 1", "FedFish, power 1/2"
MENDED = "FedFish (default)"


class FedAvgAdam(FedFish):
    """FedAvg in FedFish's code: no client computes a Fisher, and each counts as ones.

    Equal Fishers give the plain weighted mean, bit for bit.
    """

    def exchanges(self, server_round: int) -> Sequence[Exchange]:
        """Ask for training alone."""

        def read(record: ArrayRecord, like: Params) -> FisherUpload:
            params = arrays_to_tensors(record)
            ones = {key: torch.ones_like(value) for key, value in params.items()}
            return FisherUpload(params, Diagonal(ones))

        return [Exchange({}, read, self._step)]


PAPER = {"power": 1.0, "balance": 0.0}
# Each method's class, and its options.
STRATEGIES: dict[str, tuple[type[FedFish], dict[str, Any]]] = {
    AVG: (FedAvgAdam, {}),
    FISH: (FedFish, PAPER),
    MENDED: (FedFish, {}),
    LATE: (FedFish, PAPER | {"fisher_source": "last-epoch"}),
    PRODUCT: (FedFish, PAPER | {"upload": "product"}),
    BALANCED: (FedFish, PAPER | {"balance": 1.0}),
    ROOT: (FedFish, PAPER | {"power": 0.5}),
}


def make_strategy(
    method: str, server_lr: float, fraction_train: float, seed: int
) -> FedFish:
    """Return the method's strategy; all have the same server optimiser."""
    made, options = STRATEGIES[method]
    if method != PRODUCT:
        options = options | {"codec": "lossless"}
    return made(
        server_optimizer="adam",
        server_lr=server_lr,
        fraction_train=fraction_train,
        fraction_evaluate=0.0,
        seed=seed,
        **options,
    )
