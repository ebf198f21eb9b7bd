"""One exchange of a round: ask clients, wait, admit their replies, take the step.

Read :class:`ExchangeRun` downwards: ``gather`` restores what an interrupted run has on
disk, asks clients and receives their replies; ``step`` computes the next state from
what the door admitted; ``close`` records whose uploads it used.
"""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic

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
from flwr.serverapp.strategy import FedAvg

from flwr_fisher.errors import (
    CheckpointError,
    ParamsError,
    RoundError,
    StructureError,
    WireError,
    listed,
)
from flwr_fisher.log_lines import logger
from flwr_fisher.randomness import seed_of_clients
from flwr_fisher.server.cohort import Cohort
from flwr_fisher.server.door import Door
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
from flwr_fisher.server.mailbox import Receive, Waiting, collect
from flwr_fisher.server.policy import Policy
from flwr_fisher.wire import NUM_EXAMPLES, named_options

_POLICY = "policy"  # the policy's group of the state's tensors
# Seconds until a node is asked again in a collection window, the first time.
_AGAIN_IF_DEAD, _AGAIN_IF_SILENT = 60.0, 3600.0
# The errors of a step that cannot use its uploads, or one of them.
_STEP_ERRORS = (
    ParamsError,
    StructureError,
    WireError,
    KeyError,  # a metric that a client has left out
    ArithmeticError,
    torch.linalg.LinAlgError,  # type: ignore[attr-defined]
)


class Strategy(FedAvg):
    """The part of a strategy that the server uses: FedAvg's sampling, and these hooks.

    Attributes
    ----------
    seed : int
        Decides which clients a round samples.
    cohort : Cohort
        The clients.
    policy : Policy
        What limits a single client's influence.
    waiting : Waiting
        When a round ends.
    timeout : float
        Seconds until a request's deadline.
    secure : Secure | None
        Replaces uploads by secure sums.
    num_rounds : int
        The run's.
    refine : object
        What follows the last round, or None.
    """

    seed: int
    cohort: Cohort
    policy: Policy
    waiting: Waiting
    timeout: float
    secure: Secure | None
    num_rounds: int
    refine: Any

    @abstractmethod
    def exchanges(self, server_round: int) -> Sequence[Exchange[Any]]:
        """Return the exchanges of a round, in their order."""

    def check(self, state: ServerState) -> None:
        """Raise an error, before any client trains, for what does not fit the strategy.

        That is a model, or the number of rounds (`num_rounds`).

        Raises
        ------
        ConfigurationError
            It names the argument, and says what to do.
        """

    def initial_groups(self) -> Groups:
        """Return the groups of a new run's state beside parameters; by default none."""
        return {}

    def may_skip(self, server_round: int) -> bool:
        """Return whether the run can skip this round, if `waiting` allows it."""
        return True

    def round_config(self, server_round: int, config: ConfigRecord) -> ConfigRecord:
        """Return the part of `start`'s config for clients that train in a round."""
        return config

    def evaluation_config(
        self, server_round: int, config: ConfigRecord
    ) -> ConfigRecord:
        """Return the part of `start`'s config for clients that evaluate."""
        return config


def must_be_alike(strategy: Strategy, exchanges: Iterable[Exchange[Any]]) -> bool:
    """Return whether clients must train and freeze what most do.

    Also for a refinement, in which all that train take part.
    """
    alike = any(exchange.require_same_parameters for exchange in exchanges)
    return alike or strategy.refine is not None


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


