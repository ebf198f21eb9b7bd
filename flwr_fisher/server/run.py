"""One run of a strategy: its state, its result so far, and both on disk."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result
from torch import Tensor

from flwr_fisher.errors import CheckpointError, ConfigurationError
from flwr_fisher.params import Params
from flwr_fisher.server.checkpoint import CheckpointDir, RoundCheckpoint
from flwr_fisher.server.exchange import Groups, ServerState, Step, Upload, Uploads
from flwr_fisher.wire import arrays_to_tensors, tensors_to_arrays

logger = logging.getLogger("flwr")

_HISTORIES = (
    "train_metrics_clientapp",
    "evaluate_metrics_clientapp",
    "evaluate_metrics_serverapp",
)
_GROUPS = "groups/"


@dataclass(repr=False)
class CurvatureResult(Result):
    """Flower's ``Result``, and what the last round was made of.

    Attributes
    ----------
    uploads : list[Upload]
        The uploads of the last round's last exchange, in the clients' order; empty if
        a resumed run had nothing left to do.
    details : Any
        What the strategy reports of its last step; see each strategy.
    """

    uploads: list[Upload[Any]] = field(default_factory=list)
    details: Any = None


class Run:
    """Made by :meth:`begin`, which starts a run or picks one up.

    Parameters
    ----------
    state : ServerState
        Where the run stands.
    server_round : int
        The last finished round.
    options : Mapping[str, Any]
        The strategy's options, which a checkpoint must agree with.
    disk : CheckpointDir | None
        Where it is kept, if anywhere.
    """

    def __init__(
        self,
        state: ServerState,
        server_round: int,
        options: Mapping[str, Any],
        disk: CheckpointDir | None,
    ) -> None:
        self.state, self.server_round = state, server_round
        self._options, self._disk = dict(options), disk
        self._result = CurvatureResult()

    @classmethod
    def begin(
        cls,
        initial_arrays: ArrayRecord,
        options: Mapping[str, Any],
        checkpoint_dir: str | Path | None,
        resume: bool,
        groups: Groups | None = None,
    ) -> "Run":
        """Start from the initial arrays and `groups`, or resume after the last round.

        Raises
        ------
        CheckpointError
            If there is a run on disk and `resume` is false, or it is another one.
        """
        if not isinstance(initial_arrays, ArrayRecord):
            raise ConfigurationError(
                "initial_arrays must be an ArrayRecord, got "
                f"{type(initial_arrays).__name__}: wrap it, ArrayRecord(...)"
            )
        state = ServerState(arrays_to_tensors(initial_arrays), dict(groups or {}))
        if checkpoint_dir is None:
            if resume:
                raise CheckpointError("resume=True needs a checkpoint_dir")
            return cls(state, 0, options, None)
        disk = CheckpointDir(checkpoint_dir)
        rounds = disk.rounds()
        if not rounds:
            run = cls(state, 0, options, disk)
            run.finish(0)
            return run
        if not resume:
            raise CheckpointError(
                f"{disk.path} holds a run up to round {rounds[-1]}: pass resume=True "
                "to go on with it, or another checkpoint_dir"
            )
        run = cls._load(disk, rounds[-1], options)
        _check_model(state.params, run.state.params, disk)
        return run

    @classmethod
    def _load(
        cls, disk: CheckpointDir, server_round: int, options: Mapping[str, Any]
    ) -> "Run":
        checkpoint = disk.load_round(server_round)
        saved = checkpoint.record["options"]
        if saved != options:
            odd = sorted(
                k for k in {*saved, *options} if saved.get(k) != options.get(k)
            )
            changes = ", ".join(
                f"{k}: {saved.get(k)!r} -> {options.get(k)!r}" for k in odd
            )
            raise CheckpointError(
                f"{disk.path} holds a run with other options: {changes}; resume it "
                "with those, or begin anew in another checkpoint_dir"
            )
        state = _to_state(checkpoint.tensors)
        run = cls(state, server_round, options, disk)
        for name in _HISTORIES:
            history = checkpoint.record[name].items()
            getattr(run._result, name).update(
                {int(r): MetricRecord(m) for r, m in history}
            )
        logger.info("Resuming after round %s from %s", server_round, disk.path)
        return run

    def arrays(self) -> ArrayRecord:
        """Return the global parameters and buffers."""
        return tensors_to_arrays(self.state.params)

    @staticmethod
    def folder(server_round: int, exchange: int) -> str:
        """Return where the uploads of a round's exchange are kept, from 1."""
        return f"uploads-{server_round:04d}/exchange-{exchange}"

    def save_upload(
        self, folder: str, client: str, arrays: ArrayRecord, metrics: MetricRecord
    ) -> None:
        """Keep a reply as soon as it is admitted."""
        if self._disk is not None:
            self._disk.save_upload(folder, client, arrays, metrics)

    def load_uploads(
        self, folder: str
    ) -> Iterator[tuple[str, ArrayRecord, MetricRecord]]:
        """Return what was kept of an interrupted round."""
        return iter(()) if self._disk is None else self._disk.load_uploads(folder)

    def set_aside(self, folder: str, client: str, reason: str) -> None:
        """Put away an upload that turned out to be bad."""
        if self._disk is not None:
            self._disk.set_aside(folder, client, reason)

    def load_set_aside(self, folder: str) -> dict[str, str]:
        """Return whose uploads an interrupted round had set aside, and why."""
        return {} if self._disk is None else self._disk.load_set_aside(folder)

    def has_uploads(self, folder: str) -> bool:
        """Return whether an interrupted round got as far as that exchange."""
        return self._disk is not None and (self._disk.path / folder).exists()

    def stepped(
        self,
        server_round: int,
        step: Step,
        uploads: Uploads[Any],
        metrics: MetricRecord,
    ) -> None:
        """Take a step's outcome; a later exchange's metrics join an earlier one's."""
        self.state = step.state
        self._result.uploads, self._result.details = list(uploads), step.details
        history = self._result.train_metrics_clientapp
        earlier = dict(history.get(server_round, {}))
        joined = {**earlier, **metrics, **step.metrics}
        rejected = [record.get("num-rejected", 0) for record in (earlier, metrics)]
        joined["num-rejected"] = sum(n for n in rejected if isinstance(n, int))
        history[server_round] = MetricRecord(joined)
        logger.info("\t└──> Aggregated MetricRecord: %s", history[server_round])

    def forget_uploads(self) -> None:
        """Let go of the last step's uploads, so that two rounds' are never held."""
        self._result.uploads = []

    def add_metrics(self, server_round: int, metrics: Mapping[str, int]) -> None:
        """Let metrics join a round's."""
        history = self._result.train_metrics_clientapp
        history[server_round] = MetricRecord({**history[server_round], **metrics})

    def client_evaluated(self, server_round: int, metrics: MetricRecord | None) -> None:
        """Note what the clients' evaluation gave."""
        if metrics is not None:
            logger.info("\t└──> Aggregated MetricRecord: %s", metrics)
            self._result.evaluate_metrics_clientapp[server_round] = metrics

    def evaluated(self, server_round: int, metrics: MetricRecord | None) -> None:
        """Note what the server's evaluation gave."""
        logger.info("Global evaluation\n\t└──> MetricRecord: %s", metrics)
        if metrics is not None:
            self._result.evaluate_metrics_serverapp[server_round] = metrics

    def finish(self, server_round: int) -> None:
        """Write the round; from here on it is not repeated."""
        self.server_round = server_round
        if self._disk is None:
            return
        record: dict[str, Any] = {"options": self._options}
        for name in _HISTORIES:
            history = getattr(self._result, name).items()
            record[name] = {r: dict(metrics) for r, metrics in history}
        tensors = _to_tensors(self.state)
        self._disk.save_round(RoundCheckpoint(server_round, tensors, record))

    def result(self) -> CurvatureResult:
        """Return the result, with the parameters as they are now."""
        self._result.arrays = self.arrays()
        return self._result


def _to_tensors(state: ServerState) -> dict[str, Tensor]:
    """Lay a state out as named tensors: parameters, and ``groups/<group>/<name>``."""
    tensors = dict(state.params)
    for group, members in state.groups.items():
        tensors |= {f"{_GROUPS}{group}/{key}": v for key, v in members.items()}
    return tensors


def _to_state(tensors: Params) -> ServerState:
    """Undo :func:`_to_tensors`."""
    params: dict[str, Tensor] = {}
    groups: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith(_GROUPS):
            group, _, name = key.removeprefix(_GROUPS).partition("/")
            groups.setdefault(group, {})[name] = value
        else:
            params[key] = value
    return ServerState(params, groups)


def _check_model(initial: Params, saved: Params, disk: CheckpointDir) -> None:
    """Refuse to go on with another model than the caller has."""
    for name, value in initial.items():
        if name not in saved or saved[name].shape != value.shape:
            there = (
                f"of shape {tuple(saved[name].shape)}" if name in saved else "absent"
            )
            raise CheckpointError(
                f"{disk.path} holds a run of another model: '{name}' of shape "
                f"{tuple(value.shape)} is {there} there; pass another checkpoint_dir"
            )
