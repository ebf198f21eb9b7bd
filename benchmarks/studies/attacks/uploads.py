"""What hostile clients upload in place of honest ones, on one split."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from flwr.app import MetricRecord
from harness.poison import triggered
from harness.size import SMOKE
from harness.uploads import Setting, fisher_within_budget, posteriors
from tasks import Task
from tasks.models import make_model
from torch import Tensor

from flwr_fisher.merge import LocalPosterior
from flwr_fisher.params import shared_state
from flwr_fisher.server.policy import Sizes
from flwr_fisher.strategies import Policy, Upload
from flwr_fisher.wire import FisherUpload

ATTACKERS = 2  # at most: the first clients
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Federation:
    """A split's clients: what each uploads if it is honest, and what if it is not."""

    setting: Setting
    data_dir: Path

    @cached_property
    def task(self) -> Task:
        """The split."""
        return self.setting.task(self.data_dir)

    @cached_property
    def honest(self) -> list[LocalPosterior]:
        """All clients' honest uploads."""
        return posteriors(self.setting, self.task)

    @cached_property
    def start(self) -> dict[str, Tensor]:
        """The parameters that all clients start from."""
        return shared_state(self.task.make_model())

    @cached_property
    def flipped(self) -> list[LocalPosterior]:
        """The attackers' uploads after training on flipped labels."""
        return self._poisoned("label flips")

    @cached_property
    def backdoored(self) -> list[LocalPosterior]:
        """The attackers' uploads after training with a backdoor."""
        return self._poisoned("backdoor")

    def _poisoned(self, kind: str) -> list[LocalPosterior]:
        setting = replace(self.setting, poison=kind)
        return posteriors(setting, setting.task(self.data_dir), clients=range(2))

    @cached_property
    def random(self) -> list[LocalPosterior]:
        """Fresh initialisations, with the Fisher of an attacker's images there."""
        found, shape = [], self.task.data.shape
        for client in range(ATTACKERS):
            seed = 10_000 + 10 * self.setting.seed + client
            model = make_model(
                self.setting.model, shape=shape, num_classes=10, seed=seed
            )
            loader = self.task.eval_loader(self.task.train_images(client), 64)
            count = self.task.num_examples(client)
            curvature = fisher_within_budget(model, loader, client, count)
            found.append(LocalPosterior(shared_state(model), curvature, count))
        return found

    def scored(self, most: int) -> tuple[list[Batch], list[Batch]]:
        """Return images that models are scored on, plain and with the trigger.

        They are evenly spaced: the first half of MNIST's test images is the easier one.
        """
        held = self.task.validation if self.setting.hold_out else self.task.data.test
        some = held.subset(list(range(0, len(held), len(held) // most)))
        return [
            list(self.task.eval_loader(images, 1000))
            for images in (some, triggered(some))
        ]

    def attacked(self, attack: str, attackers: int) -> list[LocalPosterior]:
        """Return the uploads when so many clients, the first ones, attack."""
        return [
            ATTACKS[attack](self, index) if index < attackers else upload
            for index, upload in enumerate(self.honest)
        ]


def _moved(
    start: dict[str, Tensor], upload: LocalPosterior, factor: float
) -> LocalPosterior:
    """Return an upload whose step from the start is that many times as long."""
    params = {k: start[k] + factor * (v - start[k]) for k, v in upload.params.items()}
    return replace(upload, params=params)


def _spiked(upload: LocalPosterior) -> LocalPosterior:
    return replace(upload, curvature=upload.curvature.scaled(1e6))


def _lied(upload: LocalPosterior) -> LocalPosterior:
    return replace(upload, num_examples=1e9)


Make = Callable[[Federation, int], LocalPosterior]
ATTACKS: dict[str, Make] = {
    "label flips": lambda f, i: f.flipped[i],
    "sign flip": lambda f, i: _moved(f.start, f.honest[i], -1),
    "sign flip × 10": lambda f, i: _moved(f.start, f.honest[i], -10),
    "scaled × 10": lambda f, i: _moved(f.start, f.honest[i], 10),
    "scaled × 10⁴": lambda f, i: _moved(f.start, f.honest[i], 1e4),
    "F × 10⁶": lambda f, i: _spiked(f.honest[i]),
    "F × 10⁶, label flips": lambda f, i: _spiked(f.flipped[i]),
    "F × 10⁶, random model": lambda f, i: _spiked(f.random[i]),
    "n = 10⁹": lambda f, i: _lied(f.honest[i]),
    "n = 10⁹, label flips": lambda f, i: _lied(f.flipped[i]),
    "n = 10⁹, random model": lambda f, i: _lied(f.random[i]),
    "random model": lambda f, i: f.random[i],
    "backdoor": lambda f, i: f.backdoored[i],
    "backdoor × 10": lambda f, i: _moved(f.start, f.backdoored[i], 10),
    "n, F, label flips": lambda f, i: _lied(_spiked(f.flipped[i])),
    "n, F, backdoor": lambda f, i: _lied(_spiked(f.backdoored[i])),
    "n, F, sign flip × ½": lambda f, i: _lied(
        _spiked(_moved(f.start, f.honest[i], -0.5))
    ),
}
if SMOKE:
    ATTACKS = {name: ATTACKS[name] for name in ("sign flip", "n, F, backdoor")}
BACKDOORS = tuple(name for name in ATTACKS if "backdoor" in name)


def within_policy(
    uploads: Sequence[LocalPosterior], start: dict[str, Tensor], policy: Policy
) -> list[LocalPosterior]:
    """Return what a server's policy leaves of uploads.

    What a client holds of a layer's curvature is left to the merge, as
    ``FedFisherOneShot`` does.
    """
    policy = replace(policy, max_curvature=math.inf)
    sent = [
        Upload(
            index,
            f"partition-{index}",
            upload.num_examples,
            FisherUpload(upload.params, upload.curvature),
            MetricRecord(),
            num_bytes=0,
        )
        for index, upload in enumerate(uploads)
    ]
    sizes = [Sizes.of(upload.payload, start) for upload in sent]
    lengths = policy.references(sizes, {})
    limited = policy.limit(sent, sizes, start, lengths)
    return [upload.payload.posterior(upload.num_examples) for upload in limited]


def length(start: Mapping[str, Tensor], upload: LocalPosterior) -> float:
    """Return the length of an upload's step from the start, in float64."""
    squares = (
        (value.double() - start[name].double()).square().sum()
        for name, value in upload.params.items()
    )
    return float(torch.stack(list(squares)).sum().sqrt())
