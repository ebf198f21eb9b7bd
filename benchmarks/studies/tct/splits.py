"""How images are shared out, and the model that each split trains."""

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from harness.clients import Shuffled, World, share_out
from harness.size import sized

CLIENTS, EXAMPLES, BATCH = 10, sized(500, 30), 64


@dataclass(frozen=True)
class Split:
    """How the images are shared out, and to train what."""

    name: str
    title: str
    partition: str
    classes: int = 2
    alpha: float = 0.1
    dataset: str = "mnist"
    model: str = "lenet-bias"
    epochs: int = 5


SPLITS = {
    split.name: split
    for split in (
        Split("c1", "#C = 1", "classes-per-client", 1),
        Split("c2", "#C = 2", "classes-per-client", 2),
        Split("dirichlet", "Dirichlet(0.1)", "dirichlet-class"),
    )
}
# The same for a model whose loss is convex.
CONVEX = {
    f"{name}-logistic": replace(SPLITS[name], name=f"{name}-logistic", model="logistic")
    for name in ("c2", "dirichlet")
}
_MILD = Split("dirichlet0.5", "Dirichlet(0.5)", "dirichlet-class", alpha=0.5)
CIFAR = {
    f"cifar-{split.name}": replace(
        split,
        name=f"cifar-{split.name}",
        dataset="imagefolder:CIFAR10",
        model="small ResNet",
        epochs=2,
    )
    for split in sized((*SPLITS.values(), _MILD), (_MILD,))
}
EVERY = SPLITS | CONVEX | CIFAR


@lru_cache(maxsize=2)
def world(split: str, seed: int, data_dir: Path) -> World:
    """Share images out; a client keeps at most 500."""
    order, own = torch.Generator().manual_seed(seed), EVERY[split]

    def pick(client: int, count: int) -> list[int]:
        chosen = torch.randperm(count, generator=order)[:EXAMPLES]
        found: list[int] = chosen.sort().values.tolist()
        return found

    return share_out(
        seed,
        data_dir,
        pick,
        partial(Shuffled, size=BATCH),
        scored_at_once=EXAMPLES,
        dataset=own.dataset,
        model=own.model,
        partition=own.partition,
        classes_per_client=own.classes,
        alpha=own.alpha,
        num_partitions=CLIENTS,
    )
