"""Named tensors as an ``ArrayRecord``, and safe readers of untrusted records.

Flower sends an array as the bytes that ``np.save`` writes: a header with dtype, order
and shape, then the entries. ``np.load`` allocates memory for the header's shape before
it counts the bytes that follow, so a message of a hundred bytes can make it allocate a
terabyte. The readers here compare the header with the number of bytes that arrived
before they allocate anything.
"""

import io
import json
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from numpy.lib import format as npy
from numpy.typing import ArrayLike
from torch import Tensor

from flwr_fisher.errors import WireError, printable
from flwr_fisher.flower_internals import object_sizes
from flwr_fisher.params import Params, all_finite

# `np.save` needs less than 512 bytes for the longest shape. Python's parser reads the
# header, and a few thousand bytes can drive it into deep recursion.
_HEADER_BYTES = 1024
_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_INTEGERS = [f"{sign}int{bits}" for sign in ("u", "") for bits in (8, 16, 32, 64)]
_NAMES = ("bool", *_INTEGERS, "float16", "float32", "float64")
_DTYPES = {np.dtype(name) for name in _NAMES}  # native: '>f4' is not '<f4'
_WRAP = 2**64  # node ids are unsigned, and tensors' integers are not
_MOST_DIMENSIONS = 64  # as NumPy has it
_FEW = 8
Layout = tuple[torch.dtype, Sequence[int | None]]  # of an array; None is any length
FORMAT_VERSION = 2
_DESCRIPTION = 1024  # bytes
SLACK = 4096  # bytes that one array's headers may take, or its exponent's words
_ROUNDING = 1e-5  # relative, for sums in float32
_SYMMETRY = 1e-4  # relative to the largest entry; sums in another order vary less


def tensors_to_arrays(tensors: Params) -> ArrayRecord:
    """Return an ``ArrayRecord`` of the tensors, moved to the CPU.

    Raises
    ------
    WireError
        If NumPy lacks a tensor's dtype, such as bfloat16. It names the key.
    """
    arrays = {}
    for key, tensor in tensors.items():
        try:
            # `np.save` writes non-contiguous arrays in another order, with a flag.
            arrays[key] = Array(tensor.detach().cpu().contiguous().numpy())
        except TypeError as error:
            reason = f"dtype {tensor.dtype} cannot be sent: cast the model to float32"
            raise WireError(reason, field=key) from error
    return ArrayRecord(arrays)


def bytes_of(text: str) -> Tensor:
    """Return a text as a tensor of its UTF-8 bytes.

    Examples
    --------
    >>> bytes_of("fc3")
    tensor([102,  99,  51], dtype=torch.uint8)
    """
    return torch.from_numpy(np.frombuffer(bytearray(text.encode()), np.uint8))


