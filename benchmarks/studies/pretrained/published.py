"""Shipped strategies from published weights, with clients in memory."""

import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context
from harness.jobs import kept
from harness.page import CACHE
from harness.size import sized
from torch import Tensor, nn

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.curvature.models import evaluating
from flwr_fisher.params import Params, load_state, shared_state, state_of
from flwr_fisher.strategies import AFL, FedAvg, FedFisherOneShot, Refinement
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import arrays_to_tensors
from studies.pretrained.cell import Data, Federation, Images
from studies.pretrained.networks import NETWORKS, make
from studies.refinement.runs import counting

AFL_ROW = "AFL: the published features"
ONCE = {
    "FedAvg, the same requests": FedAvg,
    "FedFisher, the default": FedFisherOneShot,
}
ROUNDS = "FedAvg, three rounds of one epoch"
FEW = range(sized(2, 1))  # seeds that have several rounds
Scores = dict[str, float]


class Clients:
    """A federation's clients, which train once: a second strategy loads what is known.

    Parameters
    ----------
    federation : Federation
        Its data and its number of epochs. The learning rate is the library's default.
    data : Data
        Where its images are.
    """

    def __init__(self, federation: Federation, data: Data) -> None:
        parts, _ = data.parts(federation)
        (x, y), test = data.splits["train"], data.splits["test"]
        self.side = NETWORKS[federation.network].side
        self.federation = federation
        self.parts = [torch.tensor(part) for part in parts]
        self.x, self.y = x, y
        order = torch.randperm(len(test[1]), generator=torch.Generator().manual_seed(0))
        chosen = order[: federation.scored]
        self.test = Images(test[0][chosen], test[1][chosen], self.side)
        self.start = {k: v.clone() for k, v in shared_state(self.model()).items()}
        self.trained: dict[int, Params] = {}

    def model(self) -> nn.Module:
        """Return the network as it is published, with a new last layer."""
        model: nn.Module = make(self.federation.network)
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def run(self, strategy: Any, epochs: int, rounds: int = 1) -> dict[str, Scores]:
        """Return what the strategy's model scores, and what it costs."""
        replies, seconds = list[float](), list[float]()
        train = LocalSGD(epochs=epochs)

        def client_fn(context: Context) -> FisherClient:
            client = int(context.node_config["partition-id"])
            own = self.parts[client]
            generator = torch.Generator().manual_seed(client)

            def once(*args: Any) -> Mapping[str, float]:
                if rounds == 1 and client in self.trained:
                    list(args[1])  # which counts its examples
                    load_state(args[0], self.trained[client])
                    return {}
                began = time.perf_counter()
                metrics = train(*args)
                seconds.append(time.perf_counter() - began)
                if rounds == 1:
                    state = state_of(args[0]).items()
                    self.trained[client] = {k: v.clone() for k, v in state}
                return metrics

            images = Images(self.x[own], self.y[own], self.side, generator)
            return FisherClient(self.model(), images, train_fn=once)

        count = len(self.parts)
        app = make_client_app(client_fn, mods=[counting(replies)])
        began = time.perf_counter()
        result = strategy.start(
            LocalGrid(app, count), ArrayRecord(self.start), num_rounds=rounds
        )
        found = self.score(arrays_to_tensors(result.arrays))
        found["seconds"] = time.perf_counter() - began
        found["training"] = sum(seconds)
        found["requests"] = len(replies) / count
        found["MB"] = fmean(replies) * len(replies) / count / 1e3
        if result.unrefined is None:
            return {"": found}
        return {"": found, "as merged": self.score(arrays_to_tensors(result.unrefined))}

    def score(self, params: Params) -> Scores:
        """Return accuracy in percent and cross-entropy on the test images."""
        model, right, loss = self.model(), 0, 0.0
        load_state(model, params)
        with evaluating(model), torch.no_grad():
            for x, y in self.test:
                outputs: Tensor = model(x)
                right += int((outputs.argmax(1) == y).sum())
                loss += float(F.cross_entropy(outputs, y, reduction="sum"))
        count = len(self.test.y)
        return {"accuracy": 100 * right / count, "cross-entropy": loss / count}


def rows(federation: Federation, options: Namespace) -> dict[str, Scores]:
    """Return each row's scores, from disk if they are there."""
    torch.set_num_threads(1)
    path = CACHE / "pretrained" / f"published-{federation.name}.json"
    return kept(path, lambda: _rows(federation, options))  # type: ignore[no-any-return]


def _rows(federation: Federation, options: Namespace) -> dict[str, Scores]:
    folder = CACHE / "pretrained"
    data = Data(federation.network, options.data_dir, torch.device("cpu"), folder)
    clients, own = Clients(federation, data), {"fraction_evaluate": 0.0}
    found = {AFL_ROW: clients.run(AFL(**own), 1)[""]}
    for name, kind in ONCE.items():
        strategy = kind(pretrained=True, refine=Refinement(), **own)
        for part, scores in clients.run(strategy, federation.epochs).items():
            found[f"{name}, {part}" if part else name] = scores
    if federation.seed in FEW:
        strategy = FedAvg(pretrained=True, refine=Refinement(), **own)
        found[ROUNDS] = clients.run(strategy, 1, federation.epochs)[""]
    return found


def gently(federation: Federation) -> Federation:
    """Return the federation with the library's rate for published weights."""
    return replace(federation, lr=0.001)
