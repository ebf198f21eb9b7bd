"""Refine models of clients that have trained, with the shipped strategies."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message
from harness.size import sized
from harness.uploads import Setting, posteriors
from torch import nn
from unseen import trained

from flwr_fisher.client import FisherClient, cross_entropy, make_client_app, score
from flwr_fisher.params import Params, shared_state
from flwr_fisher.strategies import (
    CurvatureStrategy,
    Exchange,
    FedAvg,
    FedFisherOneShot,
    Refinement,
    ServerState,
)
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import arrays_to_tensors

STEPS = sized((0, 1, 3, 6, 8), (0, 1))
FEDFISHER, FEDAVG, UNTRAINED = "FedFisher", "FedAvg", "untrained"
UNTRAINED_AT = sized(0.1, 0.2)  # the α at which the untrained network is refined
Scores = dict[str, dict[str, float]]  # accuracy, loss and kB, by row


@dataclass(frozen=True)
class Clients:
    """Clients that have trained, and examples that score a model."""

    model: nn.Module
    start: Params
    trained: Sequence[Params]
    loaders: Sequence[Iterable[Any]]
    sizes: Sequence[int]
    scoring: Sequence[Any]

    @classmethod
    def of_setting(cls, setting: Setting, data_dir: Path) -> "Clients":
        """Return those of a split of merges.py; what was held out, if any, scores."""
        task = setting.task(data_dir)
        uploads = posteriors(setting, task, "kfac")
        # Convolutions are quicker in this layout.
        last = {"memory_format": torch.channels_last}
        model = task.make_model().to(**last)
        loaders = (
            task.eval_loader(task.train_images(client), batch_size=128)
            for client in range(setting.clients)
        )
        held_out = task.eval_loader(task.validation) if setting.hold_out else None
        return cls(
            model,
            {key: value.clone() for key, value in shared_state(model).items()},
            [upload.params for upload in uploads],
            [[(x.to(**last), y) for x, y in loader] for loader in loaders],
            [task.num_examples(client) for client in range(setting.clients)],
            [(x.to(**last), y) for x, y in held_out or task.test_loader(128)],
        )

    @classmethod
    def of_unseen(cls, name: str, seed: int, data_dir: Path) -> "Clients":
        """Return those of a split of unseen.py."""
        split = trained(name, seed, data_dir)
        batches = [
            [*zip(x.split(256), y.split(256), strict=True)] for x, y in split.examples
        ]
        return cls(
            split.model,
            split.start,
            [upload.params for upload in split.uploads],
            batches,
            [len(y) for _, y in split.examples],
            split.scored,
        )

    def load(self, client: int, *, untrained: bool = False) -> Any:
        """Return a client's training: it loads what it has trained."""
        params = self.start if untrained else self.trained[client]

        def train(model: nn.Module, *_: Any) -> dict[str, float]:
            model.load_state_dict(dict(params), strict=False)
            return {}

        return train

    def app(self, train_fn: Callable[[int], Any], mods: list[Any]) -> Any:
        """Return an app of clients with these trainings."""

        def client_fn(context: Context) -> FisherClient:
            own = int(context.node_config["partition-id"])
            return FisherClient(
                self.model,
                self.loaders[own],
                train_fn=train_fn(own),
                num_examples=self.sizes[own],
                device="cpu",
            )

        return make_client_app(client_fn, mods=mods)

    def score(self, params: Params) -> dict[str, float]:
        """Return a model's accuracy in per cent, and its cross-entropy."""
        self.model.load_state_dict(dict(params), strict=False)
        where = torch.device("cpu")
        loss, accuracy, _ = score(self.model, self.scoring, where, cross_entropy)
        return {"accuracy": 100 * accuracy, "loss": loss}


class Recorded(CurvatureStrategy):
    """A strategy that keeps the model before each of its exchanges."""

    def exchanges(self, server_round: int) -> Sequence[Exchange[Any]]:
        """Return the strategy's own exchanges."""
        self.models: list[Params] = []
        every = super().exchanges(server_round)  # type: ignore[safe-super]
        return [replace(each, prepare=partial(self._keep, each)) for each in every]

    def _keep(
        self, exchange: Exchange[Any], before: ServerState, now: ServerState
    ) -> Exchange[Any] | None:
        self.models.append(now.params)
        return exchange.prepare(before, now) if exchange.prepare else exchange


def counting(kilobytes: list[float]) -> Any:
    """Return a Flower mod that adds the kB of each of a client's replies to a list."""

    def mod(message: Message, context: Context, call: Any) -> Message:
        reply: Message = call(message, context)
        arrays = chain.from_iterable(
            record.values() for record in reply.content.array_records.values()
        )
        kilobytes.append(sum(len(each.data) for each in arrays) / 1e3)
        return reply

    return mod


def refined(
    clients: Clients, start: str, refine: Refinement
) -> tuple[Params, list[Params], list[float]]:
    """Return a start, its model after each request, and the kB of each request.

    The models are those after the head, and after each step.
    """
    kind = FedFisherOneShot if start == FEDFISHER else FedAvg
    recorded = type(kind.__name__, (Recorded, kind), {})
    strategy = recorded(fraction_evaluate=0.0, refine=refine)
    replies, count = list[float](), len(clients.loaders)
    train_fn = partial(clients.load, untrained=start == UNTRAINED)
    app = clients.app(train_fn, [counting(replies)])
    result = strategy.start(LocalGrid(app, count), ArrayRecord(dict(clients.start)))
    # Of each exchange but the training: sums, losses, gradients, a loss.
    parts = [replies[i : i + count] for i in range(count, len(replies), count)]
    assert result.unrefined is not None
    # The model after a step is that before the exchange after the next.
    models = strategy.models[-refine.steps :] if refine.steps else []
    models = [*models, arrays_to_tensors(result.arrays)]
    return arrays_to_tensors(result.unrefined), models, [fmean(own) for own in parts]


def rows(clients: Clients, starts: Sequence[str]) -> Scores:
    """Return what each start scores, and with the head and steps after it."""
    torch.set_num_threads(1)
    found: Scores = {}
    for name in starts:
        model, models, sent = refined(clients, name, Refinement(steps=STEPS[-1]))
        found[name] = {**clients.score(model), "kB": 0.0}
        for steps in STEPS:
            own = sent[: 2 + steps] + (sent[-1:] if steps else [])
            scores = {**clients.score(models[steps]), "kB": sum(own)}
            found[f"{name}, {titled(steps)}"] = scores
    return found


def of_split(setting: Setting, data_dir: Path) -> Scores:
    """Return the rows of a split of merges.py."""
    starts = [FEDFISHER, FEDAVG]
    if setting.alpha == UNTRAINED_AT:
        starts.append(UNTRAINED)
    return rows(Clients.of_setting(setting, data_dir), starts)


def of_unseen(name: str, seed: int, data_dir: Path) -> Scores:
    """Return the rows of a split of unseen.py."""
    clients = Clients.of_unseen(name, seed, data_dir)
    return rows(clients, [FEDFISHER, FEDAVG, UNTRAINED])


def titled(steps: int) -> str:
    """Return what is done after the merge."""
    many = "steps" if steps > 1 else "step"
    return f"head, {steps} {many}" if steps else "head"
