"""The methods' strategies."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from flwr.app import ArrayRecord

from flwr_fisher.curvature import Diagonal
from flwr_fisher.params import Params, flatten, scale
from flwr_fisher.strategies import Exchange, FedFish
from flwr_fisher.wire import FisherUpload, arrays_to_tensors

AVG, FISH = "FedAvg", "FedFish"
LATE, PRODUCT = "FedFish, last-epoch", "FedFish, product"
UNIT = "FedFish, unit trace"


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


class UnitTrace(FedFish):
    """FedFish with every client's Fisher scaled to the same sum, before all else."""

    def exchanges(self, server_round: int) -> Sequence[Exchange]:
        """Ask as FedFish does; scale what arrives."""
        (exchange,) = super().exchanges(server_round)

        def read(record: ArrayRecord, like: Params) -> FisherUpload:
            upload = FisherUpload.from_arrays(record, like)
            return FisherUpload(upload.params, unit_trace(upload.curvature.diagonal()))

        return [replace(exchange, read=read)]


def unit_trace(fisher: Params) -> Diagonal:
    """Return a Fisher whose entries have the mean one."""
    flat = flatten(fisher).double()
    return Diagonal(scale(fisher, float(1 / flat.mean()) if flat.any() else 0.0))


# Each method's class, and its options.
STRATEGIES: dict[str, tuple[type[FedFish], dict[str, Any]]] = {
    AVG: (FedAvgAdam, {"codec": "lossless"}),
    FISH: (FedFish, {"codec": "lossless"}),
    LATE: (FedFish, {"codec": "lossless", "fisher_source": "last-epoch"}),
    PRODUCT: (FedFish, {"upload": "product"}),
    UNIT: (UnitTrace, {"codec": "lossless"}),
}


def make_strategy(
    method: str, server_lr: float, fraction_train: float, seed: int
) -> FedFish:
    """Return the method's strategy; all have the same server optimiser."""
    made, options = STRATEGIES[method]
    return made(
        server_optimizer="adam",
        server_lr=server_lr,
        fraction_train=fraction_train,
        fraction_evaluate=0.0,
        seed=seed,
        **options,
    )
