"""One federation of adapters: pre-trained, shared out, tuned, merged in all ways."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from harness.clients import CHOICE, CPU, Batch, Shuffled, in_batches
from harness.jobs import Numbers
from harness.page import CACHE
from harness.size import sized
from tasks import Splits, load_dataset, partition_indices
from torch import Tensor

from flwr_fisher.client import LocalSGD
from flwr_fisher.client.training import score
from flwr_fisher.curvature.losses import cross_entropy
from flwr_fisher.params import Params
from studies.lora.merges import Client, added, merged, with_added
from studies.lora.model import Transformer, adapted

# Up to which image of the training set.
PRETRAINED, SHARED_OUT = sized((10_000, 50_000), (300, 1500))
CLIENTS, BATCH = 4, 32
IMAGES, SCORED = sized((400, 2000), (40, 100))


@dataclass(frozen=True)
class Job:
    """Clients that tune adapters of one rank, in one way."""

    alpha: float
    frozen: bool
    rank: int
    lr: float
    epochs: int
    seed: int

    @property
    def path(self) -> Path:
        """The file that keeps its numbers."""
        name = "-".join(map(str, vars(self).values()))
        return CACHE / "lora" / f"{name}.json"

    @property
    def turn(self) -> tuple[int, int]:
        """Longest first."""
        return -self.epochs, self.seed


def pretrained_in(data_dir: Path) -> Params:
    """Return the model's parameters after four epochs on upright images."""
    path = CACHE / "lora" / "base.pt"
    if not path.exists():
        data = load_dataset("mnist", data_dir)
        torch.manual_seed(0)
        model = Transformer()
        images = Shuffled(*data.train[:PRETRAINED], BATCH)
        train = LocalSGD(epochs=4, optimizer=partial(torch.optim.AdamW, lr=2e-3))
        train(model, images, CPU, {})
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
    found: Params = torch.load(path)
    return found


def turned(batch: Batch) -> Batch:
    """Return images turned by a quarter."""
    return torch.rot90(batch[0], dims=(2, 3)), batch[1]


def shares(data: Splits, alpha: float, seed: int) -> list[Shuffled]:
    """Return the clients' images: each has classes in proportions of its own."""
    targets = data.train.targets[PRETRAINED:SHARED_OUT]
    parts = partition_indices(
        targets, "dirichlet-client", num_partitions=CLIENTS, alpha=alpha, seed=seed
    )
    chosen = ([PRETRAINED + index for index in part[:IMAGES]] for part in parts)
    return [Shuffled(*turned(data.train[each]), BATCH) for each in chosen]


def scored(data: Splits, seed: int) -> list[Batch]:
    """Return test images; with the choosing seed, images that are no client's."""
    if seed == CHOICE:
        batch = data.train[SHARED_OUT : SHARED_OUT + SCORED]
    else:
        batch = data.test[:SCORED]
    return in_batches(*turned(batch), 1000)


def federate(job: Job, data_dir: Path) -> Numbers:
    """Return the accuracy of each client and each merge."""
    data = load_dataset("mnist", data_dir)
    base = pretrained_in(data_dir)
    train = LocalSGD(epochs=job.epochs, optimizer=partial(torch.optim.AdamW, lr=job.lr))
    torch.manual_seed(job.seed)
    clients = []
    for images in shares(data, job.alpha, job.seed):
        model = adapted(base, job.rank, job.seed, freeze=job.frozen)
        train(model, images, CPU, {})
        clients.append(Client(model, images))
    batches = scored(data, job.seed)

    def accuracy(difference: dict[str, Tensor]) -> float:
        return score(with_added(base, difference), batches, CPU, cross_entropy)[1]

    merges = merged(clients, base, job.rank, frozen=job.frozen)
    return {
        "base": accuracy({}),
        "clients": [accuracy(added(client.model.state_dict())) for client in clients],
        "merges": {name: accuracy(each) for name, each in merges.items()},
    }
