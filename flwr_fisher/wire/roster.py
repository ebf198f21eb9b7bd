"""Which clients took part, and in which step each last contributed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flwr_fisher.errors import WireError
from flwr_fisher.params import Params
from flwr_fisher.wire.arrays import numbers_to_tensor, tensor_to_numbers

_CLIENTS, _WEIGHTS = "clients", "client-weights"


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
    >>> roster = Roster().after(1, {3: 20.0, 5: 30.0})
    >>> Roster.from_tensors(roster.sent()).steps
    {3: 1, 5: 1}
    """

    steps: Mapping[int, int] = field(default_factory=dict)
    weights: Mapping[int, float] = field(default_factory=dict)

    def after(self, step: int, weights: Mapping[int, float]) -> "Roster":
        """Return the roster after a step, with the weights of its clients by number.

        A client's number is what it knows itself by: its partition, or its node's id.
        """
        steps = {**self.steps, **dict.fromkeys(weights, step)}
        return Roster(steps, {**self.weights, **weights})

    def sent(self) -> dict[str, Tensor]:
        """Return the tensors to send to clients: each client's last step."""
        if not self.steps:
            return {}
        steps = torch.tensor(list(self.steps.values()))
        return {_CLIENTS: torch.stack([numbers_to_tensor(self.steps), steps], 1)}

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all of the roster as tensors, for a checkpoint."""
        if not self.steps:
            return {}
        weights = [self.weights[number] for number in self.steps]
        return self.sent() | {_WEIGHTS: torch.tensor(weights, dtype=torch.float64)}

    @classmethod
    def from_tensors(cls, tensors: Params) -> "Roster":
        """Read the roster in tensors of :meth:`sent` or :meth:`to_tensors`.

        Raises
        ------
        WireError
            Unless there are pairs of integers, a client and its step from 0 on, and as
            many weights if any.
        """
        if _CLIENTS not in tensors:
            return cls()
        _check(tensors)
        numbers, last = tensors[_CLIENTS].unbind(1)
        steps = dict(zip(tensor_to_numbers(numbers), last.tolist(), strict=True))
        weights = tensors[_WEIGHTS].tolist() if _WEIGHTS in tensors else []
        return cls(steps, dict(zip(steps, weights, strict=False)))


def _check(tensors: Params) -> None:
    pairs = tensors[_CLIENTS]
    if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.dtype != torch.int64:
        reason = f"{pairs.dtype} of shape {tuple(pairs.shape)}, expected int64 [n, 2]"
        raise WireError(reason, field=_CLIENTS)
    if (pairs[:, 1] < 0).any():
        raise WireError("a negative step", field=_CLIENTS)
    if _WEIGHTS in tensors and tensors[_WEIGHTS].shape != pairs.shape[:1]:
        reason = f"shape {tuple(tensors[_WEIGHTS].shape)} for {len(pairs)} clients"
        raise WireError(reason, field=_WEIGHTS)
