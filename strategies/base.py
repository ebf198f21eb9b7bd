"""The base class of this library's strategies: FedAvg's sampling, other rounds."""

import time
from collections.abc import Collection, Mapping, Sequence
from inspect import signature
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from flwr_fisher.callbacks import Callback, checked_callbacks
from flwr_fisher.devices import check_default_device
from flwr_fisher.errors import (
    ConfigurationError,
    check_known,
    check_range,
    check_whole,
    listed,
    plain,
)
from flwr_fisher.log_lines import logger
from flwr_fisher.options import Options, check_names, option
from flwr_fisher.server.cohort import Cohort
from flwr_fisher.server.driver import Driver, EvaluateFn
from flwr_fisher.server.exchange import Secure, ServerState, check_groups
from flwr_fisher.server.mailbox import Waiting
from flwr_fisher.server.policy import Policy
from flwr_fisher.server.round import Strategy
from flwr_fisher.server.run import CurvatureResult, Run, run_config_of
from flwr_fisher.wire import NUM_EXAMPLES

_FRACTIONS = ("fraction_train", "fraction_evaluate")
_FEWEST = {"min_train_nodes": 1, "min_evaluate_nodes": 0, "min_available_nodes": 1}
_NORM_STATISTICS = ("average", "refresh")
_FLOWERS_HOOKS = {
    "configure_train",
    "aggregate_train",
    "configure_evaluate",
    "aggregate_evaluate",
}
_TIMEOUT = 3600.0  # seconds, as in Flower's `start`
# Keywords of Flower's older strategies, and the names that they have now.
OLDER_NAMES = {
    "fraction_fit": "fraction_train",
    "min_fit_clients": "min_train_nodes",
    "min_evaluate_clients": "min_evaluate_nodes",
    "min_available_clients": "min_available_nodes",
}
_ELSEWHERE = {
    **OLDER_NAMES,
    "fit_metrics_aggregation_fn": "train_metrics_aggr_fn",
    "evaluate_metrics_aggregation_fn": "evaluate_metrics_aggr_fn",
    "initial_parameters": "start(initial_arrays=…)",
    "on_fit_config_fn": "start(train_config=…)",
    "on_evaluate_config_fn": "start(evaluate_config=…)",
}


class Refinement(Options):
    """What follows the last round's step: a head in closed form, then steps by K-FAC.

    Raises
    ------
    ConfigurationError
        If a number is out of range.

    Examples
    --------
    >>> Refinement(steps=3)
    Refinement(head='auto', steps=3)
    """

    head: bool | str = option(
        "auto",
        "Solve for the model's last linear layer: clients send sums over their data "
        "at the new model, then the losses of a few candidates. A classifier's layer "
        "is that of a linear discriminant analysis, scaled to the least loss, and a "
        "step of logistic regression from there; a regression's is least squares, "
        "with a ridge. If the layer that is there has a lower loss, it stays, but for "
        "that step. With ``auto`` clients send no sums of more numbers than the "
        "exchanged parameters have; ``True`` asks for them all the same, ``False`` "
        "never.",
        choices=("auto",),
    )
    steps: int = option(
        0,
        "How many steps by the pooled K-FAC follow: L-BFGS on all clients' data, with "
        "K-FAC as its first metric. Each is an exchange for a gradient; the last "
        "exchange is for a loss.",
        low=0,
    )


