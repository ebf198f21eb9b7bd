"""Checks of single tensors that arrived; they raise ``WireError`` with the key."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from flwr_fisher.errors import WireError

SLACK = 4096  # bytes that one array's headers may take, or its exponent's words
_ROUNDING = 1e-5  # relative, for sums in float32
_SYMMETRY = 1e-4  # relative to the largest entry; sums in another order vary less


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


def check_layout(
    key: str, tensor: Tensor, shape: Sequence[int | None], dtype: torch.dtype
) -> None:
    """Raise :class:`WireError` for another shape or dtype."""
    check_same_shape(key, tensor.shape, shape)
    if tensor.dtype != dtype:
        raise WireError(f"dtype {tensor.dtype}, expected {dtype}", field=key)


def are_finite_and_not_negative(numbers: Tensor) -> bool:
    """Return whether all entries are finite and >= 0.

    Examples
    --------
    >>> nan = torch.tensor([1.0, float("nan")])
    >>> are_finite_and_not_negative(nan), are_finite_and_not_negative(nan[:1])
    (False, True)
    """
    if not numbers.numel():
        return True
    low, high = numbers.aminmax()  # NaN if there is one
    return 0 <= float(low) <= float(high) < float("inf")


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
    room = rounding * matrix.shape[-1]
    correlations.diagonal(dim1=-2, dim2=-1).add_(room)
    return not torch.linalg.cholesky_ex(correlations).info.any()


def contribution_bytes(like: Mapping[str, Tensor]) -> int:
    """Return the largest size of a client's contribution: its K-FAC in float64."""
    entries = 0
    for value in like.values():
        rows = value.shape[0] if value.dim() else 1
        columns = value.numel() // max(rows, 1)
        entries += 3 * value.numel() + rows**2 + (columns + 1) ** 2
    return 8 * entries + SLACK * (len(like) + 1)