class ExchangeRun(Generic[P]):
    """A running exchange: gather uploads, take the step, close.

    Parameters
    ----------
    strategy, exchange, state, config, grid
        Who asks, for what, from which state, with which config of the user's.
    journal : ExchangeJournal
        What happened in this exchange before a restart, and where its events go.
    previous : Mapping[int, float]
        The weights of the clients whose uploads the exchange before used, by number.
    """

    def __init__(
        self,
        strategy: Strategy,
        exchange: Exchange[P],
        state: ServerState,
        config: ConfigRecord,
        grid: Grid,
        journal: ExchangeJournal,
        previous: Mapping[int, float],
    ) -> None:
        self.strategy, self.exchange, self.state = strategy, exchange, state
        self.grid, self.journal, self.cohort = grid, journal, strategy.cohort
        # An optional exchange waits for nobody to connect. But what few clients say of
        # the model must not be taken for what all of them say.
        if callable(exchange.clients):  # it may draw from all who are here
            self.cohort.present(grid, strategy.timeout)
        self._numbers = exchange.numbers(state, previous)
        record, asked = journal.record, len(self._numbers or ())
        # Others may be here now than at the begin.
        half = max(1, (asked + 1) // 2) if record is None else record.needed
        self.needed = half if exchange.optional else strategy.min_train_nodes
        # A collection window asks whoever connects, so it has no sample.
        self._window = strategy.waiting.window if self._numbers is None else None
        if self._window is not None and record is not None and record.clients:
            logger.warning("the round began without a window, and goes on without one")
            self._window = None
        self._told = {name: repr(value) for name, value in config.items()}
        options = {"job": "train", **exchange.options}
        self._compares = must_be_alike(strategy, [exchange])
        # Uploads say it again: in a window only the last one shows what most clients
        # are like, after a restart those on disk are not asked, and some answer late.
        if not strategy.secure:
            options["tell"] = "parameters" if self._compares else "labels"
        self.config = ConfigRecord({**config, **named_options(options)})
        # Only trainings need have the strategy's own weight among their metrics.
        weighted_by = NUM_EXAMPLES if exchange.optional else strategy.weighted_by_key
        again = exchange.clients == "previous" and not exchange.optional
        weights = previous if again else {}
        policy = strategy.policy
        if not exchange.limit_curvature:
            policy = replace(policy, max_curvature=math.inf)
        self.door = Door(self.cohort, policy, weighted_by, exchange, state, weights)
        self._sampled: set[str] | None = None  # names, or None for all that connect
        self._all_asked = False  # of those that are sampled
        self._due: set[int] = set()  # nodes without a reply
        # By node: how often it was asked, and when for the last time.
        self._requests: dict[int, tuple[int, float]] = {}

    # --- 1. gather: what is on disk, then what clients send

    def gather(self, late: Receive) -> None:
        """Restore the uploads of an interrupted run, then ask, and receive replies.

        `late` is called with a reply that arrives after the exchange.

        Raises
        ------
        RoundError
            If too few clients are connected when the time is up.
        CheckpointError
            If the exchange was begun with a collection window, and the strategy has
            none now; or if its round began with another config.
        """
        record, messages = self.journal.record, list[Message]()
        if record is not None:
            record.check_config(self._told, self.journal.way_out)
        # What is on disk comes first: nobody is asked again for what is here. There may
        # be uploads without a record, or the reverse: a server can die at any moment.
        self._restore(record)
        if record is not None and record.closed is not None:
            if lost := set(record.closed) - {u.client for u in self.door.admitted}:
                raise CheckpointError(
                    f"{self.journal.folder}: the upload of {listed(lost)} is damaged, "
                    "or no longer accepted, and the exchange's step used it: restore "
                    f"it, or {self.journal.way_out}"
                )
            self.cohort.recall_absences(record.absences)
            self._enough(record)  # for the exchanges that follow
            return  # all that the step used is here: it is taken again
        # From here on the exchange is open. It begins, or goes on after a restart with
        # the clients that its record names.
        begins = record is None
        if record is None:
            record, messages = self._open()
        timeout, enough = self.strategy.timeout, self._enough(record)
        if record.clients is None:
            # Also if it is resumed with enough uploads, and so asks nobody.
            self.cohort.connected = len(self.cohort.present(self.grid, timeout))
            timeout = self._window_left(record)
        else:
            self._sampled = set(record.clients)
            if not begins:  # those who had left by then are still missing
                gone = {*self.cohort.named(self._numbers or ())} - self._sampled
                self.door.left_out.mark_missing(sorted(gone), "it was not asked")
        if not begins and (others := self._unasked()):
            logger.info("%s: asking %s", self.exchange.log_name, listed(others))
        if not begins and self.exchange.optional:
            # While it is open, nobody is asked who connects later; so ask those who are
            # here, and have not replied before the restart.
            messages = self._newcomers() or []
        if timeout > 0:
            self._receive(messages, timeout, max(enough, self.needed), late)
        self.door.left_out.mark_missing(
            sorted(self._unasked()), "it did not connect, or could not be asked"
        )
        self.door.left_out.log_missing()

    def _restore(self, record: ExchangeRecord | None) -> None:
        """Admit the uploads of an interrupted run, even of disconnected clients.

        The client of an upload that is no longer accepted is rejected. If the exchange
        was closed, only the uploads that its step used count.
        """
        left_out, closed = self.door.left_out, None
        if record is not None:
            self.door.expected = len(record.clients or ())
            self.cohort.connected, closed = record.connected, record.closed
        if record is not None and closed is not None:
            left_out.missing |= record.missing
            for name, reason in record.rejected.items():
                left_out.reject(name, reason)
        for identity, arrays, metrics in self.journal.uploads():
            if closed is not None and identity.name not in closed:
                continue
            self.cohort.recall(identity)
            try:
                self.door.admit(identity, arrays, metrics)
            except Exception as error:  # admitted before, perhaps by another version
                left_out.reject(identity.name, error, identity.node)

    def _open(self) -> tuple[ExchangeRecord, list[Message]]:
        """Sample clients, record them, and return the record and the requests.

        Raises
        ------
        RoundError
            If too few nodes are connected when the time is up, or too few of them train
            the same parameters.
        """
        opened, told = time.time(), self._told
        if self._window is not None:
            return self.journal.note(ExchangeRecord(None, 0, opened, told)), []
        nodes = self._sample() if self._numbers is None else self._named()
        names = [self.cohort.name(node) for node in nodes]
        # The record is written before the first request leaves, so that a resumed run
        # asks the same clients.
        connected, optional = self.cohort.connected, self.exchange.optional
        self.needed = max(self.needed, optional * (len(names) + 1) // 2)
        record = ExchangeRecord(names, connected, opened, told, optional, self.needed)
        self.journal.note(record)
        self.door.expected = len(names)
        # Before anybody trains: leave out whose parameters cannot be merged, and end
        # the round if too few are left.
        nodes = self._without_mismatched(self.door.without_done(nodes))
        self.door.check_enough(self.needed, len(nodes))
        return record, self._ask(nodes)

    def _enough(self, record: ExchangeRecord) -> float:
        """Return how many usable replies end the exchange.

        Those whom a step needs again were enough, and all of them are waited for. For a
        refinement, as many are enough as for the exchange that drew its clients.
        """
        asked = None if record.clients is None else len(record.clients)
        if self.exchange.clients != "previous":
            enough = max(self.strategy.waiting.enough(asked), self.needed)
            # It is reopened for all that were not waited for, as is what follows it.
            follows = self._numbers is not None and self.cohort.enough == math.inf
            self.cohort.enough = math.inf if record.reopened or follows else enough
        optional = self.exchange.optional and self.strategy.secure is None
        most = self.cohort.enough if self._numbers is None or optional else math.inf
        return min(most, math.inf if asked is None else asked)

    def _sample(self) -> list[int]:
        """Return the sampled nodes."""
        strategy, exchange = self.strategy, self.exchange
        everyone, optional = exchange.clients == "all", exchange.optional
        nodes = self.cohort.sample(
            self.grid,
            fraction=1.0 if everyone else strategy.fraction_train,
            minimum=self.needed,
            available=self.needed if optional else strategy.min_available_nodes,
            # In one shot, who is not asked now is never asked.
            all_connected=strategy.num_rounds == 1 and not optional,
            server_round=self.journal.server_round,
            purpose="train",
            timeout=strategy.timeout,
        )
        logger.info("configure_train: Sampled %s nodes", len(nodes))
        return nodes

    def _named(self) -> list[int]:
        """Return the nodes of the clients that the exchange names."""
        cohort, timeout = self.cohort, self.strategy.timeout
        numbers = set(self._numbers or ())
        missing = self.door.left_out.mark_missing
        if self.exchange.optional:  # nobody is waited for, and it is no training
            here = cohort.present(self.grid, timeout)
            nodes = sorted(cohort.do_any_job.intersection(here), key=cohort.order)
        else:
            nodes = cohort.ready(self.grid, 0, min(self.needed, len(numbers)), timeout)
            here = nodes
        nodes = [n for n in nodes if cohort.identity(n).number in numbers]
        asked = {cohort.identity(node).number for node in nodes}
        present = {cohort.identity(node).number for node in here}
        missing(cohort.named(numbers - present), "it is no longer connected")
        reason = "its ClientApp can only train (use a FisherClient)"
        missing(cohort.named(numbers & present - asked), reason)
        logger.info("%s: asking %s nodes", self.exchange.log_name, len(nodes))
        return nodes

    def _without_mismatched(self, nodes: list[int]) -> list[int]:
        """Reject the nodes with what cannot be merged; return the rest."""
        if not nodes:
            return nodes
        # Those asked before count, too, and after a restart those that have replied: a
        # newcomer is compared with all.
        cohort, timeout, again = self.cohort, self.strategy.timeout, list[int]()
        if self._sampled:
            here = cohort.present(self.grid, timeout)
            again = [n for n in here if cohort.name(n) in self._sampled]
        everyone = [*dict.fromkeys([*self._requests, *again, *nodes])]
        mismatched = cohort.mismatched(
            self.grid, everyone, self.state.params, timeout, parameters=self._compares
        )
        for node in mismatched.keys() & set(nodes):
            name, error = cohort.name(node), mismatched[node]
            self.door.left_out.reject(name, error, node, stage="configure_train")
        return [node for node in nodes if node not in mismatched]

    def _ask(self, nodes: list[int]) -> list[Message]:
        """Return the requests to nodes, and note that they are asked."""
        for node in nodes:
            times, _ = self._requests.get(node, (0, 0.0))
            self._requests[node] = times + 1, time.monotonic()
        self._due |= set(nodes)
        if not nodes:
            return []
        server_round = self.journal.server_round
        by_number = self.exchange.records(self.state)

        def arrays(node: int) -> ArrayRecord:
            return by_number(self.cohort.identity(node).number)

        return requests(self.strategy, server_round, arrays, self.config, nodes)

    def _window_left(self, record: ExchangeRecord) -> float:
        """Return how long the collection window is still open."""
        if self._window is None:
            raise CheckpointError(
                f"round {self.journal.server_round} began with a collection window: "
                "resume it with Waiting(window=...)"
            )
        # Time in which no server ran counts, too.
        left = self._window - max(0.0, time.time() - record.opened)
        logger.info("configure_train: the window closes in %.0f s", max(left, 0.0))
        self.door.way_out = "the window has closed: a longer one waits for more clients"
        if self.journal.on_disk:
            self.door.way_out += "; resume=True and reopen=True open it again"
        return left

    def _receive(
        self, messages: list[Message], timeout: float, enough: float, late: Receive
    ) -> None:
        """Receive replies, and save each admitted one."""
        door, cohort, expired = self.door, self.cohort, list[int]()
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
        ):
            # Each reply is decided on as soon as it is here, and each admitted one is
            # on the disk before the next is looked at.
            self._due.discard(reply.node)
            identity = cohort.identity(reply.node)
            if door.has(identity):
                continue  # it has reconnected under another node id
            # The SuperLink answers for a node that is gone (nothing will come), and for
            # one whose time is up (which must not be silent again in the next round).
            if not reply.from_superlink:
                cohort.replied(reply.node)
            elif not reply.nothing_will_come:
                expired.append(reply.node)
            if (records := door.take(reply)) is not None:
                self.journal.save(identity, *records)
        # Who is silent at the deadline sits out later rounds; who is only slower than
        # enough others does not.
        silent, reason = self._due, "not waited for, since enough have replied"
        if not are_enough():
            silent, reason = {*self._due, *expired}, f"none within {timeout:.0f} s"
            cohort.missed(silent, self.journal.server_round)
        if are_enough() or time.monotonic() > deadline:
            door.left_out.mark_missing(map(cohort.name, silent), reason)

    # --- nodes that connect during the exchange

    def _newcomers(self) -> list[Message] | None:
        """Return the messages to nodes that have connected and were not asked yet.

        It is None if no other node is expected.
        """
        # With a sample, only its clients may join: those that were not connected, or
        # come back under another node id after a restart of the server. In a window,
        # everybody may.
        unasked, identity = self._unasked(), self.cohort.identity
        if self._sampled is not None and not unasked:
            return None
        if self.exchange.optional and self._requests:
            return None
        nodes = self.cohort.present(self.grid, self.strategy.timeout)
        if self._sampled is not None:
            new = [node for node in nodes if identity(node).names & unasked]
            new = self._without_mismatched(sorted(new, key=self.cohort.order))
        else:  # only the uploads will show what most clients train
            self.cohort.connected = len(nodes)
            nodes = self.door.without_done(nodes)
            new = [node for node in nodes if self._may_be_asked(node)]
            new.sort(key=self.cohort.order)
            self.door.expected += len(new) - len(self._requests.keys() & new)
        return self._ask(new)

    def _may_be_asked(self, node: int) -> bool:
        """Return whether to ask a node in a window, for the first time or again.

        A node that died is asked when it is back, later each time. A node that was
        restarted may have lost the request, which the server cannot see. So if clients
        keep their uploads, a silent node is asked again, too.
        """
        if node not in self._requests:
            return True
        times, last = self._requests[node]
        if node in self._due and not self.journal.on_disk:
            return False
        wait = _AGAIN_IF_SILENT if node in self._due else _AGAIN_IF_DEAD
        return time.monotonic() > last + wait * (1 << (times - 1))

    def _unasked(self) -> set[str]:
        """Return the names of sampled clients that have not been asked yet."""
        if not self._sampled or self._all_asked:
            return set()
        identities = map(self.cohort.identity, self._requests)
        requested = {name for identity in identities for name in identity.names}
        unasked = self._sampled - requested - self.door.done()
        self._all_asked = not unasked  # for good
        return unasked

    # --- 2. step

    def step(self) -> tuple[Step, Uploads[P], MetricRecord]:
        """Take the step, and check its result; return it, its uploads and metrics.

        An upload with which no step can be taken, not even by itself, is withdrawn.

        Raises
        ------
        RoundError
            If there are too few uploads, or if a parameter is not finite after the step
            although no single upload is the cause.
        """
        # What the policy knows of the rounds before is a group of the state.
        known = {n: float(v) for n, v in self.state.group(_POLICY).items()}
        # Numbers can pass every check and still make a step impossible. Then each
        # upload is tried alone; those that fail are left out, and the step is tried
        # again with the others, as long as there are enough.
        while True:
            uploads = self.door.uploads(self.needed, known)
            try:
                step = self._try_step(uploads)
                break
            except _STEP_ERRORS as error:
                if not self._withdraw_culprits(uploads):
                    if isinstance(error, KeyError):
                        raise  # no single client's: a mistake in the step
                    raise RoundError(
                        f"the step failed: {error}. The round is not finished; with a "
                        "checkpoint_dir, its uploads are kept"
                    ) from error
        metrics = MetricRecord()
        if not self.exchange.optional:  # or else it reports its step's metrics alone
            metrics = self.door.metrics(self.strategy.train_metrics_aggr_fn, uploads)
        if remembered := self.door.remembered:  # for the policy in the next round
            float64 = partial(torch.tensor, dtype=torch.float64)
            tensors = {name: float64(value) for name, value in remembered.items()}
            groups = {**step.state.groups, _POLICY: tensors}
            step = replace(step, state=replace(step.state, groups=groups))
        return step, uploads, metrics

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

    # --- 3. close

    def close(self, uploads: Uploads[P]) -> None:
        """Record the clients whose uploads the step used, for a resumed run.

        With none, an optional exchange has failed, and a resumed run does not repeat
        it.
        """
        closed = replace(
            self.journal.record or ExchangeRecord([], 0, time.time(), self._told, True),
            connected=self.cohort.connected,
            closed=sorted(upload.client for upload in uploads),
            missing=dict(self.door.left_out.missing),
            rejected=dict(self.door.left_out.rejected),
            absences=self.cohort.absences(),
        )
        if closed != self.journal.record:  # or else it is resumed
            self.journal.note(closed)
