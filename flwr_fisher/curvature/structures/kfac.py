"""K-FAC as a structure: each layer's curvature is a Kronecker product."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flwr_fisher.curvature.estimate.accumulators import (
    KroneckerAccumulator,
    LayerAccumulator,
    ReducedKroneckerAccumulator,
)
from flwr_fisher.curvature.estimate.layers import KroneckerLayer
from flwr_fisher.curvature.operators.base import Curvature, Matvec
from flwr_fisher.curvature.operators.factors import LowRankFactor, SymmetricFactor
from flwr_fisher.curvature.operators.kronecker import (
    Kronecker,
    from_matrices,
    to_matrices,
)
from flwr_fisher.curvature.structures.base import (
    Form,
    Parts,
    Structure,
    Terms,
    register,
)
from flwr_fisher.params import Params, Shapes

_SHARINGS = {"expand": KroneckerAccumulator, "reduce": ReducedKroneckerAccumulator}


@register
class KFAC(Structure):
    r"""K-FAC: :math:`G \otimes A` for each layer (Martens & Grosse 2015)."""

    name = "kfac"
    block = Kronecker
    tensors = {"A": Form.MATRIX, "G": Form.MATRIX}  # noqa: RUF012
    has_positions = True

    def accumulator(
        self, layer: KroneckerLayer, weight_sharing: str
    ) -> LayerAccumulator:
        """Return the empty sums of both factors."""
        return _SHARINGS[weight_sharing](layer)

    def parts(self, block: Curvature) -> dict[str, Tensor]:
        """Return both factors as dense matrices."""
        assert isinstance(block, Kronecker)
        return {"A": block.A, "G": block.G}

    def block_of(
        self, name: str, shape: torch.Size, parts: Parts, bias: str | None
    ) -> Kronecker:
        """Return the Kronecker product of two factors."""
        if parts["A"].shape[-1] <= shape[1:].numel():  # it has no column for a bias
            bias = None
        return Kronecker(name, shape, parts["A"], parts["G"], bias)

    def rows(self, letter: str, outputs: int, inputs: int) -> int:
        """Return the inputs for `A`, and the outputs for `G`."""
        return inputs if letter == "A" else outputs

    def trace(self, traces: Mapping[str, Sequence[float]]) -> float:
        """Return the sum over groups of the product of both factors' traces."""
        return sum(a * g for a, g in zip(traces["A"], traces["G"], strict=True))

    def preconditioner(
        self, terms: Terms, shapes: Shapes, ridge: float
    ) -> Matvec | None:
        r"""Return the inverse of the product of the sum's partial traces.

        A sum of Kronecker products :math:`\sum_i w_i\, G_i \otimes A_i` is not one, but
        the product :math:`\bar G \otimes \bar A` of its two partial traces,

        .. math:: \bar A = \sum_i w_i \operatorname{tr}(G_i) A_i, \quad
            \bar G = \frac{\sum_i w_i \operatorname{tr}(A_i) G_i}
                        {\sum_i w_i \operatorname{tr}(A_i) \operatorname{tr}(G_i)},

        has the same trace and, seen only from the inputs or only from the outputs, the
        same shape. With the ridge :math:`\lambda` shared between the two, as in Martens
        & Grosse (2015, section 6.3), its inverse is that of
        :math:`(\bar G + \sqrt\lambda I) \otimes (\bar A + \sqrt\lambda I)`, where both
        are scaled to the same mean eigenvalue.
        """
        layers = [(w, term) for w, term in terms if isinstance(term, Kronecker)]
        of_inputs: list[SymmetricFactor] = []
        of_outputs: list[SymmetricFactor] = []
        all_groups = set[int]()
        for weight, layer in layers:
            (A, scale_A), (G, scale_G) = layer.partial_traces()
            weights = torch.as_tensor(weight, dtype=torch.float64).to(scale_A).view(-1)
            all_groups.add(groups := layer.groups // len(weights))
            weights = weights.repeat_interleave(groups)
            of_inputs.append(A.scaled(weights * scale_A))
            of_outputs.append(G.scaled(weights * scale_G))
        # Only a convolution's factors show how many groups it has.
        if len(all_groups) > 1:
            return None
        # Both partial traces have the sum's trace; each takes the root of its mean
        # eigenvalue, group by group.
        trace = torch.cat([A.trace().view(-1, groups) for A in of_inputs]).sum(0)
        outputs, inputs = of_outputs[0].shape[-1], of_inputs[0].shape[-1]
        mean = (trace / (outputs * inputs)).clamp_min(torch.finfo(trace.dtype).tiny)
        solve_inputs = _sum_solver(of_inputs, (outputs * mean.sqrt()), ridge**0.5)
        solve_outputs = _sum_solver(of_outputs, (inputs * mean.sqrt()), ridge**0.5)
        weight_name, bias = layers[0][1].weight, layers[0][1].bias

        def product(vector: Params) -> dict[str, Tensor]:
            last = None if bias is None else vector[bias]
            matrices = to_matrices(vector[weight_name], last, groups)
            solved = solve_inputs(solve_outputs(matrices).mT).mT
            return from_matrices(solved, weight_name, shapes[weight_name], bias)

        return product


_Solver = Callable[[Tensor], Tensor]


def _sum_solver(
    terms: Sequence[SymmetricFactor], divisor: Tensor, ridge: float
) -> _Solver:
    """Return a solver for ``sum of M / divisor + ridge I``, by group."""
    groups, n = len(divisor), terms[0].shape[-1]
    factors = [
        factor.scaled((1 / divisor).repeat(factor.shape[0] // groups))
        for factor in terms
    ]
    low = [factor for factor in factors if isinstance(factor, LowRankFactor)]
    columns = sum(factor.rank * len(factor.rest) for factor in low) // groups
    if len(low) < len(factors) or 2 * columns > n:
        total = divisor.new_zeros(groups, n, n)
        for factor in factors:
            factor.add_to(total)
        return _solver_of(total, ridge)
    # Few vectors: by Woodbury's identity, nothing of the size n x n is made.
    joined = [factor.joined(groups) for factor in low]
    vectors = torch.cat([every for every, _ in joined], -1)
    diagonal = torch.stack([rest for _, rest in joined]).sum(0) + ridge
    divided = vectors / diagonal.unsqueeze(-1)
    inner = _solver_of(vectors.mT @ divided, 1.0)
    return lambda right: (
        right / diagonal.unsqueeze(-1) - divided @ inner(divided.mT @ right)
    )


def _solver_of(matrices: Tensor, ridge: float) -> _Solver:
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
        lower = lower.masked_fill((info != 0)[..., None, None], torch.nan).to(working)
    return lambda right: torch.cholesky_solve(right.to(working), lower).to(right)
