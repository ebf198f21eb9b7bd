"""Students of the clients' networks: a part of `merges.py`, and `students.py`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.size import sized
from harness.timing import seconds
from harness.uploads import Setting, posteriors
from rivals import Normalised, Synthesis, co_boosting, dense
from torch import nn

from flwr_fisher.report import accuracies
from studies.rivals.split import Found, Params, Rivals, started

DENSE, CO_BOOSTING = "DENSE *", "Co-Boosting *"


@dataclass(frozen=True)
class Length:
    """How long a student is taught, and by how much."""

    epochs: int  # each with a step on all images of the former ones
    width: int  # the generator's
    counts: dict[str, int]  # images of a batch, by method


# What a core does in an hour a split, and what was published.
SHORT = {
    name: Length(sized(epochs, 1), 16, {DENSE: 64, CO_BOOSTING: 64})
    for name, epochs in (("mnist", 50), ("imagefolder:CIFAR10", 30))
}
PUBLISHED = Length(
    sized(200, 2), sized(64, 4), {DENSE: sized(256, 8), CO_BOOSTING: sized(128, 8)}
)


def students(setting: Setting, data_dir: Path) -> Found:
    """Return the students' accuracy and cost on one split, by a short training."""
    split = started(setting, data_dir)
    for name in (DENSE, CO_BOOSTING):
        split.run(name, taught(split, setting, name, SHORT[setting.dataset]))
    return split.found


def published(
    setting: Setting, name: str, device: torch.device, data_dir: Path
) -> dict[str, Any]:
    """Return what a student of the published length is worth on one split.

    Its accuracy, what it scored on the server's examples after each epoch, and the
    seconds.
    """
    split, scores = started(setting, data_dir), list[float]()
    split = replace(split, model=split.model.to(device))

    def score(params: Params) -> float:
        scores.append(split.score(params))
        if len(scores) % 20 == 0:
            print(f"{setting.folder.name} {name} epoch {len(scores)}", flush=True)
        return scores[-1]

    make = taught(split, setting, name, PUBLISHED)
    made: list[Params] = []
    took = seconds(lambda: made.append(make(score=score)), device)
    on_gpu = device.type == "cuda"
    return {
        "accuracy": 100 * accuracies(split.model, {name: made[0]}, split.test)[name],
        "scores": scores,
        "seconds": took,
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "torch": torch.__version__,
    }


def taught(
    split: Rivals, setting: Setting, name: str, length: Length
) -> partial[Params]:
    """Return what teaches a student, on the device of the split's model."""
    task, clients = split.task, []
    device = next(split.model.parameters()).device
    for upload in posteriors(setting, task, "kfac"):
        clients.append(task.make_model().to(device))
        clients[-1].load_state_dict(dict(upload.params))
    student = task.make_model().to(device)
    images, count = task.data.train, length.counts[name]
    channels, height, width = images[[0]][0].shape[1:]
    if device.type == "cuda":
        for model in clients:
            model.eval().requires_grad_(False)
        for model in (*clients, student):
            recorded(model, (count, channels, height, width), device)
    method, clip = {DENSE: (dense, None), CO_BOOSTING: (co_boosting, 10.0)}[name]
    return partial(
        method,
        clients,
        student,
        Normalised((channels, height, width), images.mean, images.std),
        num_classes=task.data.num_outputs,
        epochs=length.epochs,
        batch_size=count,
        synthesis=Synthesis(width=length.width, count=count, clip=clip),
        score=split.score,
    )


def recorded(model: nn.Module, shape: Sequence[int], device: torch.device) -> None:
    """Have a network's passes replayed: small networks' launches take most of the time.

    For inputs of one shape, in the mode in which the network is.
    """
    sample = torch.rand(shape, device=device, requires_grad=True)
    torch.cuda.make_graphed_callables(model, (sample,))
