"""A training under way on the client's disk, so that a crash costs an epoch at most."""

import io
import pickle
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from flwr_fisher.client.store import ClientStore
from flwr_fisher.errors import ClientError
from flwr_fisher.log_lines import logger

_NAME = "training"


class TrainingCheckpoint:
    """Lets a training loop go on where it was when its process ended.

    A `train_fn` that has a keyword of this name, ``checkpoint``, is given one. Where
    the server keeps no checkpoints either, nothing is kept: :meth:`load` returns None.

    Parameters
    ----------
    store : ClientStore, optional
        Where it is kept, if anywhere.
    step : int, default 1
        Which of a request's trainings it is of.
    note : str
        What it must be of: another request's is not loaded.

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
        self, store: ClientStore | None = None, step: int = 1, note: str = ""
    ) -> None:
        self._store, self._step, self._note = store, step, note

    @property
    def is_kept(self) -> bool:
        """Whether what is saved can be loaded again."""
        return self._store is not None

    def load(self) -> dict[str, Any] | None:
        """Return what was saved last, with the random numbers as they were then.

        None where nothing was saved, or it is damaged or another request's.
        """
        if self._store is None:
            return None
        saved = self._store.load_noted(_NAME, self._step)
        if saved is None or saved[1] != self._note:
            return None
        try:
            data = io.BytesIO(saved[0]["data"].numpy().tobytes())
            content = torch.load(data, weights_only=True)
            set_random(content["random"])
            return dict(content["state"])
        except (pickle.UnpicklingError, RuntimeError, KeyError, ValueError) as error:
            logger.warning("A training cannot go on, and starts anew: %s", error)
            return None

    def save(self, state: Mapping[str, Any]) -> None:
        """Keep a state, and the random numbers' with it.

        A disk that refuses costs a warning.

        Parameters
        ----------
        state : Mapping[str, Any]
            Tensors, numbers and texts, and dicts, lists and tuples of them: what
            ``torch.load(weights_only=True)`` reads.
        """
        if self._store is None:
            return
        data = io.BytesIO()
        try:
            torch.save({"state": dict(state), "random": random_states()}, data)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            logger.warning("This training is not kept: %s", error)
            return
        tensors = {"data": torch.frombuffer(data.getbuffer(), dtype=torch.uint8)}
        try:
            self._store.check_room(tensors["data"].nbytes)
            # A killed process loses nothing that the system was given to write.
            self._store.save(
                _NAME,
                self._step,
                tensors,
                keep=range(1, self._step),  # a job that begins anew runs these, too
                note=self._note,
                durable=False,
            )
        except ClientError as error:
            logger.warning("This training is not kept: %s", error)

    def next(self) -> "TrainingCheckpoint":
        """Return that of the request's next training."""
        return TrainingCheckpoint(self._store, self._step + 1, self._note)

    def done(self) -> None:
        """Forget the request's trainings: what came of them is kept."""
        if self._store is not None:
            self._store.drop(_NAME)


def random_states() -> dict[str, Any]:
    """Return the states of the random numbers that :func:`seeded` seeds."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "python": random.getstate(),
        "numpy": (str(name), [int(k) for k in keys], *map(float, rest)),
    }


def set_random(states: Mapping[str, Any]) -> None:
    """Put back what :func:`random_states` returned."""
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
    random.setstate(states["python"])
    name, keys, position, has_gauss, gauss = states["numpy"]
    numpy = (name, np.array(keys, np.uint32), int(position), int(has_gauss), gauss)
    np.random.set_state(numpy)  # noqa: NPY002
