"""Solving by eigenvalues, of which some may be zero."""

import torch
from torch import Tensor


def divided(rhs: Tensor, eigenvalues: Tensor, damping: float) -> Tensor:
    """Return ``rhs / (eigenvalues + damping)``, and 0 where that is nothing."""
    divisor = eigenvalues + damping
    known = divisor > 0
    return torch.where(known, rhs / torch.where(known, divisor, 1), 0)


def eigen(matrices: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, none negative, and vectors in float64.

    Parameters
    ----------
    matrices : Tensor
        ``[..., n, n]``, symmetric positive semi-definite.
    damping : float
        If 0, eigenvalues that may be rounding are 0: with nothing added to them, they
        would be divided by.
    """
    values, vectors = torch.linalg.eigh(matrices.double())
    share = 0.0 if damping else matrices.shape[-1] * torch.finfo(matrices.dtype).eps
    rounding = share * values.abs().amax(-1, keepdim=True)
    return torch.where(values > rounding, values, 0), vectors
