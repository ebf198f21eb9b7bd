"""One exchange of a round: ask clients, wait, admit replies, take the step.

Most strategies have one exchange a round; FedFisher's sums and TCT have several.
Long: one object has the whole exchange, because its phases share their state.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, Protocol

import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid

from flwr_fisher.errors import (
    CheckpointError,
    ConfigurationError,
    ParamsError,
    RoundError,
    StructureError,
    listed,
)
from flwr_fisher.log_lines import logger
from flwr_fisher.params import Params
from flwr_fisher.randomness import seed_of_clients
from flwr_fisher.server.cohort import Cohort, Sample
from flwr_fisher.server.door import NORMS_STAGE, TRAIN, Door
from flwr_fisher.server.exchange import (
    Exchange,
    Groups,
    P,
    Secure,
    ServerState,
    Step,
    Upload,
    Uploads,
)
from flwr_fisher.server.journal import ExchangeJournal, ExchangeRecord
from flwr_fisher.server.mailbox import Receive, collect
from flwr_fisher.server.policy import Policy
from flwr_fisher.server.waiting import Asked, Waiting
from flwr_fisher.wire import NUM_EXAMPLES, named_options

_POLICY = "policy"  # the policy's group of the state's tensors
_AT_ONCE = 4  # uploads held back, if they are added up as they arrive
# The errors of a step that cannot use its uploads.
_STEP_ERRORS = (
    ParamsError,
    StructureError,
    ArithmeticError,
    torch.linalg.LinAlgError,  # type: ignore[attr-defined]
)
MetricsAggregator = Callable[[list[RecordDict], str], MetricRecord]


class Strategy(Protocol):
    """The part of a strategy that the server uses."""

    seed: int
    cohort: Cohort
    policy: Policy
    waiting: Waiting
    timeout: float
    secure: Secure | None
    fraction_train: float
    fraction_evaluate: float
    min_train_nodes: int
    min_evaluate_nodes: int
    min_available_nodes: int
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    train_metrics_aggr_fn: MetricsAggregator
    moves_norms: ClassVar[bool]

    def exchanges(self, server_round: int) -> Sequence[Exchange[Any]]:
        """Return the exchanges of a round, in their order."""

    def check(self, state: ServerState) -> None:
        """Raise an error, before any client trains, for a model that does not fit."""

    def initial_groups(self) -> Groups:
        """Return the groups of a new run's state beside parameters."""

    def may_skip(self, server_round: int) -> bool:
        """Return whether the run can continue after a failed round."""

    def norms_to_refresh(self, before: Params, after: Params) -> Sequence[str]:
        """Return the norms that the round's clients must measure."""

    def round_config(self, server_round: int, config: ConfigRecord) -> ConfigRecord:
        """Return the caller's config for clients that train."""

    def evaluation_config(
        self, server_round: int, config: ConfigRecord
    ) -> ConfigRecord:
        """Return the caller's config for clients that evaluate."""

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the requests to evaluate."""

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Aggregate the replies to the evaluation."""


def requests(
    strategy: Strategy,
    server_round: int,
    arrays_for: Callable[[int], ArrayRecord],
    config: ConfigRecord,
    nodes: Iterable[int],
    message_type: str = MessageType.TRAIN,
) -> list[Message]:
    """Return the messages to nodes, without changing the caller's records."""
    seed = named_options({"seed": seed_of_clients(strategy.seed)})
    sent = ConfigRecord({**config, "server-round": server_round, **seed})
    messages = []
    for node in nodes:
        content = RecordDict({strategy.arrayrecord_key: arrays_for(node)})
        content[strategy.configrecord_key] = sent
        group = str(server_round)
        messages.append(Message(content, node, message_type, group_id=group))
    return messages


