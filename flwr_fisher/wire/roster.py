"""Which clients took part, and when the server last heard of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flwr_fisher.params import Params

__all__ = ["Roster"]

_CLIENTS, _WEIGHTS = "clients", "client-weights"
_WRAP = 2**64  # node ids are unsigned, and tensors' integers are not


@dataclass(frozen=True)
class Roster:
    """The clients whose uploads a server accepted, by partition (or node id).

    A client that keeps state of its own goes on from the step in which the server last
    heard of it. Its own disk cannot tell: a reply may be lost or left out.

    Parameters
    ----------
    steps : Mapping[int, int]
        The last step to which a client contributed.
    weights : Mapping[int, float]
        Its weight then. These are the server's, and are not sent.

    Examples
    --------
    >>> roster = Roster().heard(1, {"partition-3": 20.0, "partition-5": 30.0})
    >>> Roster.from_tensors(roster.sent()).steps
    {3: 1, 5: 1}
    """

    steps: Mapping[int, int] = field(default_factory=dict)
    weights: Mapping[int, float] = field(default_factory=dict)

    def heard(self, step: int, weights: Mapping[str, float]) -> "Roster":
        """Return the roster after a step to which these clients, by name, gave."""
        numbers = {int(name.rpartition("-")[2]): w for name, w in weights.items()}
        steps = {**self.steps, **dict.fromkeys(numbers, step)}
        return Roster(steps, {**self.weights, **numbers})

    def sent(self) -> dict[str, Tensor]:
        """Return what clients are told: each client's last step."""
        if not self.steps:
            return {}
        rows = [[_signed(number), step] for number, step in self.steps.items()]
        return {_CLIENTS: torch.tensor(rows)}

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all of it."""
        if not self.steps:
            return {}
        weights = [self.weights[number] for number in self.steps]
        return self.sent() | {_WEIGHTS: torch.tensor(weights, dtype=torch.float64)}

    @classmethod
    def from_tensors(cls, tensors: Params) -> "Roster":
        """Read what :meth:`sent` or :meth:`to_tensors` returned, among other things."""
        if _CLIENTS not in tensors:
            return cls()
        steps = {number % _WRAP: step for number, step in tensors[_CLIENTS].tolist()}
        weights = tensors[_WEIGHTS].tolist() if _WEIGHTS in tensors else []
        return cls(steps, dict(zip(steps, weights, strict=False)))


def _signed(number: int) -> int:
    return number - _WRAP if number >= _WRAP // 2 else number
