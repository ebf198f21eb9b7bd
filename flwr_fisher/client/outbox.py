"""A finished training on the client's disk, until the server has what came of it.

A run whose server keeps checkpoints names itself in its requests. Clients then keep the
reply to the last one. Submitted anew after a crash, the run sends the same request
again, and the client hands over what is there. Of its data only the number is compared:
a finished training is of the data as they were.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from filelock import FileLock, Timeout

from flwr_fisher import __version__
from flwr_fisher.client.checkpoint import TrainingCheckpoint
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import Reply, Request
from flwr_fisher.client.store import ClientStore
from flwr_fisher.errors import ClientError
from flwr_fisher.files import digest_of
from flwr_fisher.log_lines import logger
from flwr_fisher.wire import arrays_to_tensors, tensors_to_arrays

_FOLDER, _NAME = "uploads", "upload"
_RUN = re.compile("[0-9a-f]{1,16}")  # a run's name


@dataclass(frozen=True)
class Outbox:
    """What a client keeps of one request.

    Parameters
    ----------
    store : ClientStore | None
        Where; None if the run is not kept.
    step : int
        The round.
    digest : str
        Of all that the reply depends on and that is known here.
    """

    store: ClientStore | None
    step: int
    digest: str

    @classmethod
    def of(cls, problem: LocalProblem, request: Request) -> "Outbox":
        """Find what is kept of a request.

        Raises
        ------
        ClientError
            If the server's name for the run is none.
        """
        run = request.options.get("run")
        if run is None:
            return cls(None, 0, "")
        if not _RUN.fullmatch(str(run)):
            raise ClientError(f"the server's name for the run is {str(run)!r:.80}")
        root = problem.state_dir / _FOLDER
        number = int(str(run), 16)
        store = ClientStore(root, number, request.client, max_bytes=problem.state_bytes)
        return cls(store, request.server_round, _digest(problem, request))

    @contextmanager
    def held(self, timeout: float) -> Iterator[None]:
        """Keep other processes of this client away from the request.

        One may be left over that still trains for it: what it finishes is handed over.

        Parameters
        ----------
        timeout : float
            Seconds to wait for it.

        Raises
        ------
        ClientError
            If it is then still at work.
        """
        lock: FileLock | None = None
        if self.store is not None:
            with suppress(OSError):  # the training goes on without, and is not kept
                lock = self.store.lock()
                _acquire(lock, timeout)
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def reply(self) -> Reply | None:
        """Return the reply that is kept; None if there is none to this request."""
        if self.store is None:
            return None
        saved = self.store.load_noted(_NAME, self.step)
        if saved is None:
            return None
        tensors, note = saved[0], json.loads(saved[1])
        if note["digest"] != self.digest:
            return None
        logger.info("Handing over what was finished for this request before")
        arrays = tensors_to_arrays(tensors) if note["has-arrays"] else None
        return Reply(note["metrics"], arrays)

    def keep(self, reply: Reply) -> None:
        """Keep a reply; the one before it is no longer needed.

        A disk that refuses, or is too small, costs a warning.
        """
        if self.store is None:
            return
        arrays = reply.arrays
        tensors = {} if arrays is None else arrays_to_tensors(arrays)
        note = {
            "digest": self.digest,
            "metrics": dict(reply.metrics),
            "has-arrays": arrays is not None,
        }
        try:
            self.store.check_room(sum(t.nbytes for t in tensors.values()))
            self.store.save(_NAME, self.step, tensors, note=json.dumps(note))
        except ClientError as error:
            logger.warning("This upload is not kept: %s", error)
            return  # its training, which may be, makes it again
        self.training().done()

    def training(self) -> TrainingCheckpoint:
        """Return where the request's training is kept while it lasts."""
        return TrainingCheckpoint(self.store, note=self.digest)

    def problem(self, problem: LocalProblem) -> LocalProblem:
        """Return the problem, whose training is kept here."""
        return replace(problem, checkpoint=self.training())


def _acquire(lock: FileLock, timeout: float) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("Another process of this client is at work for it: waiting")
        try:
            lock.acquire(timeout=max(timeout, 0))
        except Timeout as error:
            raise ClientError(
                f"another process of this client has held {lock.lock_file} for "
                f"{timeout:.0f} s, as long as the server waits: end it"
            ) from error


def _digest(problem: LocalProblem, request: Request) -> str:
    """Return a digest of the request, and of what the reply depends on beside it."""
    facts = {
        "version": __version__,
        "client": request.client,
        "seed": request.seed,
        "num-examples": request.num_examples,
        "train_fn": _described(problem.train_fn),
        "loss_fn": _described(problem.loss_fn),
        "likelihood": _described(problem.likelihood),
        "max_examples": problem.limits.max_examples,
        "trained": list(problem.trained()),
        "options": _texts(request.options),
        "config": _texts(request.config),
    }
    if problem.batch_fn is not None:
        facts["batch_fn"] = _described(problem.batch_fn)
    tensors = dict(request.params)
    for name, group in request.groups.items():
        tensors |= {f"{name}/{key}": value for key, value in group.items()}
    return digest_of({**facts, "names": list(tensors)}, tensors)


def _texts(config: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in config.items()}


def _described(option: object) -> str:
    """Return what tells one function, or object, from others in every process."""
    if option is None or isinstance(option, str):
        return repr(option)
    settings = getattr(option, "settings", None)
    own = settings() if callable(settings) else {}
    return f"{getattr(option, '__qualname__', type(option).__qualname__)} {own}"
