"""Virtual clients with their images in memory, and the images that score a model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from tasks import Task, load_task
from torch import Tensor, nn

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.client.training import Loader, score
from flwr_fisher.curvature.losses import cross_entropy
from flwr_fisher.testing import LocalGrid
from harness.networks import NETWORKS
from harness.size import sized

CHOICE = 100  # the seed that hyperparameters are chosen with
HELD = sized(5000, 200)  # validation images, which no client has
CPU = torch.device("cpu")
Batch = tuple[Tensor, Tensor]


class Shuffled:
    """A client's images in batches of at most `size`, in a new order each epoch."""

    def __init__(self, x: Tensor, y: Tensor, size: int) -> None:
        self.dataset = range(len(y))  # clients count their examples by it
        self.x, self.y, self.size = x, y, size

    def __iter__(self) -> Iterator[Batch]:
        for chosen in torch.randperm(len(self.y)).split(self.size):
            yield self.x[chosen], self.y[chosen]


@dataclass(frozen=True)
class World:
    """A task, its clients' images, and those that score the server's model."""

    task: Task
    clients: Sequence[Loader]
    held: Sequence[Batch]
    network: Callable[[], nn.Module] | None = None  # in place of the task's model

    def make_model(self) -> nn.Module:
        """Return the model with the task's initial weights."""
        if self.network is None:
            return self.task.make_model()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.task.seed)
            return self.network()


def shared_out(
    seed: int, data_dir: Path, dataset: str = "mnist", **options: Any
) -> Task:
    """Load a data set and share it out; 5000 validation images are no client's."""
    return load_task(
        dataset=dataset, data_dir=data_dir, seed=seed, validation=HELD, **options
    )


def scored_images(task: Task, seed: int) -> Any:
    """Return the test images; with the choosing seed, the validation images."""
    return task.validation if seed == CHOICE else task.data.test


def share_out(
    seed: int,
    data_dir: Path,
    pick: Callable[[int, int], list[int]],
    batches: Callable[[Tensor, Tensor], Loader],
    scored_at_once: int,
    model: str,
    **options: Any,
) -> World:
    """Return the world where a client has some of its images of a split of MNIST's.

    Of another data set's, where `options` name one. `model` is a task's or one of
    :data:`NETWORKS`.
    `pick` takes a client and how many images it has, and returns which ones to keep.
    """
    network = NETWORKS.get(model)
    named = "logistic" if network else model  # a task's, which nothing then trains
    task, clients = shared_out(seed, data_dir, model=named, **options), []
    for client in range(task.num_partitions):
        images = task.train_images(client)
        clients.append(batches(*images[pick(client, len(images))]))
    scored = scored_images(task, seed)
    held = scored[list(range(len(scored)))]
    return World(task, clients, in_batches(*held, scored_at_once), network)


def in_batches(x: Tensor, y: Tensor, size: int) -> list[Batch]:
    """Return batches in order."""
    return list(zip(x.split(size), y.split(size), strict=True))


def grid_of(
    clients: Sequence[Loader],
    model: nn.Module,
    train: LocalSGD,
    seed: int,
    state_dir: str | None = None,
) -> LocalGrid:
    """Return a grid whose clients train on these loaders, all with the same model."""

    def client_fn(context: Context) -> FisherClient:
        loader = clients[int(context.node_config["partition-id"])]
        return FisherClient(
            model, loader, train_fn=train, device=CPU, state_dir=state_dir
        )

    return LocalGrid(make_client_app(client_fn), len(clients), seed=seed)


def scores(
    model: nn.Module, tensors: Mapping[str, Tensor], held: Sequence[Batch]
) -> dict[str, float]:
    """Return accuracy and loss of a model with these parameters, which it keeps."""
    model.load_state_dict(tensors)
    loss, accuracy, _ = score(model, held, CPU, cross_entropy)
    return {"accuracy": accuracy, "loss": loss}
