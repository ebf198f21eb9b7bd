"""Checks of one tensor that arrived; each failure is a ``WireError`` with its key."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flwr_fisher.errors import WireError

_SYMMETRY = 1e-4  # relative to the largest entry; sums in another order differ by less


def check_shape_and_dtype(
    key: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype
) -> None:
    """Raise :class:`WireError` for another shape, or else for another dtype."""
    if tensor.shape != shape:
        reason = f"shape {tuple(tensor.shape)}, expected {tuple(shape)}"
        raise WireError(reason, field=key)
    if tensor.dtype != dtype:
        raise WireError(f"dtype {tensor.dtype}, expected {dtype}", field=key)


def check_layout(
    key: str, tensor: Tensor, shape: Sequence[int | None], dtype: torch.dtype
) -> None:
    """Raise one :class:`WireError` that names both, for another shape or dtype.

    A length of None stands for any length.

    Examples
    --------
    >>> check_layout("mean", torch.ones(2), (None,), torch.float64)
    Traceback (most recent call last):
    flwr_fisher.errors.WireError: 'mean': torch.float32 of shape (2,), expected ...
    """
    same = len(shape) == tensor.dim() and all(
        length in (None, size) for length, size in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype != dtype or not same:
        expected = tuple("any" if length is None else length for length in shape)
        reason = f"{tensor.dtype} of shape {tuple(tensor.shape)}, expected {dtype} "
        raise WireError(f"{reason}of shape {expected}", field=key)


def to_finite(tensor: Tensor, dtype: torch.dtype, *, field: str) -> Tensor:
    """Return a tensor in another dtype, or raise :class:`WireError` if it overflows."""
    converted = tensor.to(dtype)
    if not converted.isfinite().all():
        raise WireError(f"does not fit into {dtype}", field=field)
    return converted


def check_second_moment(key: str, matrix: Tensor) -> None:
    """Raise :class:`WireError` unless symmetric and not negative on the diagonal."""
    if not matrix.numel():
        return
    if (matrix.diagonal(dim1=-2, dim2=-1) < 0).any():
        raise WireError("negative on the diagonal", field=key)
    if (matrix - matrix.mT).abs().max() > _SYMMETRY * matrix.abs().max():
        raise WireError("not symmetric", field=key)
