"""Checkpoints of a training on the client's disk: a crash costs at most an epoch."""

import io
import pickle
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch

from flwr_fisher.client.disk import ClientDisk
from flwr_fisher.curvature.batches import unwrapped
from flwr_fisher.curvature.loader_state import LoaderState
from flwr_fisher.errors import ClientError
from flwr_fisher.log_lines import logger
from flwr_fisher.randomness import generator_states, set_generator_states

_NAME = "training"


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

    @property
    def is_kept(self) -> bool:
        """Whether a saved state can be loaded."""
        return self._disk is not None

    def load(self) -> dict[str, Any] | None:
        """Return the last saved state, and restore its random states.

        Return None if nothing was saved, or if it is damaged or belongs to another
        request.
        """
        if self._disk is None:
            return None
        kept = self._disk.load(_NAME, self._step)
        if kept is None or kept.note != self._note:
            return None
        try:
            data = io.BytesIO(kept.tensors["data"].numpy().tobytes())
            content = torch.load(data, weights_only=True)
            set_generator_states(content["random"])
            return dict(content["state"])
        except (pickle.UnpicklingError, RuntimeError, KeyError, ValueError) as error:
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
            self._disk.check_room(tensors["data"].nbytes, "a training under way")
            self._disk.save(
                _NAME,
                tensors,
                step=self._step,
                keep=range(1, self._step),  # a job that starts again runs these, too
                note=self._note,
                # The operating system completes the writes of a killed process.
                durable=False,
            )
        except (ClientError, pickle.PicklingError, AttributeError, TypeError) as error:
            logger.warning("Cannot save this training: %s", error)

    def next(self) -> "TrainingCheckpoint":
        """Return the checkpoint of the request's next training."""
        return TrainingCheckpoint(self._disk, self._step + 1, self._note)

    def done(self) -> None:
        """Delete the checkpoints of the request's trainings, once its reply is kept."""
        if self._disk is not None:
            self._disk.drop(_NAME)


class KeptTraining:
    """All that LocalSGD needs to continue after an epoch, bit for bit.

    Parameters
    ----------
    checkpoint : TrainingCheckpoint
        Where the training is kept.
    parts : Mapping[str, Any]
        The model, the optimiser and others; only those with a ``state_dict`` are saved.
    loader : Iterable
        The loader; what reading changes in it is saved, too.
    """

    def __init__(
        self,
        checkpoint: TrainingCheckpoint,
        parts: Mapping[str, Any],
        loader: Iterable[Any],
    ) -> None:
        self.checkpoint = checkpoint
        self.parts = {n: p for n, p in parts.items() if hasattr(p, "load_state_dict")}
        self.loader = LoaderState(unwrapped(loader))

    def load(self) -> tuple[int, int, float]:
        """Restore all; return the last epoch and step, and the epoch's mean loss."""
        fresh = generator_states()
        if (saved := self.checkpoint.load()) is None:
            return 0, 0, 0.0
        before = deepcopy(self._states())
        try:
            self._put_back(saved)
        except Exception as error:  # saved with another loader, optimiser or torch
            logger.warning(
                "The saved training does not fit this one, starting from the "
                "beginning: %s: %s",
                type(error).__name__,
                error,
            )
            self._put_back(before)
            self.loader.restore()
            set_generator_states(fresh)
            return 0, 0, 0.0
        return saved["epoch"], saved["step"], saved["mean"]

    def save(self, epoch: int, step: int, mean: float) -> None:
        """Save all of it after an epoch."""
        if self.checkpoint.is_kept:
            numbers = {"epoch": epoch, "step": step, "mean": mean}
            self.checkpoint.save({**self._states(), **numbers})

    def _states(self) -> dict[str, Any]:
        states = {name: part.state_dict() for name, part in self.parts.items()}
        return {**states, "kinds": self._kinds(), "loader": self.loader.changes()}

    def _kinds(self) -> dict[str, str]:
        return {name: type(part).__name__ for name, part in self.parts.items()}

    def _put_back(self, states: Mapping[str, Any]) -> None:
        if states["kinds"] != self._kinds():
            raise ValueError(f"it was saved for {states['kinds']}, not {self._kinds()}")
        self.loader.apply(states["loader"])
        for name, part in self.parts.items():
            part.load_state_dict(states[name])
