"""Which clients took part, and in which step each last contributed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flwr_fisher.params import Params

_CLIENTS, _WEIGHTS = "clients", "client-weights"
_WRAP = 2**64  # node ids are unsigned, and tensors' integers are not


@dataclass(frozen=True)
class Roster:
    """The clients whose uploads a server accepted, by partition (or node id).

    A client with a state of its own continues from the last step to which it
    contributed. It cannot know that step by itself, because its reply may have been
    lost, or left out by the server.

    Parameters
    ----------
    steps : Mapping[int, int]
        The last step to which each client contributed.
    weights : Mapping[int, float]
        Each client's weight in that step. Weights are not sent to clients.

    Examples
    --------
    >>> roster = Roster().after(1, {"partition-3": 20.0, "partition-5": 30.0})
    >>> Roster.from_tensors(roster.sent()).steps
    {3: 1, 5: 1}
    """

    steps: Mapping[int, int] = field(default_factory=dict)
    weights: Mapping[int, float] = field(default_factory=dict)

    def after(self, step: int, weights: Mapping[str, float]) -> "Roster":
        """Return the roster after a step, with the weights of its clients by name."""
        numbers = {int(name.rpartition("-")[2]): w for name, w in weights.items()}
        steps = {**self.steps, **dict.fromkeys(numbers, step)}
        return Roster(steps, {**self.weights, **numbers})

    def sent(self) -> dict[str, Tensor]:
        """Return the tensors to send to clients: each client's last step."""
        if not self.steps:
            return {}
        rows = [[_signed(number), step] for number, step in self.steps.items()]
        return {_CLIENTS: torch.tensor(rows)}

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all of the roster as tensors, for a checkpoint."""
        if not self.steps:
            return {}
        weights = [self.weights[number] for number in self.steps]
        return self.sent() | {_WEIGHTS: torch.tensor(weights, dtype=torch.float64)}

    @classmethod
    def from_tensors(cls, tensors: Params) -> "Roster":
        """Read the roster in tensors of :meth:`sent` or :meth:`to_tensors`."""
        if _CLIENTS not in tensors:
            return cls()
        steps = {number % _WRAP: step for number, step in tensors[_CLIENTS].tolist()}
        weights = tensors[_WEIGHTS].tolist() if _WEIGHTS in tensors else []
        return cls(steps, dict(zip(steps, weights, strict=False)))


def _signed(number: int) -> int:
    return number - _WRAP if number >= _WRAP // 2 else number
