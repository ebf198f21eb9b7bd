"""One tensor packed into few bytes, an *entry*, and back with every check.

An entry begins with its form and its bits, one byte each. A parameter's form is

``RAW``
    the tensor's own bytes;
``LINEAR``
    codes of :class:`~flwr_fisher.wire.levels.Linear`.

In the entry of a part of a curvature, three sizes follow as uint32, and its form is

``LOG``, ``ROOT``
    codes of ``Logarithmic`` or ``SquareRoot``, for values that are not negative; the
    sizes are the shape of E-KFAC's moments, or of any other tensor of three dimensions,
    and else 0: a diagonal has its parameter's shape;
``WHOLE``, ``COLUMNS``
    positive semi-definite matrices, see :mod:`flwr_fisher.wire.matrix_codes`; the sizes
    are groups, n and rank (0 with ``WHOLE``);
``BASIS``
    the leading columns of orthonormal matrices; the other columns are read as zero. The
    sizes are groups, n and rank.
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from flwr_fisher.curvature.operators.factors import SymmetricFactor
from flwr_fisher.errors import WireError
from flwr_fisher.params import Params
from flwr_fisher.wire import matrix_codes
from flwr_fisher.wire.bits import as_bytes
from flwr_fisher.wire.checks import sum64, to_finite
from flwr_fisher.wire.layout import Part, check_shape, parse_key
from flwr_fisher.wire.levels import Linear, Logarithmic, SquareRoot
from flwr_fisher.wire.quantise import Quantiser

_SHORT, LONG = struct.Struct("<BB"), struct.Struct("<BBIII")
HEAD = LONG.size
_FLOAT = 4  # bytes, as matrices are unpacked


class Form(IntEnum):
    """How an entry is encoded; its first byte."""

    RAW = 0
    LINEAR = 1
    LOG = 2
    ROOT = 3
    WHOLE = 4
    COLUMNS = 5
    BASIS = 6


_PSD = (Form.WHOLE, Form.COLUMNS)
_FORMS = {
    Part.DIAGONAL: (Form.LOG, Form.ROOT),
    Part.MOMENTS: (Form.LOG, Form.ROOT),
    Part.FACTOR: _PSD,
    Part.DENSE: _PSD,
    Part.BASIS: (Form.BASIS,),
}
_LEVELS: dict[Form, type[Quantiser]] = {
    Form.LINEAR: Linear,
    Form.LOG: Logarithmic,
    Form.ROOT: SquareRoot,
}


@lru_cache
def _levels(form: Form, bits: int) -> Quantiser:
    return _LEVELS[form](bits)


def _raw_is_smaller(tensor: Tensor, bits: int) -> bool:
    """Return whether a tensor's own bytes are at most as many as codes would take."""
    return not tensor.is_floating_point() or 8 * tensor.itemsize <= bits


def size_of_params(tensor: Tensor, bits: int) -> int:
    """Return the size of :func:`pack_params`'s entry."""
    if _raw_is_smaller(tensor, bits):
        return _SHORT.size + tensor.numel() * tensor.itemsize
    return _SHORT.size + Linear(bits).size(tensor.numel())


def pack_params(tensor: Tensor, bits: int) -> Tensor:
    """Pack a parameter into codes, or as its own bytes if they are not more."""
    if _raw_is_smaller(tensor, bits):
        return entry_of(_SHORT.pack(Form.RAW, 0), as_bytes(tensor))
    return entry_of(_SHORT.pack(Form.LINEAR, bits), Linear(bits).encode(tensor))


def size_of_diagonal(tensor: Tensor, bits: int) -> int:
    """Return the largest size of :func:`pack_diagonal`'s entry."""
    return HEAD + Logarithmic(bits).size(tensor.numel())