class CurvatureStrategy(Strategy):
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
    refine : Refinement, optional
        Improve the model after the last round's step: see :class:`Refinement`. A client
        that has left is skipped, and if nobody replies, the model stays as it is.
        ``CurvatureResult.unrefined`` is the model before.
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

    pretrained: bool = False  # whether a run starts from published weights
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
        refine: Refinement | None = None,
        secure: Secure | None = None,
        **kwargs: Any,
    ) -> None:
        known = {*signature(type(self)).parameters, *signature(FedAvg).parameters}
        of_start = signature(CurvatureStrategy.start).parameters
        elsewhere = {name: f"start({name}=…)" for name in of_start}
        elsewhere |= {**self.grouped, **_ELSEWHERE}
        unknown = kwargs.keys() - signature(FedAvg).parameters.keys()
        check_names(f"{type(self).__name__}()", unknown, known, elsewhere)
        for name in kwargs.keys() & _FRACTIONS:
            check_range(name, kwargs[name], 0, 1)
        for name in kwargs.keys() & _FEWEST.keys():
            check_whole(name, kwargs[name], _FEWEST[name])
        check_whole("seed", seed)
        self.policy = Policy.of("policy", policy)
        self.waiting = Waiting.of("waiting", waiting)
        if not isinstance(secure, Secure | None) or isinstance(secure, type):
            raise ConfigurationError(f"secure must be SecureSums(), got {secure!r}")
        super().__init__(**kwargs)
        check_known("norm_statistics", norm_statistics, _NORM_STATISTICS)
        self.norm_statistics, self.secure = norm_statistics, secure
        self.refine = None if refine is None else Refinement.of("refine", refine)
        window = self.waiting.window is not None
        conflict = ""
        if window and self.fraction_train not in (0.0, 1.0):
            conflict = "fraction_train= with Waiting(window=...): a window asks all "
            conflict += "clients that connect"
        if window and secure is not None:
            conflict = "secure= with Waiting(window=...): a secure sum needs all its "
            conflict += "clients at the same time"
        if secure is not None and self.policy.is_stricter:
            conflict = "policy= with secure=: the server sees no single client's upload"
        if conflict:
            raise ConfigurationError(f"{conflict}; leave one of them out")
        self.seed, self.cohort = seed, Cohort(seed, allow_foreign=False)
        self.timeout = _TIMEOUT  # for waiting for nodes; `start` sets its own
        self.num_rounds = 1  # of the run; `start` sets its own
        self.partial_result: CurvatureResult | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep a number of NumPy as Python's own, which travels in records."""
        super().__setattr__(name, plain(value) if isinstance(value, Real) else value)

    # --- what a subclass defines

    def may_skip(self, server_round: int) -> bool:
        """Return whether a run can skip a round: no round that begins with a head."""
        return not self.pretrained or server_round > 1

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

    def settings(self) -> dict[str, Any]:
        """Return this class's own options, as JSON: override this.

        The log shows them (:meth:`summary`), and a resumed run must have the same ones
        (:meth:`options`). Those of a class that it is derived from are there, too.
        """
        return {}

    def _every_setting(self) -> dict[str, Any]:
        """Return the settings of the class and of those it is derived from."""
        found: dict[str, Any] = {}
        for kind in reversed(type(self).__mro__):
            if own := vars(kind).get("settings"):
                found |= own(self)
        return found

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
            "norm_statistics": self.norm_statistics,
            **({} if self.refine is None else {"refine": self.refine.settings()}),
            **{f"policy.{name}": n for name, n in self.policy.settings().items()},
            **({} if self.secure is None else {"secure": self.secure.settings()}),
            **self._every_setting(),
        }

    def summary(self) -> None:
        """Log the strategy's configuration; what is asked of clients, for debugging."""
        refine = {} if self.refine is None else self.refine.settings()
        settings: dict[str, Any] = {"seed": self.seed}
        settings |= {f"refine.{name}": value for name, value in refine.items()}
        settings |= self._every_setting()
        texts = [f"{name}={value}" for name, value in settings.items()]
        of_clients = [text for text in texts if text.startswith("client-")]
        logger.info("\t├──> %s", ", ".join(t for t in texts if t not in of_clients))
        if of_clients:
            logger.debug("\t├──> %s", ", ".join(of_clients))
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
        may_change: Collection[str] = (),
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
            With `resume`: repeat the last round with its saved uploads and those of
            clients that have not replied yet. If the round has several exchanges, the
            last one that is not optional is repeated, and what follows it. In a
            collection window, any client that connects can still reply. A window that
            closed with too few clients opens again.
        may_change : Collection[str], optional
            Keys of ``flwr run --run-config`` with which a run may be resumed in another
            value, such as paths. All others are compared, because clients read them,
            too.
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
            fewer than `min_train_nodes` usable replies, or replies that its step cannot
            use; unless `waiting` skips such a round.
        ConfigurationError
            If an argument, or the model, does not fit this strategy.
        CheckpointError
            If `checkpoint_dir` holds another run or a damaged file, or if another
            server uses it. The strategy's options, `train_config` and what ``flwr run
            --run-config`` set must be the same as in the saved run, but for
            `may_change`.
        CallbackError
            If a callback failed. Its round is finished then.

        Notes
        -----
        Whatever is raised, the strategy's `partial_result` then has the rounds that
        were merged, and the uploads that the failed one had admitted. It is None if
        there are neither.
        """
        callbacks = checked_callbacks(callbacks)
        check_default_device()
        if not hasattr(grid, "get_node_ids"):
            raise ConfigurationError(
                f"grid must be the main's Grid, or a LocalGrid, got {grid!r:.80}"
            )
        if evaluate_fn is not None and not callable(evaluate_fn):
            raise ConfigurationError(
                f"evaluate_fn must be a function, got {evaluate_fn!r:.80}"
            )
        check_whole("num_rounds", num_rounds, 0)
        check_range("timeout", timeout, 0)
        _check_hooks(type(self))
        self.check_secure()
        if self.secure is not None and reopen:
            raise ConfigurationError(
                "reopen=True with secure=: a second sum over other clients would "
                "reveal the difference; leave one of them out"
            )
        self.timeout, self.partial_result = timeout, None
        self.cohort = Cohort(self.seed, allow_foreign=False)  # of this run
        self.num_rounds = num_rounds
        began = time.monotonic()
        train_config = train_config or ConfigRecord()
        # As texts, because JSON has no bytes, and NaN does not equal itself.
        config = {f"train_config.{k}": repr(v) for k, v in train_config.items()}
        run_config = {f"run_config.{k}": v for k, v in run_config_of(grid).items()}
        groups = self.initial_groups()
        check_groups(groups, f"{type(self).__name__}.initial_groups")
        if not isinstance(initial_arrays, ArrayRecord):
            raise ConfigurationError(
                "initial_arrays must be an ArrayRecord, got "
                f"{type(initial_arrays).__name__}: pass ArrayRecord(...)"
            )
        first = ServerState.first(initial_arrays, dict(groups))
        self.check(first)  # with which the options are complete
        logger.info("Starting %s strategy:", type(self).__name__)
        self.summary()
        run = Run.begin(
            first,
            {**self.options(), **config, **run_config},
            checkpoint_dir,
            resume,
            reopen=reopen,
            num_rounds=num_rounds,
            may_change={f"run_config.{key}" for key in may_change},
        )
        try:
            if run.server_round:
                self.check(run.state)
            self.cohort.recall_absences(run.absences)
            Driver(self, grid, run).rounds(
                num_rounds,
                train_config,
                evaluate_config or ConfigRecord(),
                evaluate_fn,
                callbacks,
            )
        except BaseException:  # also of the user's own functions, and Ctrl+C
            if run.has_something:
                self.partial_result = run.result()
                again = f". {checkpoint_dir} has what arrived: run the same again "
                logger.error(
                    "The run ends with an error. The strategy's partial_result has "
                    "the %s, and the %s uploads of the last exchange%s",
                    "merged model" if run.has_merged else "initial model",
                    len(self.partial_result.uploads),
                    "" if checkpoint_dir is None else again + "with resume=True",
                )
            raise
        finally:
            run.journal.release()
        result = run.result()
        last = run.server_round
        again = ""
        if checkpoint_dir is not None and self.secure is None:
            again = f". start(..., num_rounds={last}, resume=True, reopen=True) asks "
            again += "those again whom it asked last"
        if out := result.left_out:
            text = "%s of the clients asked are not in the last round's model (%s), "
            text += "for the reasons above: what only their data show is not in it%s"
            logger.warning(text, len(out), listed(out), again)
        if self.refine is not None and num_rounds and result.unrefined is None:
            text = "the model is not refined: round %s was not done as the last one"
            text += ", or no client replied to what follows (the reasons are above)%s"
            logger.warning(text, last, again)
        logger.info("")
        logger.info("Strategy execution finished in %.2fs", time.monotonic() - began)
        return result

    # --- Flower's hooks

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> NoReturn:
        """Raise an error: only :meth:`start` can do this strategy's rounds.

        Raises
        ------
        ConfigurationError
            Always.
        """
        raise ConfigurationError(
            f"call {type(self).__name__}.start(grid, initial_arrays, ...): Flower's "
            "own loop has one request a round"
        )

    def initialize_parameters(self, client_manager: object) -> NoReturn:
        """Raise an error that explains what to do on Flower's older servers.

        Raises
        ------
        ConfigurationError
            Always.
        """
        raise ConfigurationError(
            f"{type(self).__name__} is a strategy of Flower's Message API: start it in "
            "an @app.main, or use as_legacy() and server_app() of flwr_fisher.legacy"
        )


def _check_hooks(strategy: type) -> None:
    """Raise :class:`ConfigurationError` for a user's hooks that nobody would call."""
    for base in strategy.__mro__:
        is_ours = base.__module__.startswith("flwr_fisher.")
        if is_ours or issubclass(CurvatureStrategy, base):
            continue
        for hook in vars(base).keys() & _FLOWERS_HOOKS:
            raise ConfigurationError(
                f"start() does not call {base.__name__}.{hook}: override exchanges(), "
                "round_config() or evaluation_config(), or pass start(callbacks=...)"
            )
