"""Personalisation: how well held-out clients fine-tune the server's model."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from flwr.app import ArrayRecord, MetricRecord
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler

from flwr_fisher.client import LocalSGD, cross_entropy, score
from flwr_fisher.randomness import derive_seed, seeded
from flwr_fisher.wire import arrays_to_tensors
from measures.combine import means
from measures.grid import MeasuredGrid

CPU = torch.device("cpu")


class Personalisation:
    """Fine-tuning on held-out clients, as an ``evaluate_fn``.

    FedFish, sections 4 and 5.2.2: a held-out client fine-tunes a copy of the server's
    model on a `fraction` of its training data. The model is scored before (zero-shot)
    and after, on the half of the data that is never used for fine-tuning. The grid's
    seed and the client's number determine the halves, so every round and fraction is
    scored on the same examples. The metrics are plain means over the clients.

    Parameters
    ----------
    grid : MeasuredGrid
        The grid with which the strategy is started; it holds clients out.
    clients : Sequence[DataLoader]
        All clients' batches, by their numbers; each has a sampler of batches.
    model : nn.Module
        The network.
    train : LocalSGD
        How clients train.
    fraction, epochs, lr
        The share of the examples to fine-tune on, in (0, 0.5]; the passes over them;
        and the learning rate, by default that of `train`.
    name : str
        The beginning of the metrics' names.
    """

    def __init__(
        self,
        grid: MeasuredGrid,
        clients: Sequence[DataLoader[Any]],
        model: nn.Module,
        train: LocalSGD,
        *,
        fraction: float = 0.5,
        epochs: int = 1,
        lr: float | None = None,
        name: str = "personalised",
    ) -> None:
        self.grid, self.clients, self.name = grid, clients, name
        self.model, self.fraction = model, fraction
        self.train = replace(train, epochs=epochs, lr=train.lr if lr is None else lr)

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """Return the scores of held-out clients, before and after fine-tuning."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(arrays_to_tensors(arrays), strict=False)
        rows = [self._scores(client, model) for client in self.grid.held_out_clients()]
        return MetricRecord({**means(rows), f"{self.name}-clients": len(rows)})

    def _scores(self, client: int, server_model: nn.Module) -> dict[str, float]:
        loader, model = self.clients[client], copy.deepcopy(server_model)
        seed = derive_seed("personalise", self.grid.seed, client)
        order = torch.randperm(
            len(loader.dataset),  # type: ignore[arg-type]
            generator=torch.Generator().manual_seed(seed),
        ).tolist()
        half = len(order) // 2
        tuned = order[: min(half, max(1, round(self.fraction * len(order))))]
        unseen = _part(loader, order[half:])
        before = score(model, unseen, CPU, cross_entropy)
        with seeded(derive_seed(seed, client)):
            self.train(model, _part(loader, SubsetRandomSampler(tuned)), CPU, {})
        after = score(model, unseen, CPU, cross_entropy)
        names = ("zero-shot", before), (self.name, after)
        return {
            f"{name}-{key}": value
            for name, scores in names
            for key, value in zip(("loss", "accuracy"), scores, strict=False)
        }


def _part(loader: DataLoader[Any], order: Iterable[int]) -> DataLoader[Any]:
    """Return batches of the same size from a part of the data set."""
    size = loader.sampler.batch_size  # type: ignore[attr-defined]
    sampler = BatchSampler(order, size, drop_last=False)  # type: ignore[arg-type]
    return DataLoader(loader.dataset, sampler=sampler, batch_size=None)
