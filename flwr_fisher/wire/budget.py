"""What an upload's bytes are spent on.

Parameters come first, then the entries of diagonals, then Kronecker factors and dense
matrices: the eigenvector with the largest share of its matrix's trace a byte is sent
before any other, of whatever layer, and a matrix that would take as many bytes whole is
sent whole.
"""

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.params import Params
from flwr_fisher.wire import factors, packing
from flwr_fisher.wire.codec import CODECS, Codec
from flwr_fisher.wire.container import container_bytes
from flwr_fisher.wire.layout import PREFIX, Part, parse_key
from flwr_fisher.wire.paper import least_bytes_as_paper
from flwr_fisher.wire.size import chunk_bytes, fedavg_bytes

__all__ = ["byte_limit", "pack_upload", "resolve", "smallest_budget"]

_METRICS = 512  # bytes of a reply that are not arrays
_FEWEST = 2  # bits
_WHOLE_BITS, _CUT_BITS, _DIAGONAL_BITS = 8, 6, 8
_OWN = 64  # more bits than any dtype has: a tensor's own bytes


def byte_limit(params: Params, codec: Codec) -> int:
    """Return how many bytes an upload's record may weigh.

    Below a budget of 1 it leaves room for the reply's metrics, so that the reply as a
    whole is within the budget, too.
    """
    metrics = max(0.0, 1 - codec.budget) * _METRICS
    return int(codec.budget * fedavg_bytes(params) - metrics)


def resolve(codec: Codec, params: Params) -> Codec:
    """Return the codec for a model, and check that its budget will do.

    Parameters
    ----------
    codec : Codec
        ``auto`` becomes ``fedavg``, or ``lossless`` where that is too small.
    params : Mapping[str, Tensor]
        What will be uploaded; only names, shapes and dtypes matter.

    Raises
    ------
    ConfigurationError
        If the budget cannot hold them, with the smallest that can.
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
    """Return the smallest budget that holds a model, whatever its curvature is.

    It holds parameters at the codec's bits, diagonals at 2 bits, and of each factor its
    trace. Nothing says which tensors are buffers, which are sent as they are: here
    those of one dimension may be, larger ones are taken to be trained.
    """
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
    """Return sizes that are enough for every structure, each by a key of its own."""
    sizes = {key: packing.size_of_params(v, bits) for key, v in params.items()}
    for key, tensor in params.items():
        if not tensor.is_floating_point():
            continue
        own = packing.size_of_params(tensor, _OWN)
        buffer = own - sizes[key] if tensor.dim() < 2 else 0
        # Only a convolution has groups: at most one an output, each with a number.
        groups = tensor.shape[0] if tensor.dim() > 2 else 1
        factor = packing.HEAD + factors.size_of_columns(groups, 1, 0, _FEWEST) + 1
        diagonal = packing.size_of_diagonal(tensor, _FEWEST)
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
        The curvature as :func:`~flwr_fisher.wire.curvature_to_tensors` lays it out.
    codec : Codec
        Packed, as :func:`resolve` returns it.
    trained : Collection[str]
        What the curvature covers. All else (buffers) is sent as it is.

    Returns
    -------
    dict[str, Tensor]
        Bytes by key.

    Raises
    ------
    ConfigurationError
        If even the least does not fit.
    """
    parts = _ordered(parts)
    kinds = {key: parse_key(key, params)[0] for key in parts}
    entries = {
        key: packing.pack_params(v, codec.bits_of_weights if key in trained else _OWN)
        for key, v in params.items()
    }
    scales = (Part.DIAGONAL, Part.MOMENTS)
    diagonals = {key: v for key, v in parts.items() if kinds[key] in scales}
    matrices = [
        _Matrix(key, v, _energies(key, parts) if part == Part.BASIS else None)
        for key, v in parts.items()
        if (part := kinds[key]) not in scales
    ]
    sizes = {key: len(entry) for key, entry in entries.items()}
    sizes |= {m.key: m.least for m in matrices}
    cap = _DIAGONAL_BITS if matrices else 16
    bits, left = _spend_on_diagonals(params, diagonals, sizes, codec, cap)
    entries |= {k: packing.pack_diagonal(v, bits) for k, v in diagonals.items()}
    return entries | _spend_on_matrices(matrices, left, codec.factor_bits)


def _spend_on_diagonals(
    params: Params,
    diagonals: Params,
    sizes: Mapping[str, int],
    codec: Codec,
    cap: int,
) -> tuple[int, int]:
    """Return the bits of an entry, and how many bytes are left."""
    limit = byte_limit(params, codec)
    wanted = codec.diagonal_bits or cap
    for bits in range(wanted, _FEWEST - 1, -1):
        spent = {k: packing.size_of_diagonal(v, bits) for k, v in diagonals.items()}
        if (left := limit - container_bytes({**sizes, **spent})) >= 0:
            return bits, left - chunk_bytes(left)
    needed = codec.budget - left / fedavg_bytes(params) + 1e-3
    raise ConfigurationError(
        f"budget must be >= {needed:.3f} to hold this model with the least of its "
        f"curvature, got {codec.budget}"
    )


