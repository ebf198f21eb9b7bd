"""The membership of a run whose clients keep a state on their disks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, isclose
from typing import Any

import torch
from torch import Tensor

from flwr_fisher.errors import ConfigurationError, listed
from flwr_fisher.log_lines import log_once, logger
from flwr_fisher.params import Params, scale
from flwr_fisher.randomness import new_run_number
from flwr_fisher.server.exchange import Uploads
from flwr_fisher.wire.options import members_from_tensors, members_to_tensors

_RUN, _STEPS = "run", "steps"
_TOTAL, _WEIGHTS = "total-weight", "client-weights"
_KEEPS = (
    "{} keeps the weight of its first step, {:g}, though it would have another now: "
    "the state on its disk counts with that one. A new run takes new weights"
)
_CHANGED = (
    "the same clients had %g examples in the last step, and have %g now. Their states "
    "count with the old numbers, so the result is no longer that of their data: begin "
    "a new run"
)


@dataclass(frozen=True)
class Membership:
    """The server's knowledge of its clients, from one step to the next.

    A strategy keeps it in a group of tensors, sends clients what :meth:`sent` returns
    in group ``""``, and replaces it in each step by :meth:`after`. With it, a client
    finds the state that it kept, its :class:`~flwr_fisher.client.ClientState`.

    Parameters
    ----------
    run : int
        The run's number, under which clients keep their state.
    steps : int
        The number of steps so far.
    total : float
        The sum of all clients' weights, as it was known at the last step. Clients that
        have not uploaded yet count with the mean weight of the others.
    last_steps : Mapping[int, int]
        The last step to which each client contributed, by the client's number.
    weights : Mapping[int, float]
        Each client's weight in its first step; of a sum over several clients, their
        mean weight in the last one. Weights are not sent to clients.
    parts : Mapping[int, float]
        For each client of whose change the server used only a part in that step: this
        part. The policy cut the rest.

    Examples
    --------
    >>> begins = Membership.new()
    >>> Membership.from_tensors(begins.to_tensors()) == begins
    True
    """

    run: int
    steps: int = 0
    total: float = 0.0
    last_steps: Mapping[int, int] = field(default_factory=dict)
    weights: Mapping[int, float] = field(default_factory=dict)
    parts: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def new(cls) -> "Membership":
        """Return the membership of a new run."""
        return cls(new_run_number())

    def after(self, uploads: Uploads[Any], connected: int) -> "Membership":
        """Return the membership after one more step with these uploads.

        The number of clients is the number of those that are connected, or of those
        that have taken part, whichever is larger. A client keeps the weight of its
        first step, because a mean that steps change has its state with this weight. If
        only the sum over several clients is known, they all have the same weight. A
        client that kept more than the server used learns this with its next request
        (``kept=`` of the exchange).

        Parameters
        ----------
        uploads : Sequence[Upload]
            The uploads of the step.
        connected : int
            How many nodes there are.
        """
        step = self.steps + 1
        new, limited = dict[int, float](), dict[int, float]()
        for upload in uploads:
            weight, members = upload.num_examples, upload.members
            if members:
                new |= dict.fromkeys(members, weight / len(members))
                then = {n for n, last in self.last_steps.items() if last == self.steps}
                known = fsum(self.weights[n] for n in then)
                if then == {*members} and not isclose(known, weight, rel_tol=1e-6):
                    logger.warning(_CHANGED, known, weight)
                continue
            kept = new[upload.number] = self.weights.get(upload.number, weight)
            if weight > (1 + 1e-6) * kept:
                log_once(_KEEPS.format(upload.client, kept), self.run)
            part = upload.taken * min(1.0, weight / kept)
            if part < 1:
                limited[upload.number] = part
        earlier = {n: part for n, part in self.parts.items() if n not in new}
        weights = {**self.weights, **new}
        known = len(weights)
        total = fsum(weights.values()) * (max(known, connected) / known)
        steps = {**self.last_steps, **dict.fromkeys(new, step)}
        return Membership(self.run, step, total, steps, weights, earlier | limited)

    def weights_of(self, uploads: Uploads[Any]) -> list[float]:
        """Return the uploads' weights, none above that of the client's first step.

        With more, a mean over all clients would not be that of what they keep. If the
        policy allows less than in the first step, clients keep less of their change.
        """
        return [
            u.num_examples if u.members else min(u.num_examples, self.weights[u.number])
            for u in uploads
        ]

    def participation(self, weights: Sequence[float]) -> float:
        """Return the share of all clients' weight that these :meth:`weights_of` are."""
        return min(1.0, fsum(weights) / self.total)

    def rescaled(self, mean: Params, before: "Membership") -> dict[str, Tensor]:
        """Return a mean over all clients known `before` as one over those known now.

        When more clients are known, the sum over them is divided by a larger number.
        Before the first step the mean is zero, whatever the tensors are. The change by
        this step's cohort is added afterwards, multiplied by :meth:`participation`.
        """
        if not before.steps:
            return {name: torch.zeros_like(value) for name, value in mean.items()}
        return scale(mean, before.total / self.total)

    def sent(self) -> dict[str, Tensor]:
        """Return the tensors by which clients find their own state."""
        numbers = {_RUN: torch.tensor(self.run), _STEPS: torch.tensor(self.steps)}
        return numbers | members_to_tensors(self.last_steps, self.parts)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the whole membership as tensors."""
        tensors = self.sent() | {_TOTAL: torch.tensor(self.total, dtype=torch.float64)}
        if self.last_steps:
            weights = [self.weights[number] for number in self.last_steps]
            tensors[_WEIGHTS] = torch.tensor(weights, dtype=torch.float64)
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Params) -> "Membership":
        """Return the membership from a group that holds :meth:`to_tensors`.

        Raises
        ------
        ConfigurationError
            If the group lacks it.
        """
        if missing := {_RUN, _STEPS} - set(tensors):
            raise ConfigurationError(
                f"this group lacks a Membership's {sorted(missing)}, and has "
                f"{sorted(tensors)}: return Membership.new().to_tensors() from "
                "`initial_groups`, and return the group again in every Step"
            )
        last_steps, parts = members_from_tensors(tensors)
        weights = tensors[_WEIGHTS].tolist() if _WEIGHTS in tensors else []
        run, steps = int(tensors[_RUN]), int(tensors[_STEPS])
        total = float(tensors.get(_TOTAL, 0.0))
        by_client = dict(zip(last_steps, weights, strict=False))
        return cls(run, steps, total, last_steps, by_client, parts)


def lost_states(uploads: Uploads[Any]) -> int:
    """Return how many clients lost their state, and log a warning.

    Clients report it with the metric ``state-lost``.
    """
    lost = [upload.client for upload in uploads if upload.metrics.get("state-lost")]
    if lost:
        logger.warning(
            "clients that lost their state start with a new one: %s", listed(lost)
        )
    return len(lost)