def numbers_to_tensor(numbers: Iterable[int]) -> Tensor:
    """Return node ids as a tensor of int64, which records can hold.

    Examples
    --------
    >>> numbers_to_tensor([3, 2**64 - 1])
    tensor([ 3, -1])
    """
    wrapped = [n - _WRAP if n >= _WRAP // 2 else n for n in numbers]
    return torch.tensor(wrapped, dtype=torch.int64)


def tensor_to_numbers(tensor: Tensor) -> list[int]:
    """Return the node ids of a tensor: the inverse of :func:`numbers_to_tensor`."""
    return [number % _WRAP for number in tensor.tolist()]


def arrays_to_tensors(
    record: ArrayRecord, *, limit: int | None = None, most: int | None = None
) -> dict[str, Tensor]:
    """Read every array of a record; the tensors share no memory with it.

    Whatever the bytes are, this allocates about as many as arrived, and no more.

    Parameters
    ----------
    record : ArrayRecord
        The received record.
    limit : int | None
        How many bytes its arrays may have, headers included. Default: any number.
    most : int | None
        How many arrays there may be. Default: any number.

    Raises
    ------
    WireError
        If an array cannot be read, has a dtype that torch lacks or that is complex,
        differs from its declaration, or has NaN or infinity; it names the key. Also if
        all arrays together exceed `limit`; it names the key of the largest. If there
        are more than `most` arrays, it is raised before any of them is read.

    Examples
    --------
    >>> record = tensors_to_arrays({"w": torch.ones(2, 3)})
    >>> arrays_to_tensors(record, limit=1000)["w"].shape
    torch.Size([2, 3])
    >>> record["w"].shape = (6,)
    >>> arrays_to_tensors(record)
    Traceback (most recent call last):
    flwr_fisher.errors.WireError: 'w': unreadable array: announced as float32 of ...
    """
    if most is not None:
        check_count(record, most)
    if limit is not None:
        check_size(record, limit)
    tensors = {}
    for key, array in record.items():
        try:
            tensors[key] = tensor = _read(array)
        except Exception as error:  # untrusted bytes can raise anything
            raise WireError(f"unreadable array: {error}", field=key) from error
        if tensor.is_floating_point() and not all_finite(tensor):
            raise WireError("holds NaN or infinity", field=key)
    return tensors


def read_arrays(
    record: ArrayRecord, layouts: Mapping[str, Layout]
) -> dict[str, Tensor]:
    """Read arrays of known keys, shapes and dtypes; some of them may be missing.

    All announced shapes are checked before any array is read. An array that has other
    bytes than its announced shape is refused, so this decides how much is allocated.

    Parameters
    ----------
    record : ArrayRecord
        The received record.
    layouts : Mapping[str, tuple[torch.dtype, Sequence[int | None]]]
        Dtypes and shapes by key.
    """
    check_count(record, len(layouts))
    for key, array in record.items():
        if key not in layouts:
            raise WireError("unexpected key", field=key)
        check_same_shape(key, announced_shape(key, array), layouts[key][1])
    tensors = arrays_to_tensors(record)
    for key, tensor in tensors.items():
        if tensor.dtype != (dtype := layouts[key][0]):
            raise WireError(f"dtype {tensor.dtype}, expected {dtype}", field=key)
    return tensors


def check_count(record: Sized, most: int, field: str = "arrays") -> None:
    """Raise :class:`WireError` if a record has many more arrays than a payload can.

    A few more are accepted here; the reader then says which one is unexpected.

    Examples
    --------
    >>> check_count(tensors_to_arrays({str(i): torch.ones(1) for i in range(20)}), 2)
    Traceback (most recent call last):
    flwr_fisher.errors.WireError: 'arrays': 20 arrived, but at most 2 are allowed
    """
    if len(record) > most + _FEW:
        reason = f"{len(record)} arrived, but at most {most} are allowed"
        raise WireError(reason, field=field)


def announced_shape(key: str, array: Array) -> torch.Size:
    """Return the shape that an array announces, before it is read.

    Raises
    ------
    WireError
        If it is not a shape.
    """
    try:
        if len(array.shape) > _MOST_DIMENSIONS:
            raise ValueError(f"{len(array.shape)} dimensions")
        return torch.Size(map(operator.index, array.shape))
    except Exception as error:  # the announced shape may be anything, too
        raise WireError(f"unreadable shape: {error}", field=key) from error


def check_size(record: ArrayRecord, limit: int) -> None:
    """Raise :class:`WireError`, with the largest array's name, above a byte limit."""
    sizes = {key: len(array.data) for key, array in record.items()}
    if (total := sum(sizes.values())) > limit:
        reason = f"{total} bytes arrived, but at most {limit} are allowed"
        raise WireError(reason, field=max(sizes, key=sizes.__getitem__))


def _read(array: Array) -> Tensor:
    """Return an array as a tensor, or raise an exception of any type."""
    data, size = array.data, _HEADER_BYTES
    if data[6:7] == b"\x01":  # version 1.0, whose header has its length in front
        size = min(size, 10 + int.from_bytes(data[8:10], "little"))
    shape, fortran_order, dtype, start = _header(bytes(data[:size]))
    # Checks of symmetry, sign and finite values need real numbers.
    if dtype not in _DTYPES:
        raise ValueError(f"torch has no real numbers {printable(dtype)}")
    if (array.dtype, tuple(array.shape)) != (str(dtype), shape):
        raise ValueError(
            f"announced as {printable(array.dtype)} of shape "
            f"{printable(tuple(array.shape))}, but it is {dtype} of shape "
            f"{printable(shape)}"
        )
    expected = math.prod(shape) * dtype.itemsize  # Python's integers do not overflow
    if (arrived := len(array.data) - start) != expected:
        raise ValueError(
            f"{arrived} bytes of entries, but shape {printable(shape)} of {dtype} has "
            f"{printable(expected)}"
        )
    # The message's bytes are read-only, so the tensor gets a copy.
    entries = np.ndarray(
        shape, dtype, array.data, start, order="F" if fortran_order else "C"
    )
    if dtype == np.bool_ and entries.view(np.uint8).max(initial=0) > 1:
        raise ValueError("bool entries other than 0 and 1")
    return torch.from_numpy(np.array(entries, order="C"))


@lru_cache(maxsize=1024)  # all clients' are the same
def _header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[np.generic], int]:
    """Return shape, whether the order is Fortran's, dtype and offset of the entries.

    NumPy's own header reader does the work; it is given no bytes beyond `head`.
    """
    stream = io.BytesIO(head)
    read = _READERS[npy.read_magic(stream)]  # 3.0 is for the names of records' fields
    shape, fortran_order, dtype = read(stream, max_header_size=_HEADER_BYTES)
    return shape, fortran_order, dtype, stream.tell()


# --- descriptions


def description_text(description: object) -> Tensor:
    """Return an upload's description as JSON without spaces."""
    return bytes_of(json.dumps(description, separators=(",", ":")))


