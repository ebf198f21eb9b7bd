r"""FedFisher's merge from sums over clients: a contribution to them, and the merge.

With diagonals, the merge needs only :math:`\sum n_i`, :math:`\sum n_i \theta_i`,
:math:`\sum n_i F_i` and :math:`\sum n_i F_i \theta_i`. A secure sum reveals nothing
else.

With K-FAC it needs more, because a sum of Kronecker products is no Kronecker product.
FedFisher (Jhunjhunwala et al., AISTATS 2024, section 4) concludes that a server needs
each client's own factors. But conjugate gradients need only two things: products of the
sum with vectors, which are sums of the clients' products, and a preconditioner. Each
layer's partial traces give one, and they add up as well:

.. math:: \sum_i p_i F_i v, \qquad \bar A = \sum_i p_i \operatorname{tr}(G_i) A_i,
          \qquad \bar G = \sum_i p_i \operatorname{tr}(A_i) G_i.

:mod:`flwr_fisher.merge.sums_solver` has these iterations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from flwr_fisher.curvature import (
    BlockDiagonal,
    Curvature,
    Diagonal,
    Kronecker,
    WeightedSum,
)
from flwr_fisher.errors import StructureError
from flwr_fisher.merge.fedfisher import MergeResult, solve
from flwr_fisher.merge.linear_system import LinearSystem
from flwr_fisher.merge.options import MergeOptions, Score, check_score
from flwr_fisher.merge.posterior import LocalPosterior, check_posteriors
from flwr_fisher.params import (
    Params,
    check_finite,
    check_same_layout,
    double,
    rounded,
    sum_dtype,
    weighted_mean,
)


@dataclass(frozen=True)
class DiagonalSums:
    r"""The sums over the clients, divided by :math:`N = \sum n_i`.

    A client's contribution has the same form: it is the sums of a federation with this
    client alone.

    Parameters
    ----------
    params : dict[str, Tensor]
        :math:`\sum n_i \theta_i / N`, parameters and buffers.
    fisher : dict[str, Tensor]
        :math:`\sum n_i F_i / N`, over the parameters to merge by curvature.
    fisher_params : dict[str, Tensor]
        :math:`\sum n_i F_i \theta_i / N`, over the same parameters.

    """

    params: dict[str, Tensor]
    fisher: dict[str, Tensor]
    fisher_params: dict[str, Tensor]

    @classmethod
    def of(cls, posteriors: Sequence[LocalPosterior]) -> "DiagonalSums":
        r"""Return them of clients whose posteriors are known.

        Floats are float32, or float64 for a float64 model; integers are int64. float32
        is enough: no :math:`F_i` is negative, so the rounding of
        :math:`\sum n_i F_i \theta_i / \sum n_i F_i` is about 1e-7 of the largest
        :math:`|\theta_i|`.

        Raises
        ------
        ParamsError
            If there is no posterior, layouts differ, or a posterior is not finite or
            has a negative curvature; or if a sum is too large for its dtype.
        StructureError
            If a curvature is not diagonal.

        Examples
        --------
        >>> import torch
        >>> F = Diagonal({"w": torch.tensor([0.5])})
        >>> one = LocalPosterior({"w": torch.tensor([3.0])}, F, num_examples=4)
        >>> DiagonalSums.of([one]).fisher_params
        {'w': tensor([1.5000])}
        """
        check_posteriors(posteriors)
        fishers = [double(_diagonal(each)) for each in posteriors]
        products = [
            {k: F * each.params[k] for k, F in fisher.items()}
            for each, fisher in zip(posteriors, fishers, strict=True)
        ]
        weights = [each.num_examples for each in posteriors]
        params = [double(each.params) for each in posteriors]
        dtypes = {k: sum_dtype(v.dtype) for k, v in posteriors[0].params.items()}
        parts = [
            {k: rounded(v, dtypes[k]) for k, v in weighted_mean(each, weights).items()}
            for each in (params, fishers, products)
        ]
        for part in parts:
            check_finite(part, "the clients' sums")
        return cls(*parts)

    def mean(self, like: Params | None = None) -> dict[str, Tensor]:
        """Return FedAvg's mean.

        Parameters
        ----------
        like : Mapping[str, Tensor], optional
            Tensors with the dtypes of the result. Default: the dtypes of the sums.
        """
        like = self.params if like is None else like
        check_same_layout(like, self.params, "sums")
        return {k: rounded(v.double(), like[k].dtype) for k, v in self.params.items()}


def fedfisher_from_sums(
    sums: DiagonalSums,
    *,
    like: Params | None = None,
    score: Score | None = None,
    **options: Any,
) -> MergeResult:
    r"""Merge as :func:`~flwr_fisher.merge.fedfisher` does, from sums only.

    With :math:`N = \sum n_i`, :math:`\bar\theta = \sum n_i \theta_i / N` and
    :math:`F = \sum n_i F_i / N` it solves the same system,
    :math:`F \delta = \sum n_i F_i \theta_i / N - F \bar\theta`, so the model is the
    same as from the clients' parts, within 1e-5 of a tensor's largest entry, or of 1.
    With Fishers above 1, ``adam`` magnifies any rounding to about 1e-3, with the parts
    as with the sums.

    Parameters
    ----------
    sums : DiagonalSums
        The sums over all clients.
    like : Mapping[str, Tensor], optional
        Tensors with the dtypes of the result. Sums of integers and of half floats have
        other dtypes.
    score : optional
        As for ``fedfisher``.
    **options
        Those of :class:`MergeOptions` that need no client's own curvature. `shrink` and
        `damping` have no effect on a diagonal.

    Returns
    -------
    MergeResult
        The merged model. Its ``shares`` are empty, because the server cannot know them.

    Raises
    ------
    ConfigurationError
        If an option is out of range, or is one that needs more than sums.
    ParamsError
        If the sums are not finite, or do not fit `like`.

    Examples
    --------
    >>> import torch
    >>> sure = LocalPosterior({"w": torch.zeros(1)}, Diagonal({"w": torch.ones(1)}), 5)
    >>> flat = Diagonal({"w": torch.full((1,), 0.25)})
    >>> unsure = LocalPosterior({"w": torch.ones(1)}, flat, 5)
    >>> sums = DiagonalSums.of([sure, unsure])
    >>> fedfisher_from_sums(sums, solver="closed-form").params
    {'w': tensor([0.2000])}
    """
    merge = MergeOptions(**options).for_sums("diagonal").filled()
    check_score(score, merge.solver)
    for part in (sums.params, sums.fisher, sums.fisher_params):
        check_finite(part, "the sums")
    mean = sums.mean(like)
    systems = [
        partial(_tensor_system, sums, name, mean[name], merge.anchor)
        for name in sums.fisher
    ]
    return replace(solve(mean, systems, merge, score), mean=mean)


def _tensor_system(
    sums: DiagonalSums, name: str, mean: Tensor, anchor: float
) -> LinearSystem:
    r"""Return one tensor's system; its solution is the move from the mean.

    .. math:: (F + \lambda I)\, \delta = \sum n_i F_i \theta_i / N - F \bar\theta,
              \qquad F = \sum n_i F_i / N

    As for :func:`fedfisher_from_sums`; :math:`\lambda` is `anchor` times F's mean.
    """
    entry, pull = sums.fisher[name].double(), sums.fisher_params[name].double()
    rhs = pull - entry * mean.double()
    curvature = WeightedSum([Diagonal({name: entry})], [1.0])
    return LinearSystem.anchored(curvature, {name: rhs}, anchor)


def _diagonal(posterior: LocalPosterior) -> dict[str, Tensor]:
    for block in posterior.curvature.blocks():
        if block.kind != Diagonal.__name__:
            raise StructureError(
                f"the curvature of {list(block.shapes)} is a {block.kind}, but only "
                "diagonals can be summed: use structure='diagonal'"
            )
    return posterior.curvature.diagonal()


def balanced(
    curvature: Curvature, *, shrink: float, damping: float, balance: float
) -> Curvature:
    r"""Return a client's curvature as it enters the sums, except for its example count.

    It is :math:`F / (\operatorname{tr} F)^\gamma` in each layer, regularised. A client
    can compute it by itself.

    Parameters
    ----------
    curvature : Curvature
        The client's Fisher.
    shrink, damping, balance : float
        As for :func:`~flwr_fisher.merge.fedfisher`; `balance` is :math:`\gamma`.

    Examples
    --------
    >>> import torch
    >>> F = Diagonal({"w": torch.tensor([1.0, 3.0])})
    >>> balanced(F, shrink=0.3, damping=0.0, balance=1.0).diagonal()
    {'w': tensor([0.2500, 0.7500])}
    """
    blocks = []
    for block in curvature.made().blocks():
        regularised = block.made().regularised(shrink=shrink, damping=damping)
        trace = regularised.trace()
        # A client whose curvature is zero has nothing to balance.
        factor = trace**-balance if trace > 0 else 1.0
        blocks.append(regularised.scaled(factor) if balance else regularised)
    return BlockDiagonal(blocks)


def partial_traces(curvature: Curvature) -> Curvature:
    r"""Return layers' partial traces, each as a product :math:`\bar G \otimes \bar A`.

    Both factors have the layer's trace. Parameters that belong to no layer keep their
    diagonal.
    """
    blocks: list[Curvature] = []
    for block in curvature.blocks():
        if isinstance(block, Kronecker):
            (A, of_A), (G, of_G) = block.partial_traces()
            factors = A.scaled(of_A).to_dense(), G.scaled(of_G).to_dense()
            blocks.append(block.with_factors(*factors))
        else:
            blocks.append(block)
    return BlockDiagonal(blocks)
