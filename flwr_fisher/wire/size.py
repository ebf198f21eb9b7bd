"""The size of messages in bytes."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from flwr.app import Array, ArrayRecord, RecordDict

from flwr_fisher.flower_internals import object_sizes
from flwr_fisher.params import Params, layout_of

_NPY_HEADER = 128
_CHUNK = 5 << 20  # Flower cuts arrays into chunks of this size; each has a header
_CHUNK_HEADER = 512
# A model's names, shapes and dtypes. Sizes depend only on these, so a round computes
# them once for such a key, not once for each client.
Layout = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def layout_key(params: Params) -> Layout:
    """Return a model's names, shapes and dtypes in order, as a key of caches."""
    return tuple((name, v.shape, v.dtype) for name, v in layout_of(params).items())


def without_values(layout: Layout) -> dict[str, torch.Tensor]:
    """Return a layout's tensors on the device ``meta``, where they take no memory."""
    return {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, shape, dtype in layout
    }


def serialized_bytes(content: RecordDict) -> int:
    """Return how many bytes a message's content takes on the wire.

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


def arrays_bytes(record: ArrayRecord) -> int:
    """Return how many bytes a record's arrays take, without Flower's own frames."""
    return sum(len(array.data) for array in record.values())


def _record_bytes(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return how many bytes a record of arrays takes on the wire, from its layout."""
    # These stand-ins must differ, because Flower sends equal arrays once.
    stand_ins = {
        key: Array("float32", tuple(shape), "numpy.ndarray", index.to_bytes(8, "big"))
        for index, (key, shape) in enumerate(shapes.items())
    }
    frame = serialized_bytes(RecordDict({"arrays": ArrayRecord(stand_ins)}))
    return frame + len(shapes) * (_NPY_HEADER - 8)


def fedavg_bytes(params: Params) -> int:
    """Return the size of FedAvg's upload: the arrays alone, with floats as float32.

    The headers of the chunks of large arrays are left out; they are small.
    """
    return _fedavg_bytes(layout_key(params))


@lru_cache
def _fedavg_bytes(layout: Layout) -> int:
    values = sum(
        math.prod(shape) * (4 if dtype.is_floating_point else dtype.itemsize)
        for _, shape, dtype in layout
    )
    return values + _record_bytes({name: shape for name, shape, _ in layout})


def bytes_in_one_array(key: str, size: int) -> int:
    """Return an upper bound of a record's size, for one array of `size` bytes."""
    return size + _record_bytes({key: (size,)}) + chunk_bytes(size)


def chunk_bytes(size: int) -> int:
    """Return an upper bound of the overhead of `size` bytes in chunks."""
    return size // _CHUNK * _CHUNK_HEADER