def read_description(text: ArrayLike | None, field: str) -> dict[str, Any]:
    """Return the description in an untrusted text of :func:`description_text`.

    Raises
    ------
    WireError
        If there is no description, it is not JSON, or it names no format version that
        this package reads.
    """
    data = np.asarray([] if text is None else text)
    if data.dtype != np.uint8 or data.size > _DESCRIPTION:
        raise WireError("missing, too long, or not a text", field=field)
    try:
        description = json.loads(data.tobytes())
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}"[:200], field=field) from error
    if not isinstance(description, dict) or "version" not in description:
        raise WireError("does not name its format", field=field)
    if (version := description["version"]) != FORMAT_VERSION:
        reason = f"format version {version!r}, but this server reads"
        raise WireError(f"{reason} {FORMAT_VERSION}"[:200], field=field)
    return description


# --- checks of single tensors


def check_same_keys(
    keys: Collection[str], expected: Collection[str], prefix: str = ""
) -> None:
    """Raise :class:`WireError` for the first key that is missing or unexpected."""
    for key in sorted(set(expected) - set(keys)):
        raise WireError("missing", field=f"{prefix}{key}")
    for key in sorted(set(keys) - set(expected)):
        raise WireError("unexpected key", field=f"{prefix}{key}")


def check_same_shape(
    key: str, shape: Sequence[int], expected: Sequence[int | None]
) -> None:
    """Raise :class:`WireError` for another shape; None allows any length.

    Examples
    --------
    >>> check_same_shape("mean", (2,), (None,))
    >>> check_same_shape("mean", (2, 2), (None,))
    Traceback (most recent call last):
    flwr_fisher.errors.WireError: 'mean': shape (2, 2), expected ('any',)
    """
    same = len(shape) == len(expected) and all(
        wanted in (None, size) for wanted, size in zip(expected, shape, strict=True)
    )
    if not same:
        wanted = tuple("any" if size is None else size for size in expected)
        raise WireError(f"shape {tuple(shape)}, expected {wanted}", field=key)


def check_second_moment(key: str, matrix: Tensor) -> None:
    """Raise :class:`WireError` unless symmetric and positive semi-definite.

    A single matrix that is not would make a merge impossible. The check allows for the
    rounding of the dtype, and of sums in float32: with a diagonal of ones, an
    eigenvalue may be below 0 by ``n`` times this rounding.

    Examples
    --------
    >>> check_second_moment("A", torch.ones(1, 2, 2))
    >>> check_second_moment("A", torch.tensor([[[1.0, 2.0], [2.0, 1.0]]]))
    Traceback (most recent call last):
    flwr_fisher.errors.WireError: 'A': has a negative eigenvalue
    """
    if not matrix.numel():
        return
    if (matrix.diagonal(dim1=-2, dim2=-1) < 0).any():
        raise WireError("negative on the diagonal", field=key)
    if (matrix - matrix.mT).abs().max() > _SYMMETRY * matrix.abs().max():
        raise WireError("not symmetric", field=key)
    # For most, float32 is enough.
    if not (_is_psd(matrix, torch.float32) or _is_psd(matrix, torch.float64)):
        raise WireError("has a negative eigenvalue", field=key)


def _is_psd(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the correlations, with some slack, have a Cholesky factor."""
    norms = matrix.diagonal(dim1=-2, dim2=-1).to(dtype).sqrt()
    # Where the diagonal is 0, rows must be, too, compared with the largest entry.
    unit = torch.where(norms > 0, norms, norms.amax(-1, keepdim=True))
    # Below it, rounding of the smallest floats exceeds the slack.
    info = torch.finfo(matrix.dtype)
    rounding = max(_ROUNDING, info.eps)
    unit = unit.clamp_min(max((info.tiny * info.eps / rounding) ** 0.5, 1e-150))
    correlations = matrix.to(dtype) / unit.unsqueeze(-1) / unit.unsqueeze(-2)
    correlations.diagonal(dim1=-2, dim2=-1).add_(rounding * matrix.shape[-1])
    return not torch.linalg.cholesky_ex(correlations).info.any()


def contribution_bytes(like: Mapping[str, Tensor]) -> int:
    """Return the largest size of a client's contribution: its K-FAC in float64."""
    entries = 0
    for value in like.values():
        rows = value.shape[0] if value.dim() else 1
        columns = value.numel() // max(rows, 1)
        entries += 3 * value.numel() + rows**2 + (columns + 1) ** 2
    return 8 * entries + SLACK * (len(like) + 1)


# Sizes of messages

_NPY_HEADER = 128
_CHUNK = 5 << 20  # Flower cuts arrays into chunks of this size; each has a header
_CHUNK_HEADER = 512
# A model's names, shapes and dtypes. Sizes depend only on these, so a round computes
# them once for such a key, not once for each client.
LayoutKey = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def layout_key(params: Params) -> LayoutKey:
    """Return a model's names, shapes and dtypes in order, as a key of caches."""
    return tuple((name, v.shape, v.dtype) for name, v in params.items())


def without_values(layout: LayoutKey) -> dict[str, torch.Tensor]:
    """Return a layout's tensors on the device ``meta``, where they take no memory."""
    empty = partial(torch.empty, device="meta")
    return {name: empty(shape, dtype=dtype) for name, shape, dtype in layout}


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
def _fedavg_bytes(layout: LayoutKey) -> int:
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
