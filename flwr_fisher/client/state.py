"""A client's state in a run, which it keeps on its disk."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_fisher.client.disk import ClientDisk, Kept
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import Request
from flwr_fisher.log_lines import logger
from flwr_fisher.params import Params, add, check_same_layout, subtract
from flwr_fisher.wire.options import members_from_tensors

_TAKEN = "taken"  # the note of tensors that the server may take in part


def run_disk(problem: LocalProblem, request: Request) -> ClientDisk:
    """Return the place on the client's disk for a method's data of one run."""
    return problem.disk("state", request.client, f"{request.count('run'):x}")


@dataclass(frozen=True)
class ClientState:
    """A client's state from one of its rounds to the next, such as SCAFFOLD's control.

    It is a file on the client's disk, in its ``state_dir``. The server says in which
    step it last had a reply from this client: it keeps a
    :class:`~flwr_fisher.strategies.Membership`, and sends what its ``sent()`` returns.
    The client continues from the state that it kept in that step. So a round that
    failed, was repeated, or lost this client's reply leaves no trace in the state. If
    the states of all runs take more than the client's ``state_bytes``, those that were
    not used for the longest time are deleted.

    Parameters
    ----------
    disk : ClientDisk
        Where the state is kept.
    like : Mapping[str, Tensor]
        Tensors with the keys, shapes, dtypes and devices of the state: for example
        ``problem.trainable()``, or with buffers ``problem.state_like(request.params)``.
    name : str
        The name of its files: small letters and hyphens.
    last_step : int | None
        The step of the last reply that the server had, or None if there was none.
    next_step : int
        The step that this request is for.
    part : float, default 1
        The part of the change in `last_step` that the server used. It is less than 1 if
        the server's policy limited this client. The kept state then changes by the same
        part.

    Examples
    --------
    In a job::

        state = ClientState.of(problem, request, "drift", problem.trainable())
        drift, lost = state.load()
        ...
        state.save(new_drift)
        return Reply({**metrics, "state-lost": int(lost)}, upload.to_arrays())
    """

    disk: ClientDisk
    like: Params
    name: str
    last_step: int | None
    next_step: int
    part: float = 1.0

    @classmethod
    def of(
        cls, problem: LocalProblem, request: Request, name: str, like: Params
    ) -> "ClientState":
        """Return a client's state for a request.

        Raises
        ------
        ClientError
            If it takes more than the client's ``state_bytes``, or the server did not
            say which run and step this is.
        WireError
            If the server's list of clients cannot be read.
        """
        disk = run_disk(problem, request)
        # The last step's state stays until the server has this one's reply.
        num_bytes = 2 * sum(v.nbytes for v in like.values())
        disk.check_room(num_bytes, f"the state of run {disk.key}")
        last_steps, parts = members_from_tensors(request.facts)
        client, next_step = request.client, request.count("steps") + 1
        last_step, part = last_steps.get(client), parts.get(client, 1.0)
        return cls(disk, like, name, last_step, next_step, part)

    def load(self, first: Params | None = None) -> tuple[dict[str, Tensor], bool]:
        """Return the state, or `first` if it was lost, and whether it was lost.

        The state is lost if the server has had a reply from this client, but this disk
        has no state of that step. A job reports this with the metric ``state-lost``,
        which :func:`~flwr_fisher.strategies.lost_states` counts.

        Parameters
        ----------
        first : Mapping[str, Tensor], optional
            The state with which a client begins: for a personal part of a model, for
            example, the server's parameters. Default: zeros.

        Raises
        ------
        ParamsError
            If `first` has other keys, shapes or dtypes than `like`.
        """
        if first is not None:
            check_same_layout(self.like, first, f"the state '{self.name}'")
        if self.last_step is not None:
            if (saved := self._saved(self.last_step)) is not None:
                return self._taken(saved, self.last_step, first), False
            text = "The state '%s' of step %s is not in %s: starting with a new one"
            logger.warning(text, self.name, self.last_step, self.disk.path)
        return self._begins(first), self.last_step is not None

    def _taken(self, saved: Kept, step: int, first: Params | None) -> dict[str, Tensor]:
        """Return a step's state, changed only by the part that the server took."""
        if self.part == 1 or saved.note == _TAKEN:
            return saved.tensors
        before = self._saved(int(saved.note)) if saved.note else None
        old = self._begins(first) if before is None else before.tensors
        taken = add(old, subtract(saved.tensors, old), self.part)
        self.disk.save(self.name, taken, step=step, note=_TAKEN)
        return taken

    def _begins(self, first: Params | None) -> dict[str, Tensor]:
        if first is None:
            return {key: torch.zeros_like(value) for key, value in self.like.items()}
        return {key: first[key].detach().clone() for key in self.like}

    def _saved(self, step: int) -> Kept | None:
        if (kept := self.disk.load(self.name, step)) is None:
            return None
        tensors = {n: kept.tensors[n].to(value) for n, value in self.like.items()}
        return Kept(tensors, kept.note)

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep the new state, and the last one until the server has this reply.

        Raises
        ------
        ClientError
            If the disk refuses.
        ParamsError
            If it has other keys, shapes or dtypes than `like`.
        """
        check_same_layout(self.like, tensors, f"the state '{self.name}'")
        kept, before = [], ""
        if self.last_step is not None:
            kept, before = [self.last_step], f"{self.last_step}"  # the step before
        disk, step = self.disk, self.next_step
        disk.save(self.name, tensors, step=step, keep=kept, note=before)
