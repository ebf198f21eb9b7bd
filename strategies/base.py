"""The base class of this library's strategies: FedAvg's sampling, other rounds.

Long: a third of it is docstrings, of `start` and of what a strategy must define.
"""

import textwrap
import time
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from difflib import get_close_matches
from inspect import signature
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from flwr_fisher.callbacks import Callback, checked_callbacks
from flwr_fisher.devices import check_default_device
from flwr_fisher.errors import (
    ConfigurationError,
    check_known,
    check_range,
    check_whole,
    given,
    plain,
)
from flwr_fisher.log_lines import logger, width
from flwr_fisher.merge.batch_norms import moved_norms
from flwr_fisher.params import Params
from flwr_fisher.server.cohort import Cohort
from flwr_fisher.server.driver import Driver, EvaluateFn
from flwr_fisher.server.evaluation import EvaluationDoor, requests_to_evaluate
from flwr_fisher.server.exchange import (
    Exchange,
    Groups,
    Secure,
    ServerState,
)
from flwr_fisher.server.mailbox import Requested
from flwr_fisher.server.policy import Policy
from flwr_fisher.server.run import CurvatureResult, Run
from flwr_fisher.server.waiting import Waiting
from flwr_fisher.strategies.hooks import (
    HookedRounds,
    check_hooks,
    initial_groups_of,
)
from flwr_fisher.wire import NUM_EXAMPLES

_FUNCTIONS = ("train_metrics_aggr_fn", "evaluate_metrics_aggr_fn")
# For errors: a function's arguments, and how to change one of an older strategy.
_AGGREGATES = (
    "a list of RecordDict and the name of the weights",
    "function of pairs (num_examples, metrics), make one of (records, "
    "weighted_by_key); record['metrics'] has what a client returned",
)
_EVALUATES = (
    "the round's number and its ArrayRecord",
    "function of (server_round, parameters, config), make one of (server_round, "
    "arrays); arrays.to_torch_state_dict() has the model",
)
_FRACTIONS = ("fraction_train", "fraction_evaluate")
_FEWEST = {"min_train_nodes": 1, "min_evaluate_nodes": 0, "min_available_nodes": 1}
_NORM_STATISTICS = ("average", "refresh")
_TIMEOUT = 3600.0  # seconds, as in Flower's `start`
_INDENT = 10  # columns in front of a line of settings in the log
# Arguments of Flower's older strategies, and where each is given now.
_OLDER_ARGUMENTS = {
    "fit_metrics_aggregation_fn": "train_metrics_aggr_fn",
    "evaluate_metrics_aggregation_fn": "evaluate_metrics_aggr_fn",
    "initial_parameters": "start(initial_arrays=…)",
    "on_fit_config_fn": "start(train_config=…)",
    "on_evaluate_config_fn": "start(evaluate_config=…)",
}
# Keywords of Flower's older strategies, and the names that they have now.
OLDER_NAMES = {
    "fraction_fit": "fraction_train",
    "min_fit_clients": "min_train_nodes",
    "min_evaluate_clients": "min_evaluate_nodes",
    "min_available_clients": "min_available_nodes",
}


def _meant(
    unknown: Iterable[str], known: Collection[str], grouped: Mapping[str, str]
) -> str:
    """Return the known keywords like these, as the end of an error."""
    of_start = signature(CurvatureStrategy.start).parameters
    other = {name: f"start({name}=…)" for name in of_start}
    other |= {**grouped, **OLDER_NAMES, **_OLDER_ARGUMENTS}
    close = {
        name: other.get(name) or next(iter(get_close_matches(name, known)), None)
        for name in unknown
    }
    meant = [f"{other} for {name}" for name, other in close.items() if other]
    return f"; did you mean {', '.join(meant)}?" if meant else ""


