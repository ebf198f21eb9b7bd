"""A merge's preconditioner of conjugate gradients."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flwr_fisher.curvature import Dense, WeightedSum
from flwr_fisher.curvature.operators.factors import LowRankFactor, SymmetricFactor
from flwr_fisher.curvature.operators.layer import LayerCurvature, ScaledFactor
from flwr_fisher.curvature.operators.solvers import Matvec
from flwr_fisher.params import Params, flatten, select, unflatten

_LEAST = 1e-4  # ridge over the mean eigenvalue, for singular matrices


def preconditioner(curvature: WeightedSum, ridge: float) -> Matvec:
    r"""Return a function: an approximate inverse of ``curvature + ridge I``.

    A sum of Kronecker products :math:`\sum_i w_i\, G_i \otimes A_i` is not one, but the
    product :math:`\bar G \otimes \bar A` of its two partial traces,

    .. math:: \bar A = \sum_i w_i \operatorname{tr}(G_i) A_i, \qquad
              \bar G = \frac{\sum_i w_i \operatorname{tr}(A_i) G_i}
                            {\sum_i w_i \operatorname{tr}(A_i) \operatorname{tr}(G_i)},

    has the same trace and, seen only from the inputs or only from the outputs, the same
    shape. With the ridge :math:`\lambda` shared between the two, as in Martens & Grosse
    (2015, section 6.3), its inverse is that of
    :math:`(\bar G + \sqrt\lambda I) \otimes (\bar A + \sqrt\lambda I)`, where both are
    scaled to one mean eigenvalue. For dense matrices the inverse is exact. For any
    other mixture it is the inverse of the diagonal.

    Parameters
    ----------
    curvature : WeightedSum
        The curvature of one layer, with a mean eigenvalue of 1.
    ridge : float
        At least 0; here it counts as at least 1e-4.
    """
    ridge = max(ridge, _LEAST)
    terms = [*curvature.flat()]  # shrinking turns an E-KFAC into a sum
    layers = [(w, t) for w, t in terms if isinstance(t, LayerCurvature)]
    # Only a convolution's factors show how many groups it has.
    if len(layers) == len(terms) and len({t.groups for _, t in layers}) == 1:
        return _by_partial_traces(layers, ridge)
    if all(isinstance(term, Dense) for term in curvature.terms):
        return _densely(curvature, ridge)
    diagonal = curvature.diagonal()
    return lambda vector: {k: v / (diagonal[k] + ridge) for k, v in vector.items()}


def _densely(curvature: WeightedSum, ridge: float) -> Matvec:
    solve = _solver_of(curvature.to_dense(), ridge)
    shapes = curvature.shapes

    def product(vector: Params) -> dict[str, Tensor]:
        flat = flatten(select(vector, shapes)).unsqueeze(-1)
        return unflatten(solve(flat).squeeze(-1), shapes)

    return product


def _by_partial_traces(
    layers: Sequence[tuple[float, LayerCurvature]], ridge: float
) -> Matvec:
    first = layers[0][1]
    of_inputs: list[ScaledFactor] = []
    of_outputs: list[ScaledFactor] = []
    for weight, layer in layers:
        (A, scale_A), (G, scale_G) = layer.partial_traces()
        of_inputs.append((A, weight * scale_A))
        of_outputs.append((G, weight * scale_G))
    # Both partial traces have the sum's trace; each takes the root of its mean
    # eigenvalue, group by group.
    trace = torch.stack([scale * A.trace() for A, scale in of_inputs]).sum(0)
    _, outputs, inputs = first.matrix_shape
    mean = (trace / (outputs * inputs)).clamp_min(torch.finfo(trace.dtype).tiny)
    solve_inputs = _sum_solver(of_inputs, (outputs * mean.sqrt()), ridge**0.5)
    solve_outputs = _sum_solver(of_outputs, (inputs * mean.sqrt()), ridge**0.5)

    def product(vector: Params) -> dict[str, Tensor]:
        matrices = solve_outputs(first.as_matrices(vector))
        return first.as_params(solve_inputs(matrices.mT).mT)

    return product


def _sum_solver(
    terms: Sequence[ScaledFactor], divisor: Tensor, ridge: float
) -> Callable[[Tensor], Tensor]:
    """Return a solver for ``sum of scale M / divisor + ridge I``, by group."""
    factors = [factor.scaled(scale / divisor) for factor, scale in terms]
    low = [factor for factor in factors if isinstance(factor, LowRankFactor)]
    n = factors[0].shape[-1]
    if len(low) < len(factors) or 2 * sum(factor.rank for factor in low) > n:
        return _solver_of(_summed(factors, divisor), ridge)
    vectors = torch.cat([factor.vectors() for factor in low], -1)
    rest = torch.stack([factor.rest for factor in low]).sum(0)
    return _woodbury(vectors, rest + ridge)


def _summed(factors: Sequence[SymmetricFactor], like: Tensor) -> Tensor:
    total = like.new_zeros(factors[0].shape)
    for factor in factors:
        factor.add_to(total)
    return total


def _woodbury(vectors: Tensor, diagonal: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a solver for ``V V^T + diag(d)``, by Woodbury's identity."""
    divisor = diagonal.unsqueeze(-1)
    scaled = vectors / divisor
    inner = _solver_of(vectors.mT @ scaled, 1.0)
    return lambda right: right / divisor - scaled @ inner(scaled.mT @ right)


def _solver_of(matrices: Tensor, ridge: float) -> Callable[[Tensor], Tensor]:
    """Return a solver for symmetric matrices plus a multiple of the identity.

    If they are not positive definite, this raises an error on the CPU. On an
    accelerator, for which it does not wait, the solutions are NaN.
    """
    working = torch.promote_types(matrices.dtype, torch.float32)
    wide = matrices.to(torch.float64, copy=True)
    del matrices  # as large as all other memory in use here
    wide.diagonal(dim1=-2, dim2=-1).add_(ridge)
    if wide.device.type == "cpu":
        lower = torch.linalg.cholesky(wide).to(working)
    else:
        lower, info = torch.linalg.cholesky_ex(wide)
        failed = (info != 0)[..., None, None]
        lower = lower.masked_fill(failed, torch.nan).to(working)
    return lambda right: torch.cholesky_solve(right.to(working), lower).to(right)
