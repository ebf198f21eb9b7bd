"""A layer's weight and bias as matrices, outputs by inputs, the bias last."""

import torch
from torch import Tensor


def to_matrices(weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """Return ``[groups, out / groups, n]`` of a weight ``[out, in / groups, *kernel]``.

    With a bias ``[out]``, it is the last of the n columns.
    """
    matrices = weight.reshape(groups, len(weight) // groups, -1)
    if bias is None:
        return matrices
    return torch.cat([matrices, bias.reshape(*matrices.shape[:2], 1)], dim=-1)


def from_matrices(
    matrices: Tensor, weight: str, shape: torch.Size, bias: str | None
) -> dict[str, Tensor]:
    """Cut what :func:`to_matrices` returns back, under the two names."""
    if bias is None:
        return {weight: matrices.reshape(shape)}
    return {
        weight: matrices[..., :-1].reshape(shape),
        bias: matrices[..., -1].reshape(-1),
    }
