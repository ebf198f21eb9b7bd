"""LocalSGD after an epoch: what it must have back to go on, bit for bit."""

from collections.abc import Mapping
from typing import Any

import torch

from flwr_fisher.client.checkpoint import TrainingCheckpoint


def generators_of(loader: object) -> list[torch.Generator]:
    """Return a loader's own generators of random numbers, each once.

    Examples
    --------
    >>> own = torch.Generator()
    >>> loader = torch.utils.data.DataLoader([1, 2], shuffle=True, generator=own)
    >>> generators_of(loader) == [own]
    True
    """
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), getattr(batches, "sampler", None))
    owners = (loader, batches, *samplers)
    own = [getattr(owner, "generator", None) for owner in owners]
    return list(dict.fromkeys(g for g in own if isinstance(g, torch.Generator)))


def has_state(part: object) -> bool:
    """Return whether something has a state of its own to be kept."""
    return hasattr(part, "load_state_dict")


class KeptTraining:
    """What a training must have back to go on, on the client's disk.

    Parameters
    ----------
    checkpoint : TrainingCheckpoint
        Where it is kept.
    parts : Mapping[str, Any]
        Model, optimiser and whatever else has a ``state_dict``.
    generators : list[torch.Generator]
        The loader's own.
    """

    def __init__(
        self,
        checkpoint: TrainingCheckpoint,
        parts: Mapping[str, Any],
        generators: list[torch.Generator],
    ) -> None:
        self.checkpoint, self.parts = checkpoint, parts
        self.generators = generators

    def load(self) -> tuple[int, int, float]:
        """Put all back; return the last epoch and step, and the epoch's mean loss."""
        if (saved := self.checkpoint.load()) is None:
            return 0, 0, 0.0
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        for generator, state in zip(self.generators, saved["generators"], strict=True):
            generator.set_state(state)
        return saved["epoch"], saved["step"], saved["mean"]

    def save(self, epoch: int, step: int, mean: float) -> None:
        """Keep all, after an epoch."""
        if not self.checkpoint.is_kept:
            return
        states = {name: part.state_dict() for name, part in self.parts.items()}
        generators = [generator.get_state() for generator in self.generators]
        numbers = {"epoch": epoch, "step": step, "mean": mean}
        self.checkpoint.save({**states, "generators": generators, **numbers})
