"""What a crash would cost: a finished training's reply, and a training under way.

A server with checkpoints sends its run's name in each request, and clients keep their
reply to the last one. If the run is resumed after a crash, it sends the same request
again, and a client answers with the reply that it kept. What a client compares is the
request, its model, and its training's settings; not the data, nor the code of functions
of the user's own.
"""

import io
import json
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from filelock import Timeout

from flwr_fisher import __version__
from flwr_fisher.client.disk import ClientDisk
from flwr_fisher.client.request import Reply, Request
from flwr_fisher.errors import ClientError
from flwr_fisher.files import digest_of
from flwr_fisher.log_lines import logger
from flwr_fisher.randomness import generator_states, set_generator_states
from flwr_fisher.wire import arrays_to_tensors, join_groups, tensors_to_arrays

_REPLY, _TRAINING = "upload", "training"  # names of files
_UNREADABLE = (pickle.UnpicklingError, RuntimeError, KeyError, ValueError)
_UNSAVED = (ClientError, pickle.PicklingError, AttributeError, TypeError)


def settings_of(value: Any, described: Callable[[Any], Any] | None = None) -> Any:
    """Return what tells a training's function or object from another, as plain data.

    An object with a method ``settings`` is described by what this returns, and another
    one by its class. A function counts by its name. With `described`, this function
    describes both, and tensors.

    Examples
    --------
    >>> settings_of({"optimizer": partial(print, sep="")})
    {'optimizer': ['print', [], {'sep': ''}]}
    """
    within = partial(settings_of, described=described)
    if isinstance(value, Mapping):
        return {str(key): within(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [within(each) for each in value]
    if isinstance(value, partial):
        return within((value.func, value.args, value.keywords))
    if isinstance(value, bool | int | float | str | None):
        return value
    return (described or _described)(value)


def _name_of(value: Any) -> Any:
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return repr(value) if isinstance(value, torch.dtype | np.generic) else name


def _described(value: Any) -> Any:
    name = _name_of(value)
    if callable(settings := getattr(value, "settings", None)):
        return [name, settings_of(settings())]
    if isinstance(value, torch.Tensor):
        return digest_of(name, {"": value})
    if isinstance(value, torch.nn.Module):
        return [attributes_of(value), digest_of(name, value.state_dict())]
    return name


def attributes_of(module: torch.nn.Module) -> list[Any]:
    """Return a module's text, each layer's attributes, and a digest of its constants.

    The text leaves some attributes out, such as the number of attention heads. Tensors
    and layers among them count by their class: what is trained is drawn anew in each
    process. Constants are the dense buffers that a state dict leaves out.
    """
    of_any, state = vars(torch.nn.Module()), module.state_dict()
    own = [{k: vars(m)[k] for k in vars(m).keys() - of_any} for m in module.modules()]
    buffers = {k: v for k, v in module.named_buffers() if k not in state}
    constants = {k: v for k, v in buffers.items() if v.layout == torch.strided}
    return [repr(module), settings_of(own, _name_of), digest_of("", constants)]


@dataclass(frozen=True)
class Outbox:
    """The kept reply and training of one request.

    Parameters
    ----------
    disk : ClientDisk
        Where the reply is kept: the client's entry for the run.
    step : int
        The round.
    digest : str
        A digest of what determines the reply.
    """

    disk: ClientDisk
    step: int
    digest: str

    @classmethod
    def of(
        cls, disk: ClientDisk, request: Request, client: Mapping[str, Any]
    ) -> "Outbox":
        """Return the outbox of a request.

        Parameters
        ----------
        disk : ClientDisk
            The client's entry for the run.
        request : Request
            The request.
        client : Mapping[str, Any]
            The client's own functions and settings, on which the reply depends.
        """
        facts = {
            "versions": [__version__, torch.__version__, sys.version],
            "request": [request.client, request.seed],
            "config": [settings_of(request.options), settings_of(request.config)],
            "client": settings_of(client),
        }
        tensors = {**request.params, **join_groups(request.groups)}
        digest = digest_of({**facts, "names": list(tensors)}, tensors)
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
            lock = f"the lock of run {self.disk.key} in {self.disk.path}"
            try:
                timeout = max(timeout, 0.0)
                stack.enter_context(self.disk.lock().acquire(timeout=timeout))
            except Timeout as error:
                raise ClientError(
                    f"another process of this client has held {lock} for "
                    f"{timeout:.0f} s, as long as the server waits: end that process"
                ) from error
            except OSError as error:
                logger.warning("Training without %s: %s", lock, error)
            yield

    def reply(self) -> Reply | None:
        """Return the kept reply to this request, or None."""
        if (kept := self.disk.load(_REPLY, self.step)) is None:
            return None
        note = json.loads(kept.note)
        if note["digest"] != self.digest:
            return None
        logger.info("Sending the kept reply to this request, without training again")
        arrays = tensors_to_arrays(kept.tensors) if kept.tensors else None
        return Reply(note["metrics"], arrays)

    def keep(self, reply: Reply) -> None:
        """Keep a reply, and delete the one before it.

        If the disk refuses, or is too small, the log has a warning.
        """
        tensors = {} if reply.arrays is None else arrays_to_tensors(reply.arrays)
        note = {"digest": self.digest, "metrics": dict(reply.metrics)}
        try:
            self.disk.save(_REPLY, tensors, step=self.step, note=json.dumps(note))
        except ClientError as error:
            logger.warning("Cannot keep this upload: %s", error)
            return  # the kept training, if there is one, can make it again
        self.disk.drop(_TRAINING)


class TrainingCheckpoint:
    """Saves and loads the state of a training loop, to continue after a crash.

    A `train_fn` with a keyword ``checkpoint`` receives one. If the server keeps no
    checkpoints, the client saves nothing, and :meth:`load` returns None.

    Parameters
    ----------
    disk : ClientDisk, optional
        Where the state is kept; None keeps nothing.
    step : int, default 1
        The number of the training within a request.
    note : str
        A text that identifies the request. A state of another request is not loaded.

    Examples
    --------
    >>> def train_fn(model, loader, device, config, *, checkpoint):
    ...     saved = checkpoint.load() or {"epoch": 0, "model": model.state_dict()}
    ...     model.load_state_dict(saved["model"])
    ...     for epoch in range(saved["epoch"] + 1, 4):
    ...         ...  # train for an epoch
    ...         checkpoint.save({"epoch": epoch, "model": model.state_dict()})
    ...     return {}
    >>> train_fn(torch.nn.Linear(1, 1), [], None, {}, checkpoint=TrainingCheckpoint())
    {}
    """

    def __init__(
        self, disk: ClientDisk | None = None, step: int = 1, note: str = ""
    ) -> None:
        self._disk, self._step, self._note = disk, step, note

    def load(self) -> dict[str, Any] | None:
        """Return the last saved state, and restore its random states.

        Return None if nothing was saved, or if it is damaged or belongs to another
        request.
        """
        kept = None if self._disk is None else self._disk.load(_TRAINING, self._step)
        if kept is None or kept.note != self._note:
            return None
        try:
            data = io.BytesIO(kept.tensors["data"].numpy().tobytes())
            content = torch.load(data, weights_only=True)
            set_generator_states(content["random"])
            return dict(content["state"])
        except _UNREADABLE as error:
            logger.warning("Starting the training again from its beginning: %s", error)
            return None

    def save(self, state: Mapping[str, Any]) -> None:
        """Save a state with the random states.

        If the disk refuses, the log has a warning.

        Parameters
        ----------
        state : Mapping[str, Any]
            Tensors, numbers and texts, and dicts, lists and tuples of them: what
            ``torch.load(weights_only=True)`` reads.
        """
        if self._disk is None:
            return
        data = io.BytesIO()
        try:
            torch.save({"state": dict(state), "random": generator_states()}, data)
            tensors = {"data": torch.frombuffer(data.getbuffer(), dtype=torch.uint8)}
            step, note = self._step, self._note
            former = range(1, step)  # a job that starts again runs these, too
            self._disk.save(_TRAINING, tensors, step=step, keep=former, note=note)
        except _UNSAVED as error:
            logger.warning("Cannot save this training: %s", error)

    def next(self) -> "TrainingCheckpoint":
        """Return the checkpoint of the request's next training."""
        return TrainingCheckpoint(self._disk, self._step + 1, self._note)
