"""The methods' strategies."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from flwr.app import ArrayRecord

from flwr_fisher.curvature import Diagonal
from flwr_fisher.params import Params, weighted_mean
from flwr_fisher.strategies import Exchange, FedFish, ServerState, Step, Upload
from flwr_fisher.wire import Additive, FisherUpload, arrays_to_tensors

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


class FedFishProduct(FedFish):
    """The paper's section 5.3: the server knows only each step times its Fisher.

    A client's step is then the mean of the products, which Adam normalises. Its epsilon
    is 1e-16, because products of small Fishers and small steps are far below 1e-8.
    """

    def __init__(self, *, server_lr: float, **options: Any) -> None:
        adam = partial(torch.optim.Adam, lr=server_lr, eps=1e-16)
        super().__init__(**{**options, "server_optimizer": adam})

    def exchanges(self, server_round: int) -> Sequence[Exchange]:
        """Ask for what a secure sum adds up, and use the products alone."""
        (training,) = super().exchanges(server_round)
        asked = {**training.options, "upload": "sums"}
        read = Additive.reader("product", "fisher", "params")
        return [replace(training, options=asked, read=read, step=self._to_products)]

    def _to_products(
        self, state: ServerState, uploads: Sequence[Upload[Additive]]
    ) -> Step:
        weights = [upload.num_examples for upload in uploads]
        products = [upload.payload.part("product") for upload in uploads]
        trained = [upload.payload.part("params") for upload in uploads]
        mean = weighted_mean(products, weights)
        return self._descend(state, mean, products, trained, weights)


PAPER = {"power": 1.0, "balance": 0.0}
# Each method's class, and its options.
STRATEGIES: dict[str, tuple[type[FedFish], dict[str, Any]]] = {
    AVG: (FedAvgAdam, {}),
    FISH: (FedFish, PAPER),
    MENDED: (FedFish, {}),
    LATE: (FedFish, PAPER | {"fisher_source": "last-epoch"}),
    PRODUCT: (FedFishProduct, PAPER),
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