def pack_diagonal(tensor: Tensor, bits: int) -> Tensor:
    r"""Pack values that are not negative, in the form with the smaller error.

    The error is :math:`\sum (x - \hat x)^2 / x`: a Fisher's entries span many decades,
    and are themselves second moments of a sample.
    """
    flat, field = tensor.detach().reshape(-1), "diagonal"
    candidates = []
    for form in (Form.LOG, Form.ROOT):
        levels = _LEVELS[form](bits)
        data = levels.encode(flat)
        back = levels.decode(data, len(flat), flat.dtype, field=field).double()
        error = (back - flat.double()).square() / flat.double().clamp_min(1e-300)
        candidates.append((float(error.sum()), form, data))
    _, form, data = min(candidates, key=lambda candidate: candidate[0])
    shape = tensor.shape if len(tensor.shape) == 3 else (0, 0, 0)
    return entry_of(LONG.pack(form, bits, *shape), data)


def pack_matrices(
    form: Form, bits: int, matrices: Tensor, rank: int, codes: Tensor
) -> Tensor:
    """Return the entry of ``[groups, n, n]``, whose codes are known."""
    return entry_of(LONG.pack(form, bits, *matrices.shape[:2], rank), codes)


def entry_of(head: bytes, body: Tensor) -> Tensor:
    """Return an entry's head and its body as one tensor."""
    start = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return torch.cat([start.to(body.device), body])


def unpack_params(entry: Tensor, like: Tensor, *, field: str) -> Tensor:
    """Read a parameter of the shape and dtype of `like`."""
    if len(entry) < _SHORT.size:
        raise WireError(f"{len(entry)} bytes", field=field)
    form, bits = _SHORT.unpack_from(entry.numpy().data)
    body = entry[_SHORT.size :]
    if form == Form.RAW:
        if len(body) != (expected := like.numel() * like.itemsize):
            raise WireError(
                f"{len(body)} bytes, expected {expected} of {tuple(like.shape)} in "
                f"{like.dtype}, which the server sent: train a model of that dtype",
                field=field,
            )
        return raw(body, like, field=field)
    if form != Form.LINEAR or not like.is_floating_point():
        raise WireError(f"form {form} for a parameter of {like.dtype}", field=field)
    linear = _levels(Form.LINEAR, _bits(bits, field))
    return linear.decode(body, like.numel(), like.dtype, field=field).view(like.shape)


def raw(body: Tensor, like: Tensor, *, field: str) -> Tensor:
    """Read a tensor's own bytes, which are as many as those of `like`."""
    if like.dtype == torch.bool and len(body) and body.max() > 1:
        raise WireError("holds what is no bool", field=field)
    tensor = body.clone().view(like.dtype).view(like.shape)
    if not tensor.isfinite().all():
        raise WireError("holds NaN or infinity", field=field)
    return tensor


