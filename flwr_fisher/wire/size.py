"""How much a message weighs."""

from flwr.app import RecordDict
from flwr.supercore.inflatable.inflatable_object import InflatableObject

__all__ = ["serialized_bytes"]


def serialized_bytes(content: RecordDict) -> int:
    """Return how many bytes a message's content is on the wire.

    Flower sends each record, array and chunk as an object of its own, and equal ones
    once; this adds up the sizes of the distinct ones.

    Examples
    --------
    >>> import torch
    >>> from flwr.app import ArrayRecord
    >>> record = ArrayRecord({"w": torch.zeros(1000)})
    >>> 4000 < serialized_bytes(RecordDict({"arrays": record})) < 5000
    True
    """
    found: dict[str, int] = {}
    todo: list[InflatableObject] = [content]
    while todo:
        item = todo.pop()
        if item.object_id not in found:
            found[item.object_id] = len(item.deflate())
            todo.extend((item.children or {}).values())
    return sum(found.values())
