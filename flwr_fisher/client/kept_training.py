"""LocalSGD after an epoch: what it must have back to go on, bit for bit."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from flwr_fisher.client.checkpoint import (
    TrainingCheckpoint,
    random_states,
    set_random,
)
from flwr_fisher.log_lines import logger


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
        fresh = random_states()
        if (saved := self.checkpoint.load()) is None:
            return 0, 0, 0.0
        before = deepcopy(self._states())
        try:
            self._put_back(saved)
        except Exception as error:  # of another loader, optimiser or torch
            logger.warning(
                "The training that was kept does not fit this one, which starts anew: "
                "%s: %s",
                type(error).__name__,
                error,
            )
            self._put_back(before)
            set_random(fresh)
            return 0, 0, 0.0
        return saved["epoch"], saved["step"], saved["mean"]

    def _states(self) -> dict[str, Any]:
        states = {name: part.state_dict() for name, part in self.parts.items()}
        generators = [generator.get_state() for generator in self.generators]
        return {**states, "kinds": self._kinds(), "generators": generators}

    def _kinds(self) -> dict[str, str]:
        return {name: type(part).__name__ for name, part in self.parts.items()}

    def _put_back(self, states: Mapping[str, Any]) -> None:
        if states["kinds"] != self._kinds():
            raise ValueError(f"it was of {states['kinds']}, and is of {self._kinds()}")
        pairs = list(zip(self.generators, states["generators"], strict=True))
        for name, part in self.parts.items():
            part.load_state_dict(states[name])
        for generator, state in pairs:
            generator.set_state(state)

    def save(self, epoch: int, step: int, mean: float) -> None:
        """Keep all, after an epoch."""
        if not self.checkpoint.is_kept:
            return
        numbers = {"epoch": epoch, "step": step, "mean": mean}
        self.checkpoint.save({**self._states(), **numbers})
