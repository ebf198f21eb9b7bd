"""A ``Grid`` for measures: it records a strategy's messages, and holds nodes out."""

import copy
import random
from collections.abc import Iterable, Mapping

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.flower_internals import NodeInfo, Run, nodes_of
from flwr_fisher.log_lines import logger
from flwr_fisher.randomness import seed_of_clients
from flwr_fisher.server.cohort import Cohort
from flwr_fisher.server.mailbox import Mailbox, collect
from flwr_fisher.wire import ConfigValue, named_options, serialized_bytes
from flwr_fisher.wire.options import OPTION
from measures.scores import TRAININGS

_SPELT_OUT = 3  # failures that the log names


def check_measured(grid: Grid) -> None:
    """Raise an error unless the grid is a :class:`MeasuredGrid`.

    Raises
    ------
    ConfigurationError
        If it is another grid. It says how to make a :class:`MeasuredGrid`.
    """
    if not isinstance(grid, MeasuredGrid):
        raise ConfigurationError(
            f"grid must be a MeasuredGrid, not {type(grid).__name__}: pass "
            "measured = MeasuredGrid(grid), and start the strategy with it, too"
        )


class MeasuredGrid(Grid):
    """Wraps a grid, records its messages for measures, and holds nodes out.

    Nodes that are held out never take part: ``get_node_ids`` does not name them. Which
    nodes these are depends on `seed`, and on the partitions that are connected when the
    first train message is sent, but not on node ids. A node that connects later takes
    part.

    Parameters
    ----------
    grid : Grid
        The grid of the ``ServerApp``.
    held_out : int | float, default 0
        How many nodes to hold out, or which fraction of them.
    seed : int, default 0
        Decides which nodes are held out and, with the partition, how a client splits
        its data.

    Raises
    ------
    ConfigurationError
        If `held_out` is out of range.
    """

    def __init__(self, grid: Grid, *, held_out: int | float = 0, seed: int = 0) -> None:
        if not held_out >= 0 or (isinstance(held_out, float) and not held_out < 1):
            raise ConfigurationError(
                f"held_out must be a number of nodes or a fraction in [0, 1), got "
                f"{held_out}"
            )
        self.grid, self.seed, self.num_held_out = grid, seed, held_out
        self._names, self._mailbox = Cohort(0), Mailbox(grid)
        self._hidden: frozenset[int] = frozenset()
        self._chosen = not held_out
        self._every = 0
        self._cohort: dict[int, MetricRecord | None] = {}
        self._uploaded: int | None = None

    # --- for measures

    def held_out(self) -> list[int]:
        """Return the connected nodes that are held out."""
        return sorted(self._split()[1], key=self._names.order)

    def held_out_clients(self) -> list[int]:
        """Return the numbers of the connected clients that are held out."""
        names = [self._names.name(node) for node in self.held_out()]
        return [int(name.removeprefix("partition-")) for name in names]

    def report_local(self, every: int) -> None:
        """Ask clients that train to evaluate their model in every `every`-th round."""
        self._every = every

    def count_uploads(self) -> int:
        """Return the size in bytes of all train replies since the first call."""
        self._uploaded = self._uploaded or 0
        return self._uploaded

    def take_cohort(self) -> dict[int, MetricRecord | None]:
        """Return, once, the nodes asked to train, with their replies' metrics.

        A reply counts if the client scored its model, so that the reply has a
        ``local-loss``.
        """
        cohort, self._cohort = self._cohort, {}
        return cohort

    def evaluate(
        self,
        nodes: Iterable[int],
        server_round: int,
        arrays: ArrayRecord,
        config: Mapping[str, ConfigValue],
        timeout: float,
    ) -> dict[int, MetricRecord]:
        """Let nodes evaluate the arrays; return the metrics of those that replied.

        If a node fails, the log has a warning.
        """
        job = ConfigRecord(
            {
                **config,
                "server-round": server_round,
                **named_options({"seed": seed_of_clients(self.seed)}),
            }
        )
        content = RecordDict({"arrays": arrays, "config": job})
        messages = [
            Message(content, node, MessageType.EVALUATE, group_id=str(server_round))
            for node in nodes
        ]
        metrics, failed = {}, []
        for reply in collect(self._mailbox, messages, timeout):
            message = reply.message
            if message.has_error():
                name = self._names.name(reply.node)
                failed.append(f"{name}: {message.error.reason}")
            elif records := list(message.content.metric_records.values()):
                metrics[reply.node] = records[0]
        if failed:
            reasons = "; ".join(sorted(failed)[:_SPELT_OUT])
            reasons += " …" if len(failed) > _SPELT_OUT else ""
            counts = len(failed), len(messages)
            logger.warning("%d of %d clients failed to evaluate: %s", *counts, reasons)
        return metrics

    # --- for a strategy

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that take part."""
        return self._split()[0]

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the nodes that take part."""
        shown = set(self.get_node_ids())
        return [node for node in nodes_of(self.grid) if node.node_id in shown]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        return self.grid.push_messages([self._request(m) for m in messages])

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived."""
        return self._watched(self.grid.pull_messages(message_ids))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and return their replies."""
        sent = [self._request(message) for message in messages]
        return self._watched(self.grid.send_and_receive(sent, timeout=timeout))

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message, as the grid does."""
        return self.grid.create_message(
            content, message_type, dst_node_id, group_id, ttl
        )

    def set_run(self, run: Run) -> None:
        """Set the grid's run."""
        self.grid.set_run(run)

    @property
    def run(self) -> Run:
        """The grid's run."""
        return self.grid.run

    def _split(self) -> tuple[list[int], list[int]]:
        """Split the connected nodes into participants and held-out ones."""
        nodes = list(self.grid.get_node_ids())
        if not self._chosen:
            self._hidden = self._choose(nodes)
        shown = [node for node in nodes if node not in self._hidden]
        if nodes and not shown:
            text = "All %d connected nodes are held out: lower held_out"
            logger.warning(text, len(nodes))
        return shown, [node for node in nodes if node in self._hidden]

    def _choose(self, nodes: list[int]) -> frozenset[int]:
        self._names.learn(self._mailbox, nodes, timeout=float("inf"))
        wanted = self.num_held_out
        count = wanted if isinstance(wanted, int) else round(wanted * len(nodes))

        # By a number for each node, so that a new node does not change the others.
        def rank(node: int) -> tuple[float, int]:
            key = f"{self.seed}/held out/{self._names.name(node)}"
            return random.Random(key).random(), node

        return frozenset(sorted(nodes, key=rank)[:count])

    def _request(self, message: Message) -> Message:
        """Note a train message; return a copy that asks for the measures' metrics."""
        if not _is_train(message):
            return message
        self._chosen = True
        self._cohort.setdefault(message.metadata.dst_node_id, None)
        records = message.content.config_records.items()
        name, config = next(iter(records), ("config", ConfigRecord()))
        server_round = config.get("server-round", 0)
        job = str(config.get(f"{OPTION}job", "train"))
        due = self._every and not int(str(server_round)) % self._every
        if not due or job not in TRAININGS:
            return message
        # A copy, because message, content and config belong to the strategy.
        request = copy.copy(message)
        scored = named_options({"job": "scored", "scored-job": job})
        changed = ConfigRecord({**config, **scored})
        request.content = RecordDict({**message.content, name: changed})
        return request

    def _watched(self, replies: Iterable[Message]) -> list[Message]:
        """Note the metrics of replies that evaluate the client's model."""
        received = list(replies)
        for reply in received:
            if not _is_train(reply) or not reply.has_content():
                continue
            if self._uploaded is not None:
                self._uploaded += serialized_bytes(reply.content)
            for record in reply.content.metric_records.values():
                if "local-loss" in record:
                    self._cohort[reply.metadata.src_node_id] = record
        return received


def _is_train(message: Message) -> bool:
    return message.metadata.message_type.split(".")[0] == MessageType.TRAIN
