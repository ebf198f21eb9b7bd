"""Many packed tensors in one array: a safetensors file inside an ``ArrayRecord``.

In Flower, each array of a record takes about 450 bytes of overhead; in a safetensors
file, each entry takes 80. The entry ``curvature/format`` names, in JSON, the version
and the codec of the others.
"""

import json
from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from safetensors.torch import load, save
from torch import Tensor

from flwr_fisher.errors import WireError
from flwr_fisher.params import Params
from flwr_fisher.wire.arrays import arrays_to_tensors, check_count
from flwr_fisher.wire.layout import PREFIX
from flwr_fisher.wire.size import bytes_in_one_array

PACKED = "packed"
FORMAT = f"{PREFIX}format"  # the description of the others; no curvature
_ENTRY = 64  # bytes of JSON around an entry's name and three numbers
_DESCRIPTION = 256
_FRAME = 16  # the header's length, and padding
_LENGTH = 8  # bytes of the number that gives the header's length
_PARTS = 4  # entries per parameter: its own, and E-KFAC's three
_HEADER = 4096  # bytes per parameter: its own entry and a curvature's, with long names


def container_bytes(sizes: Mapping[str, int]) -> int:
    """Return an upper bound of a container's size, from its entries' sizes by key."""
    total = sum(sizes.values())
    digits = 3 * len(str(total + 1000))
    head = sum(_ENTRY + len(json.dumps(key)) + digits for key in sizes)
    size = _FRAME + _ENTRY + len(FORMAT) + digits + _DESCRIPTION + head + total
    return bytes_in_one_array(PACKED, size)


def to_container(entries: Params) -> ArrayRecord:
    """Return a record with one array that holds all entries.

    Parameters
    ----------
    entries : Mapping[str, Tensor]
        One-dimensional tensors of uint8. The entry :data:`FORMAT` describes the others.
    """
    tensors = {k: v.cpu() for k, v in entries.items()}
    return ArrayRecord({PACKED: Array(np.frombuffer(save(tensors), np.uint8))})


def from_container(record: ArrayRecord, *, limit: int, count: int) -> dict[str, Tensor]:
    """Return the entries of an untrusted record.

    Raises
    ------
    WireError
        If it has more than `limit` bytes, is not a container, has other entries than
        bytes, or has a header that is too long for a model of `count` parameters.
    """
    if list(record) != [PACKED]:
        keys = ", ".join(map(repr, list(record)[:3]))[:120]
        reason = f"expected this key alone, got {keys}"
        if PACKED not in record:
            reason += ": the server wants a packed Fisher, as fisher_arrays(...) makes"
        raise WireError(reason, field=PACKED)
    data = arrays_to_tensors(record, limit=limit)[PACKED]
    if data.dtype != torch.uint8 or data.dim() != 1:
        reason = f"{data.dtype} of shape {tuple(data.shape)}, expected bytes"
        raise WireError(reason, field=PACKED)
    # A parsed header takes far more memory than its bytes.
    length = int.from_bytes(data[:_LENGTH].numpy().tobytes(), "little")
    if length > _HEADER * (count + 1):
        raise WireError(f"a header of {length} bytes", field=PACKED)
    try:
        entries: dict[str, Tensor] = load(data.numpy().tobytes())
    except Exception as error:  # untrusted bytes can raise anything
        raise WireError(f"not a container: {error}"[:200], field=PACKED) from error
    check_count(entries, _PARTS * count + 1, PACKED)
    for key, entry in entries.items():
        if entry.dtype != torch.uint8 or entry.dim() != 1:
            raise WireError("not an array of bytes", field=key)
    return entries
