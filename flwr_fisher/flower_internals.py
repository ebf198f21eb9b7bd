"""All of Flower's private interface that the package uses.

Flower promises ``flwr.app``, ``flwr.clientapp`` and ``flwr.serverapp``. Everything else
may change in any release, so it is imported in this file only: an upgrade of Flower
then breaks the package in one place. This file also handles the differences between
Flower's versions, from the oldest in ``pyproject.toml``.
"""

from collections.abc import Iterable

from flwr.app import Message, RecordDict
from flwr.common.config import get_fused_config
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import (
    decrypt,
    encrypt,
    generate_shared_key,
)
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    no_object_id_recompute,
)

try:
    from flwr.supercore.run import Run
except ImportError:  # Flower before 1.32
    from flwr.common.typing import Run  # type: ignore[attr-defined, no-redef]

try:
    from flwr.supercore.task_identity import TaskIdentity
except ImportError:  # before 1.38 the grid writes the ids, as it sends a message
    TaskIdentity = None  # type: ignore[assignment, misc]

__all__ = [
    "SUPERLINK_NODE_ID",
    "ErrorCode",
    "Run",
    "combine_shares",
    "create_shares",
    "decrypt",
    "encrypt",
    "generate_shared_key",
    "get_fused_config",
]


def round_trip(content: RecordDict) -> RecordDict:
    """Serialise a message's content and read it back, as if it had been sent."""
    return recorddict_from_proto(recorddict_to_proto(content))


def object_sizes(content: RecordDict) -> dict[str, int]:
    """Return the sizes in bytes of the objects that a message's content is sent as.

    The keys are the objects' ids. Each record, each array and each chunk of an array is
    one object; objects that are equal have the same id, and are sent once.
    """
    sizes: dict[str, int] = {}
    todo: list[InflatableObject] = [content]
    with no_object_id_recompute():  # each hash is of all that the object holds
        while todo:
            item = todo.pop()
            if item.object_id not in sizes:
                sizes[item.object_id] = len(item.deflate())
                todo.extend((item.children or {}).values())
    return sizes


def nodes_of(grid: Grid) -> Iterable[NodeInfo]:
    """Return what a grid tells of its nodes; before Flower 1.38 that is nothing."""
    return grid.get_nodes() if hasattr(grid, "get_nodes") else ()


def set_message_id(message: Message, message_id: str) -> None:
    """Give a message its id, as a SuperLink does when the message is pushed."""
    message.metadata.__dict__["_message_id"] = message_id


def identify_process(number: int) -> None:
    """Use a number as the ids of run, node and task where the process has none.

    Flower keeps these ids per process, and writes them into every new message.
    """
    if TaskIdentity is None:
        return
    for name in ("run_id", "node_id", "task_id"):
        if getattr(TaskIdentity, f"_{name}") is None:
            setattr(TaskIdentity, name, number)
