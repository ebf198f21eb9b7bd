"""FedLPA: layers' posteriors merged by gradient steps (Liu et al., NeurIPS 2024)."""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from flwr_fisher.curvature import Kronecker
from flwr_fisher.errors import StructureError, check_range, check_whole
from flwr_fisher.merge.posterior import LocalPosterior, fedavg
from flwr_fisher.params import finite, shares_of

ADDED = 0.001**0.5
"""What is added to factors' diagonals: the released code's ``sqrt(1 - 0.999)``."""

_DEEP, _SETTLED = 300, 1e-10  # products at most, and the relative change that ends them


def fedlpa(
    posteriors: Sequence[LocalPosterior],
    *,
    steps: int = 10_000,
    added: float = ADDED,
    positions: Mapping[str, int] | None = None,
) -> dict[str, Tensor]:
    r"""Return FedLPA's parameters, as its released code finds them.

    For each layer, with weights W, inputs' factors A and outputs' factors B of every
    client, to the diagonals of which `added` is added, it takes gradient steps on

    .. math:: \frac1{mn} \| \sum_i p_i B_i M A_i - Z \|^2, \qquad
              Z = \sum_i p_i B_i W_i A_i,

    at a rate of 1, from :math:`(\sum p_i B_i)^{-1} Z (\sum p_i A_i)^{-1}`. Their fixed
    point is FedFisher's. All of them together are a function of one symmetric operator,
    which is applied by Lanczos' method: some dozen products in place of 10 000 steps,
    to ten digits. Everything else is averaged.

    Parameters
    ----------
    posteriors : Sequence[LocalPosterior]
        With ``structure="kfac"``; FedLPA's clients take ``expectation="empirical"``.
    steps : int, default 10 000
        With 0 it is the start, the paper's "biased" solution. The released code reports
        the better of the two on the test set; choose on validation data.
    added : float
        At least 0.
    positions : Mapping[str, int], optional
        How many positions a convolution has, by its weight: there the released code's
        A is smaller than K-FAC's by their square and B larger, which is all that
        `added` depends on. Default: 1.

    Raises
    ------
    ConfigurationError
        If an argument is out of range.
    ParamsError
        If the steps diverge.
    StructureError
        If no layer has a Kronecker curvature.
    """
    check_whole("steps", steps, 0)
    check_range("added", added, 0)
    merged = fedavg(posteriors)
    shares = shares_of([posterior.num_examples for posterior in posteriors])
    found = False
    for blocks in zip_longest(*(p.curvature.blocks() for p in posteriors)):
        made = [block.made() for block in blocks if block is not None]
        layers = [layer for layer in made if isinstance(layer, Kronecker)]
        if not layers:
            continue
        if len(layers) != len(posteriors) or len({x.weight for x in layers}) > 1:
            raise StructureError("FedLPA needs the same layers of every client")
        found = True
        square = float((positions or {}).get(layers[0].weight, 1)) ** 2
        merged |= _layer(layers, posteriors, shares, steps, added, square)
    if not found:
        raise StructureError("FedLPA needs the factors of structure='kfac'")
    return merged


def _layer(
    layers: Sequence[Kronecker],
    posteriors: Sequence[LocalPosterior],
    shares: Sequence[float],
    steps: int,
    added: float,
    square: float,
) -> dict[str, Tensor]:
    first = layers[0]
    A = [_plus(layer.A.double() / square, added) for layer in layers]
    B = [_plus(layer.G.double() * square, added) for layer in layers]
    weights = [
        layer.as_matrices(posterior.params).double()
        for layer, posterior in zip(layers, posteriors, strict=True)
    ]
    terms = list(zip(shares, B, A, strict=True))
    parts = zip(terms, weights, strict=True)
    Z = sum(p * (b @ w @ a) for (p, b, a), w in parts)
    assert isinstance(Z, Tensor)
    inputs = torch.stack([p * a for p, _, a in terms]).sum(0)
    outputs = torch.stack([p * b for p, b, _ in terms]).sum(0)
    start = torch.linalg.solve(outputs, torch.linalg.solve(inputs, Z.mT).mT)

    def product(M: Tensor) -> Tensor:
        return torch.stack([p * (b @ M @ a) for p, b, a in terms]).sum(0)

    end = descended(product, start, Z, rate=2 / Z[0].numel(), steps=steps)
    what = f"FedLPA's solution for '{first.weight}'"
    return finite(first.as_params(end.to(first.A.dtype)), what)


def _plus(matrices: Tensor, added: float) -> Tensor:
    return matrices + added * torch.eye(matrices.shape[-1]).to(matrices)


def descended(
    product: Callable[[Tensor], Tensor],
    start: Tensor,
    target: Tensor,
    *,
    rate: float,
    steps: int,
) -> Tensor:
    r"""Return where gradient steps on :math:`\frac12 \|L x - z\|^2` end.

    For a symmetric L, k steps at a rate :math:`\eta` end at :math:`x_0 + f(L) (z - L
    x_0)` with :math:`f(\lambda) = (1 - (1 - \eta \lambda^2)^k) / \lambda`, and a
    function of L times a vector is found in the vectors that L makes of it (Lanczos
    1950), kept orthogonal.

    Parameters
    ----------
    product : Callable
        L times a tensor of `start`'s shape.
    start, target : Tensor
        :math:`x_0` and z, in float64.
    rate : float
        :math:`\eta`.
    steps : int
        k.

    Examples
    --------
    >>> double = torch.tensor([1.0], dtype=torch.float64)
    >>> descended(lambda x: 2 * x, 0 * double, double, rate=0.1, steps=1)
    tensor([0.2000], dtype=torch.float64)
    """
    residual = target - product(start)
    length = float(residual.norm())
    if not steps or not length:
        return start
    basis, diagonal, beside = [residual / length], list[float](), list[float]()
    moved = torch.zeros_like(start)
    for _ in range(_DEEP):
        new = product(basis[-1])
        diagonal.append(float((new * basis[-1]).sum()))
        for _ in range(2):  # once leaves rounding in it
            for old in basis:
                new = new - (new * old).sum() * old
        beside.append(float(new.norm()))
        before, moved = moved, length * _combined(basis, diagonal, beside, rate, steps)
        small = beside[-1] <= 1e-14 * max(map(abs, diagonal))
        if small or (moved - before).norm() <= _SETTLED * moved.norm():
            break
        basis.append(new / beside[-1])
    return start + moved


def _combined(
    basis: Sequence[Tensor],
    diagonal: Sequence[float],
    beside: Sequence[float],
    rate: float,
    steps: int,
) -> Tensor:
    """Return f of the small tridiagonal matrix, its first column, in the basis."""
    T = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    off = torch.tensor(beside[:-1], dtype=torch.float64)
    T += torch.diag(off, 1) + torch.diag(off, -1)
    values, U = torch.linalg.eigh(T)
    shrunk = (1 - rate * values.square()) ** steps
    # At 0 the gain is k times the rate times the eigenvalue: 0.
    gain = torch.where(values.abs() > 1e-300, (1 - shrunk) / values, 0.0)
    weights = U @ (gain * U[0])
    return torch.stack([w * v for w, v in zip(weights, basis, strict=True)]).sum(0)