class _Matrix:
    """A factor, or E-KFAC's basis, and what it takes to send it.

    Parameters
    ----------
    key : str
        Its key.
    value : Tensor
        ``[groups, n, n]`` or ``[n, n]``.
    energies : Tensor | None
        Of a basis: what each column carries, ``[groups, n]``, descending.
    """

    def __init__(self, key: str, value: Tensor, energies: Tensor | None) -> None:
        self.key, self.is_basis = key, energies is not None
        self.value = value if value.dim() == 3 else value.unsqueeze(0)
        self.groups, self.n = self.value.shape[:2]
        self._energies = energies
        self.least = packing.HEAD + self._cut(0, _FEWEST) + 1  # for rounding

    def _cut(self, rank: int, bits: int) -> int:
        size = factors.size_of_basis if self.is_basis else factors.size_of_columns
        return size(self.groups, self.n, rank, bits)

    def column(self, bits: int) -> float:
        """Return the bytes of one more column."""
        norm = 0 if self.is_basis else 4
        return self.groups * (self.n * bits / 8 + norm)

    def whole(self, bits: int) -> int:
        """Return the bytes of all of it, beyond the least."""
        if self.is_basis:
            return packing.HEAD + self._cut(self.n, bits) - self.least
        size = factors.size_of_whole(self.groups, self.n, bits)
        return packing.HEAD + size - self.least

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return what each column carries, descending, and the columns."""
        if self._energies is not None:
            return self._energies, self.value
        wide = self.value if self.value.itemsize >= 4 else self.value.float()  # LAPACK
        values, vectors = torch.linalg.eigh(wide)
        return values.flip(-1).clamp_min(0), vectors.flip(-1)

    def pack_whole(self, bits: int) -> Tensor:
        """Return the entry with all of it."""
        if self.is_basis:
            return packing.pack_basis(self.value, self.n, bits)
        return packing.pack_whole(self.value, bits)

    def pack_cut(self, spectrum: tuple[Tensor, Tensor], rank: int, bits: int) -> Tensor:
        """Return the entry with `rank` columns."""
        if self.is_basis:
            return packing.pack_basis(self.value, rank, bits)
        return packing.pack_columns(*spectrum, rank, bits)


def _spend_on_matrices(
    matrices: list[_Matrix], left: int, factor_bits: int | None
) -> dict[str, Tensor]:
    for bits in [factor_bits] if factor_bits else [_WHOLE_BITS, _CUT_BITS]:
        if sum(max(0, m.whole(bits)) for m in matrices) <= left:
            return {m.key: m.pack_whole(bits) for m in matrices}
    spectra = {m.key: m.spectrum() for m in matrices}
    ranks = _ranks(matrices, spectra, left, bits)
    return {
        m.key: m.pack_cut(spectra[m.key], ranks[m.key], bits)
        if m.key in ranks
        else m.pack_whole(bits)
        for m in matrices
    }


def _ranks(
    matrices: list[_Matrix],
    spectra: Mapping[str, tuple[Tensor, Tensor]],
    left: float,
    bits: int,
) -> dict[str, int]:
    """Return how many columns to send of each matrix; those to send whole are absent.

    Whole matrices free bytes for the others' columns, which may then be whole as well.
    """
    todo = list(matrices)
    while True:
        ranks = _greedy(todo, spectra, left, bits)
        whole = [m for m in todo if ranks[m.key] * m.column(bits) >= m.whole(bits)]
        if not whole:
            return ranks
        left -= sum(max(0, m.whole(bits)) for m in whole)
        todo = [m for m in todo if m not in whole]


def _greedy(
    matrices: list[_Matrix],
    spectra: Mapping[str, tuple[Tensor, Tensor]],
    left: float,
    bits: int,
) -> dict[str, int]:
    if not matrices:
        return {}
    gains, costs, owners = [], [], []
    for index, matrix in enumerate(matrices):
        values = spectra[matrix.key][0].double()
        total = values.sum(-1, keepdim=True)
        share = torch.where(total > 0, values / total, 0).mean(0).cpu()
        gains.append(share / matrix.column(bits))
        costs.append(torch.full_like(share, matrix.column(bits)))
        owners.append(torch.full((len(share),), index))
    gain, cost, owner = torch.cat(gains), torch.cat(costs), torch.cat(owners)
    order = torch.argsort(gain, descending=True, stable=True)
    order = order[gain[order] > 0]
    bought = order[cost[order].cumsum(0) <= left]
    counts = torch.bincount(owner[bought], minlength=len(matrices))
    return {m.key: int(n) for m, n in zip(matrices, counts, strict=True)}


def _ordered(parts: Params) -> dict[str, Tensor]:
    """Return the parts with E-KFAC's columns in descending order of their moments."""
    ordered = dict(parts)
    for key, moments in parts.items():
        if not key.endswith("/S"):
            continue
        layer = key.removesuffix("S")
        columns = moments.sum(-2).argsort(-1, descending=True)
        rows = moments.sum(-1).argsort(-1, descending=True)
        ordered[f"{layer}A"] = _take(parts[f"{layer}A"], columns)
        ordered[f"{layer}G"] = _take(parts[f"{layer}G"], rows)
        ordered[key] = _take(_take(moments, columns).mT, rows).mT
    return ordered


def _take(matrices: Tensor, columns: Tensor) -> Tensor:
    """Return ``[groups, m, n]`` with each group's columns in another order."""
    index = columns.unsqueeze(-2).expand(matrices.shape)
    return matrices.gather(-1, index)


def _energies(key: str, parts: Params) -> Tensor:
    """Return what each column of a basis carries."""
    moments = parts[f"{key[:-1]}S"]
    return moments.sum(-2 if key.endswith("A") else -1)
