"""The size of messages in bytes."""

from collections.abc import Mapping, Sequence

from flwr.app import Array, ArrayRecord, RecordDict

from flwr_fisher.flower_internals import object_sizes
from flwr_fisher.params import Params

_NPY_HEADER = 128
_CHUNK = 5 << 20  # Flower cuts arrays into chunks of this size; each has a header
_CHUNK_HEADER = 512


def serialized_bytes(content: RecordDict) -> int:
    """Return how many bytes a message's content is on the wire.

    Flower sends each record, each array and each chunk of an array as one object, and
    equal objects once; this is the sum of the sizes of the distinct objects.

    Examples
    --------
    >>> import torch
    >>> from flwr.app import ArrayRecord
    >>> record = ArrayRecord({"w": torch.zeros(1000)})
    >>> 4000 < serialized_bytes(RecordDict({"arrays": record})) < 5000
    True
    """
    return sum(object_sizes(content).values())


def _record_bytes(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return how many bytes a record of arrays takes on the wire, without values."""
    # These stand-ins must differ, since equal arrays are sent once.
    stand_ins = {
        key: Array("float32", tuple(shape), "numpy.ndarray", index.to_bytes(8, "big"))
        for index, (key, shape) in enumerate(shapes.items())
    }
    frame = serialized_bytes(RecordDict({"arrays": ArrayRecord(stand_ins)}))
    return frame + len(shapes) * (_NPY_HEADER - 8)


def fedavg_bytes(params: Params) -> int:
    """Return the size of FedAvg's upload: only the arrays, with floats as float32.

    The headers of the chunks of large arrays are left out; they are small.
    """
    values = sum(
        v.numel() * (4 if v.is_floating_point() else v.itemsize)
        for v in params.values()
    )
    return values + _record_bytes({k: v.shape for k, v in params.items()})


def bytes_in_one_array(key: str, size: int) -> int:
    """Return an upper bound of the size of a record of one array of `size` bytes."""
    return size + _record_bytes({key: (size,)}) + chunk_bytes(size)


def chunk_bytes(size: int) -> int:
    """Return an upper bound of what cutting `size` bytes into chunks adds."""
    return size // _CHUNK * _CHUNK_HEADER
