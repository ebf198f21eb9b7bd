"""The outbox: a finished training's reply, kept on disk until the server has it.

A server with checkpoints sends its run's name in each request, and clients keep their
reply to the last one. If the run is resumed after a crash, it sends the same request
again, and a client answers with the reply that it kept. The client compares the number
of its examples, but not the data themselves.
"""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from filelock import FileLock, Timeout

from flwr_fisher import __version__
from flwr_fisher.client.described import UndescribedError, described
from flwr_fisher.client.disk import ClientDisk
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import Reply, Request
from flwr_fisher.client.training_checkpoint import TrainingCheckpoint
from flwr_fisher.errors import ClientError
from flwr_fisher.files import digest_of
from flwr_fisher.log_lines import logger
from flwr_fisher.wire import arrays_to_tensors, join_groups, tensors_to_arrays

_NAME = "upload"
_RUN = re.compile("[0-9a-f]{1,16}")  # a run's name


@dataclass(frozen=True)
class Outbox:
    """The kept reply and training of one request.

    Parameters
    ----------
    disk : ClientDisk | None
        Where the reply is kept; None if the run is not kept.
    step : int
        The round.
    digest : str
        A digest of everything that is known here and that determines the reply.
    """

    disk: ClientDisk | None
    step: int = 0
    digest: str = ""

    @classmethod
    def of(cls, problem: LocalProblem, request: Request) -> "Outbox":
        """Return the outbox of a request.

        If the client cannot compute a digest of its training, nothing is kept, and the
        log has a warning.

        Raises
        ------
        ClientError
            If the server's name for the run is not valid.
        """
        run = request.options.get("run")
        if run is None:
            return cls(None)
        if not _RUN.fullmatch(str(run)):
            raise ClientError(
                f"the server's name for the run is not valid: {str(run)!r:.80}"
            )
        try:
            digest = _digest(problem, request)
        except UndescribedError as error:
            logger.warning("After a crash, this client must train again: %s", error)
            return cls(None)
        disk = problem.disk("uploads", request.client, str(run))
        return cls(disk, request.server_round, digest)

    @contextmanager
    def locked(self, timeout: float) -> Iterator[None]:
        """Lock the request, against other processes of this client.

        A process from before a restart may still train for this request. This process
        waits for it, at most `timeout` seconds, and takes its result.

        Raises
        ------
        ClientError
            If that process is still at work then.
        """
        with ExitStack() as stack:
            if self.disk is not None:
                try:
                    lock = self.disk.lock()
                    stack.callback(lock.release)
                    _acquire(lock, timeout)
                except OSError as error:
                    logger.warning("Training without a lock on this request: %s", error)
            yield

    def reply(self) -> Reply | None:
        """Return the kept reply to this request, or None."""
        kept = None if self.disk is None else self.disk.load(_NAME, self.step)
        if kept is None:
            return None
        try:
            note = json.loads(kept.note)
            if note["digest"] != self.digest:
                return None
            metrics, has_arrays = note["metrics"], note["has-arrays"]
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("Ignoring a kept upload of another version: %r", error)
            return None
        logger.info("Sending the kept reply to this request, without training again")
        return Reply(metrics, tensors_to_arrays(kept.tensors) if has_arrays else None)

    def keep(self, reply: Reply) -> None:
        """Keep a reply, and delete the one before it.

        If the disk refuses, or is too small, the log has a warning.
        """
        if self.disk is None:
            return
        arrays = reply.arrays
        tensors = {} if arrays is None else arrays_to_tensors(arrays)
        note = {
            "digest": self.digest,
            "metrics": dict(reply.metrics),
            "has-arrays": arrays is not None,
        }
        num_bytes = sum(t.nbytes for t in tensors.values())
        try:
            self.disk.check_room(num_bytes, f"the upload of run {self.disk.key}")
            self.disk.save(_NAME, tensors, step=self.step, note=json.dumps(note))
        except ClientError as error:
            logger.warning("Cannot keep this upload: %s", error)
            return  # the kept training, if there is one, can make it again
        self.training().done()

    def training(self) -> TrainingCheckpoint:
        """Return the checkpoint of the request's training."""
        return TrainingCheckpoint(self.disk, note=self.digest)


def _acquire(lock: FileLock, timeout: float) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("Waiting for another process that works on the same request")
        timeout = max(timeout, 0.0)
        try:
            lock.acquire(timeout=timeout)
        except Timeout as error:
            raise ClientError(
                f"another process of this client has held {lock.lock_file} for "
                f"{timeout:.0f} s, as long as the server waits: end that process"
            ) from error


def _digest(problem: LocalProblem, request: Request) -> str:
    """Return a digest of the request and of all else that the reply depends on."""
    own = {
        "train_fn": problem.train_fn,
        "loss_fn": problem.loss_fn,
        "likelihood": problem.likelihood,
        "batch_fn": problem.batch_fn,
        "output_fn": problem.output_fn,
        "max_examples": problem.limits.max_examples,
        "trained": list(problem.trainable()),
        "layers": {n: type(layer) for n, layer in problem.model.named_modules()},
    }
    facts = {
        "versions": [__version__, torch.__version__, sys.version],
        "client": request.client,
        "seed": request.seed,
        "num-examples": request.num_examples,
        "options": described(dict(request.options), "the server's options"),
        "config": described(dict(request.config), "the server's config"),
        **{name: described(value, name) for name, value in own.items()},
    }
    tensors = {**request.params, **join_groups(request.groups)}
    return digest_of({**facts, "names": list(tensors)}, tensors)
