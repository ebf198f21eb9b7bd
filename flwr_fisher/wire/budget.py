"""A packed upload within its budget.

The budget is spent on the parameters first, then on the entries of diagonals, then on
matrices (see :mod:`flwr_fisher.wire.matrix_budget`).
"""

import math
from collections.abc import Collection, Mapping
from functools import lru_cache

from torch import Tensor

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.params import Params
from flwr_fisher.wire import packing
from flwr_fisher.wire.codec import CODECS, Codec
from flwr_fisher.wire.container import container_bytes
from flwr_fisher.wire.layout import PREFIX, Part, parse_key
from flwr_fisher.wire.matrix_budget import (
    FEWEST_BITS,
    Matrix,
    column_energies,
    pack_matrices,
    sort_columns,
)
from flwr_fisher.wire.matrix_codes import size_of_columns
from flwr_fisher.wire.paper import least_bytes_as_paper
from flwr_fisher.wire.size import (
    Layout,
    chunk_bytes,
    fedavg_bytes,
    layout_key,
    without_values,
)

_METRICS = 512  # bytes of a reply that are not arrays
_DIAGONAL_BITS, _LONE_DIAGONAL_BITS = 8, 16  # at most: beside matrices, without them
_OWN = 64  # more bits than any dtype has: a tensor's own bytes are sent


def byte_limit(params: Params, codec: Codec) -> int:
    """Return how many bytes an upload's record may have.

    Below a budget of 1 this leaves room for the reply's metrics, so that the whole
    reply is within the budget, too.
    """
    metrics = max(0.0, 1 - codec.budget) * _METRICS
    return int(codec.budget * fedavg_bytes(params) - metrics)


def resolve(codec: Codec, params: Params) -> Codec:
    """Return the codec for a model, and check that its budget is large enough.

    Parameters
    ----------
    codec : Codec
        ``auto`` becomes ``fedavg``, or ``lossless`` where that is too small.
    params : Mapping[str, Tensor]
        The parameters and buffers to upload; only names, shapes and dtypes matter.

    Raises
    ------
    ConfigurationError
        If the budget cannot hold them; the message has the smallest budget that can.
    """
    if codec.scheme == "lossless":
        return codec
    if codec.scheme == "auto":
        fits = smallest_budget(params, CODECS["fedavg"]) <= 1
        return CODECS["fedavg" if fits else "lossless"]
    if (needed := smallest_budget(params, codec)) <= codec.budget:
        return codec
    if codec.scheme == "paper":
        reason = "codec 'paper' cannot hold this model"
    else:
        reason = (
            f"budget must be >= {_rounded_up(needed)} to hold this model's parameters "
            f"and the least of its curvature, got {codec.budget}"
        )
    raise ConfigurationError(f"{reason}; or use codec='lossless'")


def smallest_budget(params: Params, codec: Codec) -> float:
    """Return the smallest budget that holds a model with a curvature of any structure.

    It holds parameters at the codec's bits, diagonals at 2 bits, and of each factor its
    trace. Buffers are sent as they are, but which tensors are buffers is not known
    here: tensors of at most one dimension may be, larger ones count as trained.
    """
    return _smallest_budget(layout_key(params), codec)


@lru_cache
def _smallest_budget(layout: Layout, codec: Codec) -> float:
    params = without_values(layout)
    budget, plain = codec.budget, fedavg_bytes(params)
    for _ in range(16):  # a larger budget may give parameters more bits
        if codec.scheme == "paper":
            size = least_bytes_as_paper(params)
        else:
            bits = Codec(budget, codec.weight_bits).bits_of_weights
            size = container_bytes(_least_sizes(params, bits))
        metrics = _METRICS if size < plain else 0
        needed = (size + metrics) / (plain + metrics)
        if needed <= budget:
            break
        budget = needed = _rounded_up(needed)
    return needed


def _rounded_up(budget: float) -> float:
    return math.ceil(1e3 * budget) / 1e3


def _least_sizes(params: Params, bits: int) -> dict[str, int]:
    """Return sizes by key that are enough for a curvature of any structure."""
    sizes = {key: packing.size_of_params(v, bits) for key, v in params.items()}
    for key, tensor in params.items():
        if not tensor.is_floating_point():
            continue
        own = packing.size_of_params(tensor, _OWN)
        buffer = own - sizes[key] if tensor.dim() < 2 else 0
        # Only a convolution has groups: at most one per output, each with its trace.
        groups = tensor.shape[0] if tensor.dim() > 2 else 1
        factor = packing.HEAD + size_of_columns(groups, 1, 0, FEWEST_BITS) + 1
        diagonal = packing.size_of_diagonal(tensor, FEWEST_BITS)
        sizes[f"{PREFIX}diagonal/{key}"] = max(diagonal, factor, buffer)
        if tensor.dim() > 1:
            sizes[f"{PREFIX}ekfac/{key}/A"] = factor
            sizes[f"{PREFIX}ekfac/{key}/G"] = packing.HEAD + 1
    return sizes


def pack_upload(
    params: Params, parts: Params, codec: Codec, trained: Collection[str]
) -> dict[str, Tensor]:
    """Pack parameters and their curvature into a codec's budget.

    Parameters
    ----------
    params : Mapping[str, Tensor]
        Parameters and buffers.
    parts : Mapping[str, Tensor]
        The curvature, from :func:`~flwr_fisher.wire.curvature_to_tensors`.
    codec : Codec
        Of the scheme ``packed``, as :func:`resolve` returns it.
    trained : Collection[str]
        The parameters that the curvature covers. All others (buffers) are sent as they
        are.

    Returns
    -------
    dict[str, Tensor]
        Bytes by key.

    Raises
    ------
    ConfigurationError
        If not even the fewest bits and columns fit.
    """
    parts = sort_columns(parts)
    kinds = {key: parse_key(key, params)[0] for key in parts}
    entries = {
        key: packing.pack_params(v, codec.bits_of_weights if key in trained else _OWN)
        for key, v in params.items()
    }
    of_entries = (Part.DIAGONAL, Part.MOMENTS)
    diagonals = {key: v for key, v in parts.items() if kinds[key] in of_entries}
    matrices = [
        Matrix(key, v, column_energies(key, parts) if part == Part.BASIS else None)
        for key, v in parts.items()
        if (part := kinds[key]) not in of_entries
    ]
    sizes = {key: len(entry) for key, entry in entries.items()}
    sizes |= {m.key: m.least for m in matrices}
    most = _DIAGONAL_BITS if matrices else _LONE_DIAGONAL_BITS
    bits, left = _diagonal_bits(params, diagonals, sizes, codec, most)
    entries |= {k: packing.pack_diagonal(v, bits) for k, v in diagonals.items()}
    return entries | pack_matrices(matrices, left, codec.factor_bits)


def _diagonal_bits(
    params: Params,
    diagonals: Params,
    sizes: Mapping[str, int],
    codec: Codec,
    most: int,
) -> tuple[int, int]:
    """Return the bits of a diagonal's entry, and how many bytes are left after them."""
    limit = byte_limit(params, codec)
    for bits in range(codec.diagonal_bits or most, FEWEST_BITS - 1, -1):
        spent = {k: packing.size_of_diagonal(v, bits) for k, v in diagonals.items()}
        if (left := limit - container_bytes({**sizes, **spent})) >= 0:
            return bits, left - chunk_bytes(left)
    needed = codec.budget - left / fedavg_bytes(params) + 1e-3
    raise ConfigurationError(
        f"budget must be >= {needed:.3f} to hold this model with the least of its "
        f"curvature, got {codec.budget}"
    )