@dataclass(frozen=True, slots=True)
class CheckedPart:
    """A part of a curvature of which every byte is checked.

    It takes no more memory than a few times the bytes that arrived. A few bytes can
    stand for a large matrix, so that nothing of its size is made until it is used.

    Parameters
    ----------
    shape : tuple[int, ...]
        The part's shape.
    dtype : torch.dtype
        Its parameter's.
    make : Callable[[], Tensor | SymmetricFactor]
        Makes the part; raises nothing.
    traces : Sequence[float]
        Of its matrices, one a group, or what it adds to its block's; of a basis, none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor | SymmetricFactor]
    traces: Sequence[float]


def unpack_part(
    entry: Tensor, params: Params, *, field: str
) -> Tensor | SymmetricFactor:
    """Read a part of a curvature over `params`.

    The announced shape is checked before anything of that shape is allocated. Factors
    of K-FAC are symmetric, positive semi-definite and finite as they come; one that was
    cut to its leading vectors stays so.
    """
    return check_part(entry, params, field=field).make()


def check_part(entry: Tensor, params: Params, *, field: str) -> CheckedPart:
    """Check a part of a curvature over `params`.

    Raises
    ------
    WireError
        Naming the entry that is wrong.
    """
    part, names = parse_key(field, params)
    like = params[names[0]]
    form, bits, a, b, c, body = _read_head(entry, field)
    if form not in _FORMS[part]:
        raise WireError(f"form {form.name} for this part", field=field)
    if part == Part.DIAGONAL:
        shape: tuple[int, ...] = tuple(like.shape)
    elif part == Part.MOMENTS:
        shape = (a, b, c)
    else:
        shape = (b, b) if part == Part.DENSE else (a, b, b)
    check_shape(field, shape, params)
    if part in (Part.DIAGONAL, Part.MOMENTS):
        levels, count = _levels(form, bits), math.prod(shape)
        values = levels.decode(body, count, like.dtype, field=field).view(shape)
        return CheckedPart(shape, like.dtype, lambda: values, [sum64(values)])
    if part == Part.DENSE and a != 1:
        raise WireError(f"{a} matrices, expected one", field=field)
    if form != Form.WHOLE and c > b:
        raise WireError(f"rank {c} of a matrix with {b} rows", field=field)
    make, traces = _matrices(form, body, (a, b, c), bits, like.dtype, field)
    if part == Part.DENSE:

        def dense() -> Tensor:
            return _dense(make()).to(like.dtype).view(shape)

        return CheckedPart(shape, like.dtype, dense, traces)
    return CheckedPart(shape, like.dtype, make, traces)


def _matrices(
    form: Form,
    body: Tensor,
    sizes: tuple[int, int, int],
    bits: int,
    dtype: torch.dtype,
    field: str,
) -> tuple[Callable[[], Tensor | SymmetricFactor], Sequence[float]]:
    """Return what makes matrices of these groups, rows and rank, and their traces."""
    groups, n, rank = sizes
    if form == Form.BASIS:
        entries = matrix_codes.check_basis(body, groups, n, rank, bits, field=field)
        return partial(_padded_basis, entries, n - rank, dtype), []
    if form == Form.WHOLE:
        whole = matrix_codes.check_whole(body, groups, n, bits, field=field)
        if dtype.itemsize < _FLOAT:  # the diagonal bounds other entries
            to_finite(whole.diagonal(), dtype, field=field)
        return lambda: _in_dtype(whole.factor(), dtype), whole.traces
    cut = matrix_codes.check_columns(body, groups, n, rank, bits, field=field)
    if dtype.itemsize < _FLOAT:
        to_finite(cut.factor().diagonal(), dtype, field=field)
    return lambda: _in_dtype(cut.factor(), dtype), cut.traces


def _padded_basis(entries: Tensor, missing: int, dtype: torch.dtype) -> Tensor:
    return pad(matrix_codes.basis_of(entries), (0, missing)).to(dtype)


def _in_dtype(factor: SymmetricFactor, dtype: torch.dtype) -> SymmetricFactor:
    """Return a factor in its parameter's dtype; directions stay integers."""
    if dtype == torch.float32:
        return factor
    return factor.mapped(lambda t: t.to(dtype) if t.is_floating_point() else t)


def _dense(matrices: Tensor | SymmetricFactor) -> Tensor:
    return matrices if isinstance(matrices, Tensor) else matrices.to_dense()


def _read_head(entry: Tensor, field: str) -> tuple[Form, int, int, int, int, Tensor]:
    if len(entry) < HEAD:
        raise WireError(f"{len(entry)} bytes, and {HEAD} of head", field=field)
    form, bits, *sizes = LONG.unpack_from(entry.numpy().data)
    try:
        known = Form(form)
    except ValueError as error:
        raise WireError(f"unknown form {form}", field=field) from error
    return (known, _bits(bits, field), *sizes, entry[HEAD:])


def _bits(bits: int, field: str) -> int:
    if not 2 <= bits <= 16:
        raise WireError(f"codes of {bits} bits", field=field)
    return bits