class CurvatureStrategy(FedAvg):
    """Base of this library's strategies: FedAvg's sampling with other exchanges.

    A subclass defines what a round requests from clients, and what the server computes
    from their uploads (:meth:`exchanges`). The server samples clients and checks every
    reply. It skips a bad reply and logs its client's name. The round fails only if
    fewer than `min_train_nodes` replies are usable. The server saves finished rounds
    and admitted uploads on disk.

    Which clients a round samples depends only on their partition ids, `seed` and the
    round. Uploads are ordered by partition id, too. Node ids are not used, because they
    are random in every run. The same seed and thread count give the same model, bit for
    bit, on a CPU.

    Parameters
    ----------
    seed : int, default 0
        Decides which clients a round samples and, with the round and the partition, a
        client's random numbers. Clients receive another seed, which is derived from
        this one. If nobody may guess which clients a round samples, take a large
        number: a small one can be guessed.
    policy : Policy, optional
        What limits a single client's influence. The default leaves honest clients as
        they are; :meth:`Policy.strict() <flwr_fisher.strategies.Policy.strict>` is for
        clients that may lie.
    waiting : Waiting, optional
        When a round ends, and for how many clients it waits; see
        :class:`~flwr_fisher.strategies.Waiting`. By default until all have replied, or
        the `timeout` of :meth:`start`.
    norm_statistics : "average" | "refresh", default "average"
        Where the running statistics of the new model's batch norms come from.
        ``average``: they are the mean of the clients' statistics, which each client
        measured with its own weights. ``refresh``: the round's clients run the new
        model over their data once more, in train mode, and report how the inputs of
        each norm are distributed. The result is exact, except for how batches are
        normalised. With `secure` it is a secure sum. The server requests this only if
        the clients' training has changed statistics. It costs a forward pass, and two
        numbers a channel. If no client is connected any more, the server logs a warning
        and goes on without it. Norms that clients keep in eval mode are frozen, and
        stay as they are (:doc:`/pretrained`).
    secure : flwr_fisher.secure.SecureSums, optional
        Let the server see sums over clients, and no single client's upload; see
        :class:`~flwr_fisher.secure.SecureSums`. Then a `policy` cannot limit uploads,
        and a strict one is refused.
    **kwargs
        ``FedAvg``'s keywords: ``fraction_train``, ``min_train_nodes``,
        ``weighted_by_key``, …. ``min_train_nodes`` is also how many usable replies a
        round needs.

    Raises
    ------
    ConfigurationError
        If an argument is out of range.
    TypeError
        If a keyword is not known. It names the one that may be meant.
    """

    # Whether clients upload statistics of batch norms that their training changed.
    moves_norms: ClassVar[bool] = True
    # For errors: which options object has a keyword as its field.
    grouped: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        *,
        seed: int = 0,
        policy: Policy | None = None,
        waiting: Waiting | None = None,
        norm_statistics: str = "average",
        secure: Secure | None = None,
        **kwargs: Any,
    ) -> None:
        if unknown := sorted(kwargs.keys() - signature(FedAvg).parameters.keys()):
            own = signature(type(self)).parameters.keys()
            known = {*own, *signature(FedAvg).parameters} - {"self", "kwargs"}
            raise TypeError(
                f"{type(self).__name__}() got unexpected keyword arguments {unknown}"
                f"{_meant(unknown, known, self.grouped)}"
            )
        for name in kwargs.keys() & _FRACTIONS:
            check_range(name, kwargs[name], 0, 1)
        for name in kwargs.keys() & _FEWEST.keys():
            check_whole(name, kwargs[name], _FEWEST[name])
        for name in kwargs.keys() & _FUNCTIONS:
            _check_function(name, kwargs[name], *_AGGREGATES)
        check_whole("seed", seed)
        self.policy = given("policy", policy, Policy)
        self.waiting = given("waiting", waiting, Waiting)
        if not isinstance(secure, Secure | None) or isinstance(secure, type):
            raise ConfigurationError(f"secure must be SecureSums(), got {secure!r}")
        super().__init__(**kwargs)
        check_known("norm_statistics", norm_statistics, _NORM_STATISTICS)
        self.norm_statistics, self.secure = norm_statistics, secure
        if self.waiting.window is not None and self.fraction_train not in (0.0, 1.0):
            raise ConfigurationError(
                f"fraction_train={self.fraction_train} does not go with a window, "
                "which asks all clients that connect: leave one of them out"
            )
        if self.waiting.window is not None and secure is not None:
            raise ConfigurationError(
                "Waiting(window=...) does not go with secure=, because a secure sum "
                "needs all its clients at the same time: leave one of them out"
            )
        if secure is not None and self.policy.is_stricter:
            raise ConfigurationError(
                "policy= does not go with secure=, because the server sees no client's "
                "upload that it could limit: leave one of them out. "
                "Policy(limit_scores=True) limits evaluations alone"
            )
        self.seed, self.cohort = seed, Cohort(seed, allow_foreign=False)
        self.timeout = _TIMEOUT  # for waiting for nodes; `start` sets its own
        self.partial_result: CurvatureResult | None = None
        self._hooked = HookedRounds(self)
        self._to_evaluate = Requested()

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep a number of NumPy as Python's own, which travels in records."""
        super().__setattr__(name, plain(value) if isinstance(value, Real) else value)

    # --- what a subclass defines

    @abstractmethod
    def exchanges(self, server_round: int) -> Sequence[Exchange[Any]]:
        """Return the exchanges of a round, in their order."""

    def check(self, state: ServerState) -> None:
        """Raise an error, before any client trains, for a model that does not fit.

        Raises
        ------
        ConfigurationError
            It names the argument, and says what to do.
        """

    def check_rounds(self, num_rounds: int) -> None:
        """Raise an error for a number of rounds that does not fit.

        Raises
        ------
        ConfigurationError
            It says which numbers fit.
        """

    def may_skip(self, server_round: int) -> bool:
        """Return whether the run can skip this round, if `waiting` allows it."""
        return True

    def check_secure(self) -> None:
        """Raise an error for `secure` if a round needs more than sums.

        Raises
        ------
        ConfigurationError
            Saying so.
        """
        if self.secure is not None:
            self.secure.check(self.exchanges(1), type(self).__name__)

    def check_weighted_by_examples(self, what: str) -> None:
        """Raise an error for another weight than the one in the clients' uploads.

        Raises
        ------
        ConfigurationError
            If `weighted_by_key` is another metric. It says that `what` needs this one.
        """
        if self.weighted_by_key != NUM_EXAMPLES:
            raise ConfigurationError(
                f"{what} needs weighted_by_key='{NUM_EXAMPLES}', because clients "
                f"weight their contributions by it, not '{self.weighted_by_key}'"
            )

    def norms_to_refresh(self, before: Params, after: Params) -> Sequence[str]:
        """Return the norms that a round's clients must measure.

        These are the norms whose statistics the round has changed. In a method that
        trains in eval mode, they are the norms whose weights it has changed.

        Parameters
        ----------
        before, after : Mapping[str, Tensor]
            The model at the start of the round, and after its step.
        """
        if self.norm_statistics == "average":
            return []
        return moved_norms(before, after, in_eval=not self.moves_norms)

    def initial_groups(self) -> Groups:
        """Return the groups of a new run's state beside parameters; by default none."""
        return {}

    def round_config(self, server_round: int, config: ConfigRecord) -> ConfigRecord:
        """Return the part of `start`'s config for clients that train in a round."""
        return config

    def evaluation_config(
        self, server_round: int, config: ConfigRecord
    ) -> ConfigRecord:
        """Return the part of `start`'s config for clients that evaluate."""
        return config

    def settings(self) -> dict[str, Any]:
        """Return this strategy's own settings, as JSON: override this.

        :meth:`options`, :meth:`used_settings` and :meth:`summary` are made from it.
        """
        return {}

    def options(self) -> dict[str, Any]:
        """Return the options that must be equal in a run and its resumption.

        They are kept as JSON.
        """
        return {
            "strategy": type(self).__name__,
            "seed": self.seed,
            "fraction_train": self.fraction_train,
            "min_train_nodes": self.min_train_nodes,
            "weighted_by_key": self.weighted_by_key,
            "waiting.over_selection": self.waiting.over_selection,
            "norm_statistics": self.norm_statistics,
            **{f"policy.{name}": n for name, n in asdict(self.policy).items()},
            **({} if self.secure is None else {"secure": self.secure.settings()}),
            **self.settings(),
        }

    def used_settings(self) -> dict[str, Any]:
        """Return the settings for the log: those that affect the run."""
        return self.settings()

    def summary(self) -> None:
        """Log the strategy's configuration."""
        settings = self.used_settings().items()
        text = ", ".join(f"{name}={value}" for name, value in settings)
        for line in textwrap.wrap(text, width() - _INDENT, break_on_hyphens=False):
            logger.info("\t├──> %s", line)
        super().summary()

    # --- a run

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 1,
        timeout: float = _TIMEOUT,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        *,
        checkpoint_dir: str | Path | None = None,
        resume: bool = False,
        reopen: bool = False,
        callbacks: Sequence[Callback] = (),
    ) -> CurvatureResult:
        """Run the federation, like Flower's ``start``, with runs that can be resumed.

        A round ends when all of its clients have replied, or when `waiting` ends it. It
        ends at the latest `timeout` seconds after its request was sent.

        Parameters
        ----------
        grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config
            As in Flower's ``Strategy.start``; one round by default.
        evaluate_fn : Callable[[int, ArrayRecord], MetricRecord | None], optional
            Called before the first round and after each round, as in Flower.
        checkpoint_dir : str | Path, optional
            A folder for the last finished round, and for the running round's uploads as
            they arrive. With it, each client also keeps its own upload until the next
            request.
        resume : bool, default False
            Continue the run in `checkpoint_dir`. Finished rounds are not repeated. An
            upload of the running round that is saved there counts, whether its client
            is connected or not, and the server does not request it again. The round has
            the same clients as before, and the result equals the uninterrupted run's,
            bit for bit.
        reopen : bool, default False
            With `resume`: repeat the last round (its last exchange, if it has several)
            with its saved uploads and those of clients that have not replied yet. In a
            collection window, any client that connects can still reply. A window that
            closed with too few clients opens again.
        callbacks : Sequence[Callback], optional
            The server calls them after each finished round; they can end the run
            (:mod:`flwr_fisher.callbacks`).

        Returns
        -------
        CurvatureResult
            Flower's ``Result`` with the last round's uploads and details.

        Raises
        ------
        RoundError
            If too few nodes are connected after `timeout` seconds, or a round ends with
            fewer than `min_train_nodes` usable replies, or its step fails; unless
            `waiting` skips such a round.
        ConfigurationError
            If an argument, or the model, does not fit this strategy.
        CheckpointError
            If `checkpoint_dir` holds another run or a damaged file, or if another
            server uses it. The strategy's options and `train_config` must be the same
            as in the saved run.
        CallbackError
            If a callback failed. Its round is finished then.

        Whatever is raised, the strategy's `partial_result` then has the rounds that
        were merged, or is None if there were none.
        """
        callbacks = checked_callbacks(callbacks)
        _check_function("evaluate_fn", evaluate_fn, *_EVALUATES)
        check_default_device()
        if not hasattr(grid, "get_node_ids"):
            raise ConfigurationError(
                "grid must be the Grid that the ServerApp's main gets, got "
                f"{grid!r:.80}: to run an app in this process, pass "
                "testing.LocalGrid(app, 4)"
            )
        check_whole("num_rounds", num_rounds, 0)
        check_range("timeout", timeout, 0)
        self.check_rounds(num_rounds)
        check_hooks(type(self), CurvatureStrategy)
        if self.secure is not None:
            self.check_secure()
            if reopen:
                raise ConfigurationError(
                    "reopen=True does not go with secure=, because a second sum over "
                    "other clients would reveal the difference: leave it out"
                )
        self.timeout, self.partial_result = timeout, None
        logger.info("Starting %s strategy:", type(self).__name__)
        self.summary()
        began = time.monotonic()
        own = train_config or ConfigRecord()
        config = {
            f"train_config.{name}": _as_json(value) for name, value in own.items()
        }
        run = Run.begin(
            initial_arrays,
            {**self.options(), **config},
            checkpoint_dir,
            resume,
            initial_groups_of(self),
            reopen=reopen,
            num_rounds=num_rounds,
        )
        try:
            self.check(run.state)
            self.cohort.recall_absences(run.absences)
            Driver(self, grid, run).rounds(
                num_rounds,
                own,
                evaluate_config or ConfigRecord(),
                evaluate_fn,
                callbacks,
            )
        except BaseException:  # also of the user's own functions, and Ctrl+C
            if run.has_merged:
                self.partial_result = run.result()
                logger.error(
                    "The run ends with an error after a merge. The strategy's "
                    "partial_result.arrays has the model"
                )
            raise
        finally:
            run.release()
        logger.info("")
        logger.info("Strategy execution finished in %.2fs", time.monotonic() - began)
        return run.result()

    # --- Flower's hooks, for other loops than `start`, with one exchange a round

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients and return their messages, without changing `config`."""
        return self._hooked.configure(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies to :meth:`configure_train`'s messages; take the step."""
        return self._hooked.aggregate(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients for evaluation, without changing `config`."""
        messages = requests_to_evaluate(self, server_round, arrays, config, grid)
        self._to_evaluate = Requested(messages)
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average the clients' metrics, in an order that is independent of timing.

        A reply that does not fit the others is left out, with a warning.
        """
        door = EvaluationDoor(self.cohort, self.weighted_by_key, self.policy)
        for message in replies:
            door.take(self._to_evaluate.reply(message))
        return door.average(server_round, super().aggregate_evaluate)

    def initialize_parameters(self, client_manager: object) -> NoReturn:
        """Raise an error that explains what to do on Flower's older servers.

        Raises
        ------
        ConfigurationError
            Always.
        """
        name = type(self).__name__
        raise ConfigurationError(
            f"{name} is a strategy of Flower's Message API, but ServerApp(server_fn="
            f"...) runs older ones. Use as_legacy({name}, model=...) and "
            "server_app(server_fn) of flwr_fisher.legacy, or start "
            'it in an @app.main(). The documentation\'s "Change a NumPyClient app" and '
            '"Change a FedAvg app" show how'
        )


def _check_function(name: str, function: Any, called_with: str, older: str) -> None:
    """Raise :class:`ConfigurationError` unless a function takes two arguments."""
    if function is None:
        return
    if not callable(function):
        raise ConfigurationError(f"{name} must be a function, got {function!r:.80}")
    try:
        with suppress(ValueError):  # of a built-in function, without a signature
            signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigurationError(
            f"{name} is called with {called_with}, and {function!r:.80} cannot be "
            f"({error}): of Flower's older strategies' {older}"
        ) from error


def _as_json(value: object) -> object:
    """Return a config's value in the form of JSON, for comparisons."""
    if isinstance(value, list):
        return [_as_json(one) for one in value]
    if isinstance(value, bytes):
        return value.hex()
    finite = not isinstance(value, float) or isfinite(value)
    return value if finite else str(value)
