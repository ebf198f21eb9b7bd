"""How much a message weighs."""

from collections.abc import Mapping, Sequence

from flwr.app import Array, ArrayRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import InflatableObject

from flwr_fisher.params import Params

__all__ = ["fedavg_bytes", "record_bytes", "serialized_bytes"]

_NPY_HEADER = 128
_CHUNK = 5 << 20  # Flower cuts arrays into pieces of that size; each has a header
_CHUNK_HEADER = 512


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


def record_bytes(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return what a record of arrays weighs on the wire, without their values."""
    # Values that differ, since equal arrays travel once.
    stand_ins = {
        key: Array("float32", tuple(shape), "numpy.ndarray", index.to_bytes(8, "big"))
        for index, (key, shape) in enumerate(shapes.items())
    }
    frame = serialized_bytes(RecordDict({"arrays": ArrayRecord(stand_ins)}))
    return frame + len(shapes) * (_NPY_HEADER - 8)


def fedavg_bytes(params: Params) -> int:
    """Return what FedAvg's upload weighs: the arrays alone, floats as float32.

    The pieces that Flower cuts large arrays into add a little, which is left out.
    """
    values = sum(
        v.numel() * (4 if v.is_floating_point() else v.itemsize)
        for v in params.values()
    )
    return values + record_bytes({k: v.shape for k, v in params.items()})


def bytes_in_one_array(key: str, size: int) -> int:
    """Return at most what a record of one array of `size` bytes weighs."""
    return size + record_bytes({key: (size,)}) + chunk_bytes(size)


def chunk_bytes(size: int) -> int:
    """Return at most what cutting `size` bytes into pieces adds."""
    return size // _CHUNK * _CHUNK_HEADER
