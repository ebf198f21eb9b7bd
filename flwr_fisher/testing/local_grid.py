"""A Flower ``Grid`` in this process: virtual clients without SuperLink or Ray."""

import random
from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flwr_fisher import flower_internals
from flwr_fisher.errors import ConfigurationError, check_whole
from flwr_fisher.log_lines import Failures

_RUN_ID = 1


class LocalGrid(Grid):
    """A grid that runs a real ``ClientApp`` for n virtual clients, one after another.

    Flower's simulation runs clients with Ray and takes seconds. This grid takes
    milliseconds, so a test can run a whole federation. The rest is as in a simulation:
    contents are serialised in both directions, node ids are random, replies arrive one
    by one and in any order, an exception in a client becomes an error reply, and each
    node keeps its ``Context`` from one message to the next.

    Parameters
    ----------
    client_app : ClientApp
        The app under test.
    num_supernodes : int
        The number of virtual clients; their ``partition-id`` begins at 0.
    run_config : Mapping[str, bool | int | float | str], optional
        The entries of ``context.run_config``.
    seed : int, optional
        Determines node ids and the order of replies; by default they differ every time.

    Raises
    ------
    ConfigurationError
        If `client_app` is no ``ClientApp``, or `num_supernodes` is out of range.

    Attributes
    ----------
    nodes : dict[int, int]
        The partition id of each node id.

    Examples
    --------
    >>> from flwr.app import ArrayRecord
    >>> from flwr.serverapp.strategy import FedAvg
    >>> import torch
    >>> from flwr_fisher.client import FisherClient
    >>> data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    >>> model = torch.nn.Linear(3, 2)
    >>> client = FisherClient(model, torch.utils.data.DataLoader(data, batch_size=4))
    >>> grid = LocalGrid(client.as_client_app(), num_supernodes=2)
    >>> strategy = FedAvg(fraction_evaluate=0.0)
    >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=1)
    >>> sorted(result.arrays)
    ['bias', 'weight']
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_supernodes: int,
        *,
        run_config: Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> None:
        if not _answers_messages(client_app):
            raise ConfigurationError(
                f"client_app must be a ClientApp, got {client_app!r:.80}: pass "
                "client.as_client_app(), or make_client_app(client_fn)"
            )
        check_whole("num_supernodes", num_supernodes, 1)
        self.client_app, self.num_supernodes = client_app, num_supernodes
        self._run_config = dict(run_config or {})
        self._random = random.Random(seed)
        ids = self._random.sample(range(1, 2**62), num_supernodes)
        self.nodes = {node: partition for partition, node in enumerate(ids)}
        self._contexts: dict[int, Context] = {}
        for node, partition in self.nodes.items():
            node_config: dict[str, Any] = {
                "partition-id": partition,
                "num-partitions": num_supernodes,
            }
            options = dict(self._run_config)
            context = Context(_RUN_ID, node, node_config, RecordDict(), options)
            self._contexts[node] = context
        self._waiting: dict[str, Message] = {}
        self._count = 0
        self._failures = Failures()
        flower_internals.identify_process(_RUN_ID)

    def set_run(self, run: flower_internals.Run) -> None:
        """Do nothing, because there is only one run."""

    @property
    def run(self) -> flower_internals.Run:
        """A run with the id of all messages, and the run config."""
        run = flower_internals.Run.create_empty(_RUN_ID)
        run.override_config = self._run_config
        return run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message, as ``Message(...)`` does."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes, in random order."""
        return self._random.sample(list(self.nodes), len(self.nodes))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Accept messages; a client handles one when replies are first pulled."""
        ids = []
        for message in messages:
            self._count += 1
            ids.append(f"message-{self._count}")
            flower_internals.set_message_id(message, ids[-1])
            self._waiting[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run one client that has not replied yet; return its reply."""
        due = [id_ for id_ in message_ids if id_ in self._waiting]
        if not due:
            return []
        return [self._handle(self._waiting.pop(self._random.choice(sorted(due))))]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Run all clients and return their replies; nothing times out."""
        ids = list(self.push_messages(messages))
        return [reply for _ in ids for reply in self.pull_messages(ids)]

    def _handle(self, message: Message) -> Message:
        node, sent = message.metadata.dst_node_id, message.content
        message.content = flower_internals.round_trip(sent)
        try:
            reply = self.client_app(message, self._contexts[node])
            if reply.has_content():
                reply.content = flower_internals.round_trip(reply.content)
        except (Exception, SystemExit) as error:  # like the simulation, for a client's
            reason = self._failures.tell(f"partition-{self.nodes[node]}", error)
            code = flower_internals.ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            return Message(Error(code=code, reason=reason), reply_to=message)
        finally:
            message.content = sent  # frees the client's copy, not the sender's
        if reply.metadata.reply_to_message_id != message.metadata.message_id:
            return _answers_another(message, reply)
        return reply


def _answers_messages(app: object) -> bool:
    """Return whether it is a ``ClientApp``, or can be called as one."""
    if not callable(app) or isinstance(app, ServerApp):
        return False
    try:
        signature(app).bind(Message, Context)
    except TypeError:
        return False
    return True


def _answers_another(message: Message, reply: Message) -> Message:
    """Return an error reply to a message, if the client's reply answers another one.

    Flower's mods reply to the client's reply, not to the request, where they refuse it.
    A SuperLink drops such a reply, and the server waits until its time is up.
    """
    error = reply.error.reason if reply.has_error() else "no error"
    reason = f"the reply answers another message; a SuperLink would drop it: {error}"
    code = flower_internals.ErrorCode.UNKNOWN
    return Message(Error(code=code, reason=reason), reply_to=message)
