"""What an attacker trains on: the task's images, poisoned; the same partition."""

from dataclasses import replace

import torch
from tasks import Examples, Task
from torch import Tensor

TARGET = 0  # the class that a backdoor's trigger calls for
SIDE = 4  # of the trigger, in pixels
POISONS = ("label flips", "backdoor")


def poisoned(task: Task, kind: str) -> Task:
    """Return the task with its training images poisoned.

    ``label flips``: every label y is 9 - y. ``backdoor``: every second image has the
    trigger and is labelled :data:`TARGET`. Test and validation images stay.
    """
    assert kind in POISONS
    assert not task.data.train.is_text
    train = task.data.train
    last = task.data.num_classes - 1
    if kind == "label flips":
        train = replace(train, targets=last - train.targets)
    else:
        chosen = torch.arange(len(train)) % 2 == 0
        data = torch.where(
            chosen.reshape(-1, 1, 1, 1), with_trigger(train.data), train.data
        )
        train = replace(
            train, data=data, targets=train.targets.masked_fill(chosen, TARGET)
        )
    return replace(task, data=replace(task.data, train=train))


def with_trigger(pixels: Tensor) -> Tensor:
    """Return images, uint8 ``[n, C, H, W]``, with a white square in the last corner."""
    marked = pixels.clone()
    marked[..., -SIDE:, -SIDE:] = 255
    return marked


def triggered(images: Examples) -> Examples:
    """Return the images of other classes with the trigger, labelled as its target.

    The accuracy on them is how often the backdoor works.
    """
    others = (images.targets != TARGET).nonzero().flatten().tolist()
    chosen = images.subset(others)
    return replace(
        chosen,
        data=with_trigger(chosen.data),
        targets=torch.full_like(chosen.targets, TARGET),
    )