def with_secure_sums(
    strategy: Strategy,
    exchanges: Sequence[Exchange[Any]],
    label: str,
    weighted_by: str | None = None,
) -> Sequence[Exchange[Any]]:
    """Return exchanges, as secure sums if the strategy has `secure=`.

    `label` makes their seed another than that of a run's other exchanges. `weighted_by`
    is the metric that weights clients, by default the strategy's.

    Raises
    ------
    ConfigurationError
        If the strategy returned something else than a list of exchanges.
    """
    every: object = exchanges
    if not isinstance(every, list | tuple) or not all(
        isinstance(one, Exchange) for one in every
    ):
        raise ConfigurationError(
            f"exchanges() must return a list of Exchange, got {every!r:.80}: return "
            "[Exchange(options, read, step)]"
        )
    if strategy.secure is None:
        return exchanges
    seed, weight = f"{strategy.seed}/{label}", weighted_by or strategy.weighted_by_key
    return strategy.secure.secured(exchanges, seed=seed, weighted_by=weight)


def door_of(
    strategy: Strategy,
    exchange: Exchange[P],
    state: ServerState,
    weighted_by: str | None = None,
) -> Door[P]:
    """Return the door for an exchange's replies; `weighted_by` is as above."""
    policy = strategy.policy
    if exchange.fold is not None:  # uploads that are added at once cannot be compared
        policy = replace(policy, max_weight=math.inf, max_distance=math.inf)

    check = None if exchange.check is None else exchange.check(state)

    def read(arrays: ArrayRecord, like: Params) -> P:
        payload = exchange.read(arrays, like)
        if check is not None:
            check(payload)
        return payload

    return Door(
        strategy.cohort,
        read,
        state.params,
        weighted_by or strategy.weighted_by_key,
        policy,
        fold=exchange.fold,
        kept=exchange.kept,
        quiet=bool(exchange.log_name),
    )


