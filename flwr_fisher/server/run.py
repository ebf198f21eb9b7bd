"""A run: its current state, and its result so far.

The journal saves both after each step, so that a new process can resume the run.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flwr_fisher.callbacks import HISTORIES, Callback, call, history_of
from flwr_fisher.errors import CheckpointError, ConfigurationError, kept_record, listed
from flwr_fisher.flower_internals import Run as FlowerRun
from flwr_fisher.flower_internals import get_fused_config
from flwr_fisher.log_lines import logger, shown
from flwr_fisher.params import Params
from flwr_fisher.server.exchange import Exchange, ServerState, Step, Upload, Uploads
from flwr_fisher.server.journal import Journal, as_kept
from flwr_fisher.server.policy import limits_of
from flwr_fisher.wire import tensors_to_arrays

_UNREFINED = "unrefined"  # group of the state's tensors


@dataclass(repr=False)
class CurvatureResult(Result):
    """Flower's ``Result``, with the state and the uploads of the last round.

    Attributes
    ----------
    uploads : list[Upload]
        The uploads of the last round's last exchange that is not optional, in the
        clients' order; empty if a resumed run had nothing left to do. Of an exchange
        that failed: what was admitted, to merge by hand.
    exchange_uploads : dict[str, list[Upload]]
        The uploads of the last round's exchanges that have a name, by it.
    details : Any
        The report of the step of these `uploads`; see each strategy.
    unrefined : ArrayRecord or None
        The last round's model before it was refined (``refine=``), such as FedFisher's
        merge; None if nobody was asked to refine it, or nobody replied.
    upload_bytes : float
        The mean number of bytes that a client uploaded in the last round, in all
        exchanges.
    left_out : dict[str, str]
        The clients that were asked in the last round, and are not in its model: why.
    """

    uploads: list[Upload[Any]] = field(default_factory=list)
    exchange_uploads: dict[str, list[Upload[Any]]] = field(default_factory=dict)
    details: Any = None
    unrefined: ArrayRecord | None = None
    upload_bytes: float = 0.0
    left_out: dict[str, str] = field(default_factory=dict)


class Run:
    """A run, which :meth:`begin` starts or resumes, after its last finished round."""

    def __init__(self, state: ServerState, server_round: int, journal: Journal) -> None:
        self.state, self.server_round = state, server_round
        self.journal = journal
        self.absences: Mapping[str, Any] = {}  # when it was resumed
        self._result = CurvatureResult()
        self.has_merged = server_round > 0  # whether the state is of a whole round
        # Of the round under way: what the policy left of clients' parts, and the
        # clients of the last exchange that is not optional.
        self._limited: dict[str, dict[str, float]] = {}
        self._clients: list[str] = []

    @classmethod
    def begin(
        cls,
        state: ServerState,
        options: Mapping[str, Any],
        checkpoint_dir: str | Path | None,
        resume: bool,
        *,
        reopen: bool = False,
        num_rounds: int | None = None,
        may_change: Collection[str] = (),
    ) -> "Run":
        """Start from an initial state, or resume after the last round.

        Raises
        ------
        ConfigurationError
            If the last round is to be opened again, but `num_rounds` are fewer; or if
            an option is no JSON value.
        CheckpointError
            If there is a run on disk but `resume` is false, if it is another run, or if
            another server uses it.
        """
        if reopen and not resume:
            raise ConfigurationError("reopen=True needs resume=True: pass both")
        shapes = ((k, str(tuple(v.shape))) for k, v in state.params.items())
        known = {f"initial_arrays['{k}'].shape": shape for k, shape in shapes}
        options = as_kept({**options, **known})
        if resume and checkpoint_dir is None:
            raise CheckpointError("resume=True needs a checkpoint_dir")
        journal = Journal(checkpoint_dir)
        try:
            saved = journal.load()
            if saved is None:
                if reopen:
                    raise CheckpointError(
                        f"{journal.path} has no run: leave reopen=True out"
                    )
                journal.begin(options)
                run = cls(state, 0, journal)
                run.finish(0, {})
                return run
            last, *_ = saved
            if not resume:
                raise CheckpointError(
                    f"{journal.path} has a run up to round {last}: pass resume=True to "
                    "continue it, or another checkpoint_dir"
                )
            _check_options(journal, options, may_change)
            if reopen and num_rounds is not None and num_rounds < last:
                raise ConfigurationError(
                    f"reopen=True repeats round {last}, but num_rounds={num_rounds}: "
                    f"pass num_rounds={last}"
                )
            if reopen and journal.reopen(last):
                saved = journal.load()  # the round before
            assert saved is not None
            return cls._resumed(journal, *saved)
        except BaseException:
            journal.release()
            raise

    @classmethod
    def _resumed(
        cls, journal: Journal, last: int, tensors: Params, record: Mapping[str, Any]
    ) -> "Run":
        """Return the run with its state after a round."""
        run = cls(ServerState.from_tensors(tensors), last, journal)
        with kept_record(f"{journal.path}: the record of round {last}"):
            run.absences = record["absences"]
            for name, rounds in record["history"].items():
                history = getattr(run._result, name)
                for server_round, metrics in rounds.items():
                    history[int(server_round)] = MetricRecord(metrics)
        logger.info("Resuming in round %s, from %s", last + 1, journal.path)
        for folder in sorted(journal.uploads(last + 1).glob("exchange-*/")):
            kept = listed(path.stem for path in folder.glob("*.safetensors"))
            logger.info("%s has uploads of %s", folder.name, kept or "nobody")
        return run

    def arrays(self) -> ArrayRecord:
        """Return the global parameters and buffers."""
        return tensors_to_arrays(self.state.params)

    def take_step(
        self,
        server_round: int,
        exchange: Exchange[Any],
        step: Step,
        uploads: Uploads[Any],
        metrics: MetricRecord,
        left_out: Mapping[str, str],
        limited: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Set the state to a step's outcome, and add the exchange's metrics.

        `left_out` has reasons by client, and `limited` what the policy left of parts.
        """
        before = self.state
        self.state = step.state
        if exchange.refines:
            # Copies: a file of tensors cannot hold one under two names.
            copied = {k: v.clone() for k, v in before.params.items()}
            unrefined = before.group(_UNREFINED) or copied
            groups = {**step.state.groups, _UNREFINED: unrefined}
            self.state = replace(step.state, groups=groups)
        used = list(uploads) if step.summed is None else [step.summed]
        result = self._result
        known = dict(result.train_metrics_clientapp.get(server_round, {}))
        sizes = [upload.num_bytes for upload in uploads]
        result.upload_bytes += sum(sizes) / max(len(sizes), 1)
        if exchange.name:
            result.exchange_uploads[exchange.name] = used
        added = {**metrics, **step.metrics}
        if exchange.optional:  # what it reports stands beside the training's
            added = {name: n for name, n in added.items() if name not in known}
        else:
            result.uploads, result.details = used, step.details
            self._clients = [upload.client for upload in uploads]
            out = (result.left_out | dict(left_out)).items()
            result.left_out = {c: why for c, why in out if c not in self._clients}
            for name in {"num-rejected", "num-missing"} & (known.keys() | added.keys()):
                counts = [record.get(name, 0) for record in (known, added)]
                added[name] = sum(n for n in counts if isinstance(n, int))
        for client, parts in limited.items():
            own = self._limited.setdefault(client, {})
            own |= {name: min(f, own.get(name, 1.0)) for name, f in parts.items()}
        added |= limits_of(self._limited, self._clients)
        self._add_metrics(server_round, added)
        told = result.train_metrics_clientapp[server_round]
        if exchange.optional:
            told = MetricRecord(dict(step.metrics))
        if told and not step.quiet:
            text = shown(told, [upload.client for upload in uploads])
            logger.info("\t└──> Aggregated MetricRecord: %s", text)

    def begin_round(self) -> None:
        """Begin a round. It starts from the last round's model before its refinement.

        So a run that goes on after its last round is the run of all these rounds. The
        scores of the refined model are dropped: later models must not be compared with
        one that is no longer there.
        """
        self._limited, result = {}, self._result
        result.upload_bytes, result.exchange_uploads, result.left_out = 0.0, {}, {}
        if unrefined := self.state.group(_UNREFINED):
            text = "Round %s's refined model is taken back: the next round begins from "
            logger.warning(text + "the model before that", self.server_round)
            self.state = ServerState(dict(unrefined), self.state.without(_UNREFINED))
            for name in ("evaluate", "server"):
                getattr(self._result, HISTORIES[name]).pop(self.server_round, None)

    def count_in(self, named: Callable[[Collection[int]], list[str]]) -> None:
        """Remove the clients from ``left_out`` whose values are in the last secure sum.

        Such a client left after it had sent its values, and before the sum was opened.
        `named` returns the names of the clients with some numbers.
        """
        for upload in self._result.uploads:
            for client in named(upload.members):
                self._result.left_out.pop(client, None)

    def keep_uploads(self, uploads: Uploads[Any] = ()) -> None:
        """Keep what a failed exchange has admitted; with nothing, free what is kept.

        So two rounds' uploads are never in memory.
        """
        self._result.uploads, self._result.details = list(uploads), None

    def undo_round(self, before: ServerState) -> None:
        """Return to the state before a round that failed, perhaps between exchanges."""
        self.state = before
        self._result.exchange_uploads = {}

    def skip_round(self, server_round: int, reason: object) -> None:
        """Note that the run goes on without a round that failed."""
        logger.warning("[ROUND %s] skipped: %s", server_round, reason)
        self.keep_uploads()
        self._result.left_out, self._result.upload_bytes = {}, 0.0
        self._add_metrics(server_round, {"skipped": 1})

    def _add_metrics(self, server_round: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics to those of a round."""
        history = self._result.train_metrics_clientapp
        before = dict(history.get(server_round, {}))
        history[server_round] = MetricRecord({**before, **metrics})

    def note(self, history: str, server_round: int, metrics: MetricRecord) -> None:
        """Note a round's metrics in one of the result's histories."""
        getattr(self._result, history)[server_round] = metrics

    def finish(self, server_round: int, absences: Mapping[str, Any]) -> None:
        """Save the round as finished; a resumed run does not repeat it.

        `absences` has the clients that sit out, as JSON values.
        """
        self.server_round = server_round
        history = {
            name: {n: dict(each) for n, each in getattr(self._result, name).items()}
            for name in HISTORIES.values()
        }
        self.journal.finish(server_round, self.state.to_tensors(), history, absences)

    def run_callbacks(self, callbacks: Sequence[Callback]) -> bool:
        """Call callbacks after the last finished round; return whether the run ends.

        Raises
        ------
        CallbackError
            If a callback failed.
        """
        history = history_of(self._result)
        ending = call(callbacks, self.server_round, self.arrays(), history)
        for name in ending:
            logger.info("[ROUND %s] %s ended the run", self.server_round, name)
        return bool(ending)

    @property
    def has_something(self) -> bool:
        """Whether there is a merged model, or an upload."""
        return self.has_merged or bool(self._result.uploads)

    def result(self) -> CurvatureResult:
        """Return the result, with the current parameters."""
        unrefined = self.state.group(_UNREFINED)
        self._result.unrefined = tensors_to_arrays(unrefined) if unrefined else None
        self._result.arrays = self.arrays()
        return self._result


def run_config_of(grid: Grid) -> dict[str, bool | int | float | str]:
    """Return a run's config: the app's defaults, and what ``--run-config`` changes."""
    run = getattr(grid, "run", None)
    if not isinstance(run, FlowerRun):  # a grid of the user's may have none
        return {}
    return {**get_fused_config(run), **run.override_config}


def _check_options(
    journal: Journal, options: Mapping[str, Any], may_change: Collection[str]
) -> None:
    """Raise :class:`CheckpointError` if options differ from the run's."""
    saved = journal.options
    names = {*saved, *options} - {*may_change}
    if keys := sorted(k for k in names if saved.get(k) != options.get(k)):
        pairs = (f"{k}: {saved.get(k)!r} -> {options.get(k)!r}" for k in keys)
        changes = shorten(", ".join(pairs), 1000, placeholder=" …")
        raise CheckpointError(
            f"{journal.path} has a run with other options: {changes}. Resume it with "
            "its options, list keys of the run config that do not matter in "
            "may_change=[...], or begin a new run in another checkpoint_dir"
        )
