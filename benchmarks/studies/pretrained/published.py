"""Shipped strategies from pre-trained weights, with clients in memory."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context
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
TRAINED_ROW = "FedAvg, the same requests"
ONCE = {TRAINED_ROW: FedAvg, "FedFisher, the default": FedFisherOneShot}
MERGED = "as merged"
STEPS, STEPS_ROW = 3, "FedFisher, then three steps"
ROUNDS = "FedAvg, a round for each epoch"
MORE_ROUNDS = "FedFisher, a round for each epoch"
FEW = range(sized(2, 1))  # seeds that have several rounds
Scores = dict[str, float]


@dataclass
class Problem:
    """A pre-trained model, its clients and its test data.

    Clients train once: a second strategy of one round loads what they have trained.

    Parameters
    ----------
    model : Callable[[], nn.Module]
        Makes the model as it is published, with a new last layer.
    loader : Callable[[int], Iterable]
        Makes a client's batches.
    clients : int
        How many there are.
    test : Iterable
        Batches to score a model on.
    train : Callable[[int], LocalSGD]
        Makes the clients' loop, from a number of epochs.
    epochs : int
        Of a round.
    """

    model: Callable[[], nn.Module]
    loader: Callable[[int], Iterable[Any]]
    clients: int
    test: Iterable[Any]
    train: Callable[[int], LocalSGD]
    epochs: int
    trained: dict[int, Params] = field(default_factory=dict)

    def rows(self, *, rounds: bool, more: bool = False) -> dict[str, Scores]:
        """Return each row's scores.

        With `rounds` also FedAvg's of several rounds, and with `more` FedFisher's, and
        those after steps.
        """
        torch.set_num_threads(1)
        own = {"fraction_evaluate": 0.0}
        found = {AFL_ROW: self.run(AFL(**own))[""]}
        known = {**own, "pretrained": True, "refine": Refinement()}
        for name, kind in ONCE.items():
            for part, scores in self.run(kind(**known)).items():
                found[f"{name}, {part}" if part else name] = scores
        if rounds:
            found[ROUNDS] = self.run(FedAvg(**known), self.epochs)[""]
        if more:
            steps = FedFisherOneShot(**{**known, "refine": Refinement(steps=STEPS)})
            found[STEPS_ROW] = self.run(steps)[""]
            again = FedFisherOneShot(**known)
            found[MORE_ROUNDS] = self.run(again, self.epochs)[""]
        return found

    def run(self, strategy: Any, rounds: int = 1) -> dict[str, Scores]:
        """Return what the strategy's model scores, and what it costs.

        Of several rounds, each has one epoch.
        """
        replies, seconds, once = list[float](), list[float](), rounds == 1
        train = self.train(self.epochs if once else 1)

        def client_fn(context: Context) -> FisherClient:
            client = int(context.node_config["partition-id"])

            def loop(*args: Any) -> Mapping[str, float]:
                if once and client in self.trained:
                    list(args[1])  # which counts its examples
                    load_state(args[0], self.trained[client])
                    return {}
                began = time.perf_counter()
                metrics = train(*args)
                seconds.append(time.perf_counter() - began)
                if once:
                    state = state_of(args[0]).items()
                    self.trained[client] = {k: v.clone() for k, v in state}
                return metrics

            return FisherClient(self.model(), self.loader(client), train_fn=loop)

        count = self.clients
        app = make_client_app(client_fn, mods=[counting(replies)])
        began = time.perf_counter()
        start = ArrayRecord(shared_state(self.model()))
        result = strategy.start(LocalGrid(app, count), start, num_rounds=rounds)
        found = self.score(arrays_to_tensors(result.arrays))
        found["seconds"] = time.perf_counter() - began
        found["training"] = sum(seconds)
        found["requests"] = len(replies) / count
        found["MB"] = fmean(replies) * len(replies) / count / 1e3
        if result.unrefined is None:
            return {"": found}
        return {"": found, MERGED: self.score(arrays_to_tensors(result.unrefined))}

    def score(self, params: Params) -> Scores:
        """Return accuracy in percent and cross-entropy on the test data."""
        model, right, count, loss = self.model(), 0, 0, 0.0
        load_state(model, params)
        with evaluating(model), torch.no_grad():
            for x, y in self.test:
                outputs: Tensor = model(x)
                right, count = (
                    right + int((outputs.argmax(1) == y).sum()),
                    count + len(y),
                )
                loss += float(F.cross_entropy(outputs, y, reduction="sum"))
        return {"accuracy": 100 * right / count, "cross-entropy": loss / count}


def of_images(federation: Federation, data: Data) -> Problem:
    """Return a federation of `cell`, at the library's rate for published weights."""
    parts, _ = data.parts(federation)
    (x, y), test = data.splits["train"], data.splits["test"]
    network = NETWORKS[federation.network]
    order = torch.randperm(len(test[1]), generator=torch.Generator().manual_seed(0))
    chosen = order[: federation.scored]

    def loader(client: int) -> Images:
        own = torch.tensor(parts[client])
        generator = torch.Generator().manual_seed(client)
        return Images(x[own], y[own], network.side, generator)

    def model() -> nn.Module:
        made = make(federation.network)
        return made.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    return Problem(
        model,
        loader,
        len(parts),
        Images(test[0][chosen], test[1][chosen], network.side),
        lambda epochs: LocalSGD(epochs=epochs),
        federation.epochs,
    )