class ExchangeRun(Generic[P]):
    """A running exchange of a round: open, gather, step and close.

    Its `journal` has what happened before a restart. If the exchange is `optional`, the
    round can go on without it: all of its clients that are connected now are asked, and
    one reply is enough.
    """

    def __init__(
        self,
        strategy: Strategy,
        exchange: Exchange[P],
        state: ServerState,
        config: ConfigRecord,
        grid: Grid,
        journal: ExchangeJournal,
        *,
        optional: bool = False,
    ) -> None:
        self.strategy, self.exchange, self.state = strategy, exchange, state
        self.config = exchange.configure(config)
        self.server_round = journal.server_round
        self.grid, self.journal, self.timeout = grid, journal, strategy.timeout
        self.cohort, self.waiting = strategy.cohort, strategy.waiting
        self.needed, self.optional = strategy.min_train_nodes, optional
        weighted_by = strategy.weighted_by_key
        if optional:
            self.needed, self.waiting = 1, replace(self.waiting, window=None)
            weighted_by = NUM_EXAMPLES  # a metric of some trainings
        elif self.waiting.window is not None and exchange.require_same_parameters:
            # Only the last upload shows what most clients train and freeze.
            own = named_options({"tell-frozen": True})
            self.config = ConfigRecord({**self.config, **own})
        self.door = door_of(strategy, exchange, state, weighted_by)
        if optional:
            self.door.stage = NORMS_STAGE  # nobody trains
        self._sampled: set[str] | None = None  # names, or None for all that connect
        self._asked: dict[int, Asked] = {}
        self._due: set[int] = set()  # nodes without a reply

    # --- ask

    def open(self) -> tuple[ExchangeRecord, list[Message]]:
        """Sample clients, record them, and return the requests.

        Raises
        ------
        RoundError
            If too few nodes are connected when the time is up, or too few of them train
            the same parameters.
        """
        sample = self.sample()
        names = [self.cohort.name(node) for node in sample.nodes]
        record = self.journal.open(names, sample.wanted, self.cohort.connected)
        self.door.expected = len(names)
        new = self.door.without_done(sample.nodes)  # clients with an upload on disk
        nodes = self._without_mismatched(new)
        self.door.check_enough(self.needed, len(nodes))
        return record, self._ask(nodes)

    def sample(self) -> Sample:
        """Return the nodes to ask."""
        strategy, cohort = self.strategy, self.cohort
        if not isinstance(self.exchange.clients, str):
            numbers = self.exchange.clients(self.state)
            minimum = min(self.needed, len(numbers))
            if self.optional:
                ready = cohort.present(self.grid, self.timeout)
                ready = sorted(ready, key=cohort.order)
            else:
                ready = cohort.ready(self.grid, 0, minimum, self.timeout)
            nodes = [node for node in ready if cohort.identity(node).number in numbers]
            there = {cohort.identity(node).number for node in nodes}
            gone = cohort.named(set(numbers) - there)
            self.door.missing |= dict.fromkeys(gone, "it is no longer connected")
            name = self.exchange.log_name
            if not self.optional:
                name = name or str(self.exchange.options.get("job", ""))
            part = name and f"{name}: "
            begin = NORMS_STAGE if self.optional else "configure_train"
            if part or not self.optional:  # else the driver has logged it
                logger.info("%s: %sasking %s nodes", begin, part, len(nodes))
            return Sample(nodes, len(nodes))
        sample = cohort.sample(
            self.grid,
            fraction=1.0 if self.exchange.clients == "all" else strategy.fraction_train,
            minimum=strategy.min_train_nodes,
            available=strategy.min_available_nodes,
            server_round=self.server_round,
            purpose="train",
            timeout=self.timeout,
            waiting=strategy.waiting,
        )
        logger.info("configure_train: Sampled %s nodes", len(sample.nodes))
        return sample

    def _without_mismatched(self, nodes: list[int]) -> list[int]:
        """Reject the nodes with parameters that cannot be merged; return the rest."""
        if not self.exchange.require_same_parameters or not nodes:
            return nodes
        everyone, like = [*self._asked, *nodes], self.state.params
        mismatched = self.cohort.mismatched(self.grid, everyone, like, self.timeout)
        for node in mismatched.keys() & set(nodes):
            self.door.reject(node, mismatched[node], "configure_train")
        return [node for node in nodes if node not in mismatched]

    def _ask(self, nodes: list[int]) -> list[Message]:
        """Return the requests to nodes, and note that they are asked."""
        for node in nodes:
            times = self._asked[node].times if node in self._asked else 0
            self._asked[node] = Asked(times + 1, time.monotonic())
        self._due |= set(nodes)
        if not nodes:
            return []
        by_number, identity = self.exchange.records(self.state), self.cohort.identity
        return requests(
            self.strategy,
            self.server_round,
            lambda node: by_number(identity(node).number),
            self.config,
            nodes,
        )

    # --- wait and admit

    def gather(self, late: Receive) -> None:
        """Restore the uploads of an interrupted run, then ask, and receive replies.

        `late` is called with a reply that arrives after the exchange.

        Raises
        ------
        RoundError
            If too few clients are connected when the time is up.
        CheckpointError
            If the exchange was begun with a collection window, and the strategy has
            none now.
        """
        record, messages = self.journal.record, list[Message]()
        self._restore(record)
        if record is not None and record.closed is not None:
            lost = set(record.closed) - {u.client for u in self.door.admitted}
            if not lost:
                self.cohort.recall_absences(record.absences)
                return
            record = self.journal.reopen(lost)
        if record is not None:
            self._log_newcomers(record)
        elif self.waiting.window is not None and isinstance(self.exchange.clients, str):
            record = self.journal.open(None, 0, 0)
        else:
            record, messages = self.open()
        if record.clients is None:
            timeout = self._window() - max(0.0, time.time() - record.opened)
            left = max(timeout, 0.0)
            logger.info("configure_train: the window closes in %.0f s", left)
            self.door.way_out = (
                "the window has closed: resume=True and reopen=True open it again"
                if self.journal.on_disk
                else "the window has closed: a longer one waits for more clients"
            )
            enough = self.waiting.enough_in_window
        else:
            self._sampled, timeout = set(record.clients), self.timeout
            enough = self.waiting.enough(record.wanted)
        if timeout > 0:
            self._receive(messages, timeout, max(enough, self.needed), late)
        self._mark_absent()

    def _restore(self, record: ExchangeRecord | None) -> None:
        """Admit the uploads of an interrupted run, even of disconnected clients.

        An upload that turned out to be bad is not read, and its client stays rejected.
        If the exchange was closed, only the uploads that its step used count.
        """
        door, rejected, closed = self.door, self.journal.all_set_aside, None
        if record is not None:
            door.expected = len(record.clients or ())
            self.cohort.connected, closed = record.connected, record.closed
            if closed is not None:
                rejected = {**record.rejected, **rejected}
                door.missing |= record.missing
        for name, reason in rejected.items():
            door.rejected.add(name, reason, stage=TRAIN)
        for identity, arrays, metrics in self.journal.uploads():
            name = identity.name
            if closed is not None and name not in closed:
                continue
            self.cohort.recall(identity)
            try:
                door.admit(identity, arrays, metrics)
            except Exception as error:  # admitted before, perhaps by another version
                door.rejected.add(name, error, stage=TRAIN, node=identity.node)
                self.journal.set_aside(name, door.rejected.reasons[name])

    def _window(self) -> float:
        """Return how long the collection window is still open."""
        if self.waiting.window is None:
            raise CheckpointError(
                f"round {self.server_round} began with a collection window: resume it "
                "with Waiting(window=...)"
            )
        return self.waiting.window

    def _receive(
        self, messages: list[Message], timeout: float, enough: float, late: Receive
    ) -> None:
        """Receive replies, and save each admitted one."""
        door, cohort, silent = self.door, self.cohort, list[int]()
        deadline = time.monotonic() + timeout

        def are_enough() -> bool:
            return len(door.admitted) >= enough

        for reply in collect(
            cohort.mailbox(self.grid),
            messages,
            timeout,
            late=late,
            enough=are_enough,
            newcomers=self._newcomers,
            at_once=_AT_ONCE if door.fold is not None else None,
        ):
            self._due.discard(reply.node)
            identity = cohort.identity(reply.node)
            if door.has(identity):
                continue  # it has reconnected under another node id
            if not reply.from_superlink:
                cohort.replied(reply.node)
            elif not reply.nothing_will_come:
                silent.append(reply.node)
            if (records := door.take(reply)) is not None:
                self.journal.save(identity, *records)
        if are_enough():
            door.mark_missing(self._due, "not waited for, since enough have replied")
            cohort.passed_over(self._due, self.server_round)
        else:
            silent += self._due
            if time.monotonic() > deadline:
                door.mark_missing(silent, f"none within {timeout:.0f} s")
            cohort.missed(silent, self.server_round)
        door.log_missing()

    # --- nodes that connect or are absent

    def _newcomers(self) -> list[Message] | None:
        """Return the messages to nodes that have connected and were not asked yet."""
        unasked, identity = self._unasked(), self.cohort.identity
        if self._sampled is not None and not unasked:
            return None
        nodes = self.cohort.present(self.grid, self.timeout)
        if self._sampled is not None:
            new = [node for node in nodes if identity(node).names & unasked]
            new = self._without_mismatched(sorted(new, key=self.cohort.order))
        else:  # only the uploads will show what most clients train
            self.cohort.connected = len(nodes)
            nodes = self.door.without_done(nodes)
            new = [node for node in nodes if self._may_be_asked(node)]
            new.sort(key=self.cohort.order)
            self.door.expected += len(new) - len(self._asked.keys() & new)
        return self._ask(new)

    def _may_be_asked(self, node: int) -> bool:
        """Return whether to ask a node in a window, for the first time or again."""
        if (asked := self._asked.get(node)) is None:
            return True
        due, kept = node in self._due, self.journal.on_disk
        return asked.again(time.monotonic(), due=due, kept=kept)

    def _unasked(self) -> set[str]:
        """Return the names of sampled clients that have not been asked yet."""
        if not self._sampled:
            return set()
        names = {name for n in self._asked for name in self.cohort.identity(n).names}
        return self._sampled - names - self.door.done()

    def _log_newcomers(self, record: ExchangeRecord) -> None:
        """Log the nodes that connected too late for this round."""
        if record.clients is None or record.connected > len(record.clients):
            return
        known = {*record.clients, *self.door.done()}
        nodes = self.cohort.present(self.grid, self.timeout)
        if new := [n for n in nodes if not self.cohort.identity(n).names & known]:
            logger.warning(
                "configure_train: round %s began before these nodes connected, so they "
                "are not asked: %s%s",
                self.server_round,
                listed(map(self.cohort.name, new)),
                ". With Waiting(window=...), a round asks all nodes that connect"
                if self.strategy.secure is None
                else "",
            )

    def _mark_absent(self) -> None:
        """Note the sampled clients that could not be asked."""
        for name in sorted(self._unasked()):
            reason = "it did not connect, or could not be asked"
            if name.startswith("node-"):
                reason += (
                    " under this id; give nodes a partition-id, or register them, to "
                    "know them again"
                )
            self.door.missing[name] = reason

    # --- step

    def step(self) -> tuple[Step, Uploads[P], MetricRecord]:
        """Take the step, and check its result; return it, its uploads and metrics.

        An upload with which no step can be taken, not even by itself, is withdrawn.

        Raises
        ------
        RoundError
            If there are too few uploads, or if a parameter is not finite after the step
            although no single upload is the cause.
        """
        # What the policy knows of the rounds before.
        known = {n: float(v) for n, v in self.state.group(_POLICY).items()}
        try:
            while True:
                uploads = self.door.uploads(self.needed, known)
                try:
                    step = self._try_step(uploads)
                    break
                except _STEP_ERRORS as error:
                    if not self._withdraw_culprits(uploads):
                        raise RoundError(
                            f"the step failed: {error}. The round is not finished; "
                            "with a checkpoint_dir, its uploads are kept"
                        ) from error
        finally:
            for client, reason in self.door.withdrawn.items():
                self.journal.set_aside(client, reason)
        metrics = MetricRecord()
        if not self.optional:  # or else it reports nothing
            metrics = self.door.metrics(self.strategy.train_metrics_aggr_fn)
        return self._with_remembered(step), uploads, metrics

    def _with_remembered(self, step: Step) -> Step:
        """Return the step with the policy's knowledge for the next round."""
        known = self.door.remembered
        if not known:
            return step
        tensors = {n: torch.tensor(v, dtype=torch.float64) for n, v in known.items()}
        groups = {**step.state.groups, _POLICY: tensors}
        return replace(step, state=replace(step.state, groups=groups))

    def _try_step(self, uploads: Uploads[P]) -> Step:
        step = self.exchange.take(self.state, uploads)
        for name, value in step.state.params.items():
            if value.is_floating_point() and not value.isfinite().all():
                raise ParamsError(
                    f"it made '{name}' NaN or infinite, though all uploads are finite"
                )
        return step

    def _withdraw_culprits(self, uploads: Uploads[P]) -> bool:
        """Withdraw each upload with which the step fails even by itself."""
        culprits: list[tuple[Upload[P], Exception]] = []
        for upload in uploads:
            try:
                self._try_step([upload])
            except RoundError:
                return False  # one reply cannot open a secure sum
            except _STEP_ERRORS as failure:
                culprits.append((upload, failure))
        if len(culprits) == len(uploads):
            return False  # the step fails for any uploads
        for upload, reason in culprits:
            self.door.withdraw(upload, reason)
        return bool(culprits)

    def close(self, uploads: Uploads[P]) -> None:
        """Record the clients whose uploads the step used, for a resumed run."""
        self.journal.close(
            [upload.client for upload in uploads],
            self.door.missing,
            self.door.rejected.reasons,
            self.cohort.absences(),
        )
