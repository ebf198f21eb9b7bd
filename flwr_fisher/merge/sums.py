r"""FedFisher's merge of diagonal Fishers from sums over the clients.

With diagonals, the merge needs only sums over the clients: :math:`\sum n_i`,
:math:`\sum n_i \theta_i`, :math:`\sum n_i F_i` and :math:`\sum n_i F_i \theta_i`. A
secure sum reveals nothing else.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from flwr_fisher.curvature import Diagonal, WeightedSum
from flwr_fisher.devices import Reads
from flwr_fisher.errors import ConfigurationError, StructureError
from flwr_fisher.merge.linear_system import LinearSystem
from flwr_fisher.merge.options import (
    MergeSettings,
    Report,
    Score,
    check_score,
    merge_settings,
)
from flwr_fisher.merge.posterior import LocalPosterior, check_posteriors
from flwr_fisher.merge.solve import MergeResult, solve
from flwr_fisher.params import (
    Params,
    check_finite,
    check_same_layout,
    double,
    rounded,
    select,
    sum_dtype,
    weighted_mean,
)

_BALANCE = 1.0  # for K-FAC, where neither `robust` nor `max_share` is possible
# Options that need each client's own curvature, and the values that turn them off.
_OF_CLIENTS = {
    "balance": 0.0,
    "robust": 0.0,
    "max_share": 1.0,
    "trust": math.inf,
    "outlier": math.inf,
}


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

    Raises
    ------
    ParamsError
        If keys or shapes do not fit each other.
    """

    params: dict[str, Tensor]
    fisher: dict[str, Tensor]
    fisher_params: dict[str, Tensor]

    def __post_init__(self) -> None:
        check_same_layout(self.fisher, self.fisher_params, "fisher_params")
        covered = select(self.params, self.fisher)
        check_same_layout(covered, self.fisher, "fisher")

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
            If there is no posterior, layouts differ, or a posterior is not finite, has
            several dtypes, or has a negative curvature; or if a sum is too large for
            its dtype.
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
    progress: Report | None = None,
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
    score, progress : optional
        As for ``fedfisher``.
    **options
        See :func:`sums_settings`.

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
    return merge_from_sums(
        sums, sums_settings(**options), like=like, score=score, progress=progress
    )


def merge_from_sums(
    sums: DiagonalSums,
    settings: MergeSettings,
    *,
    like: Params | None,
    score: Score | None,
    progress: Report | None,
) -> MergeResult:
    """Merge as :func:`fedfisher_from_sums` does, with its options in one object."""
    check_score(score, settings.solver)
    for part in (sums.params, sums.fisher, sums.fisher_params):
        check_finite(part, "the sums")
    mean = sums.mean(like)
    systems = [
        partial(_tensor_system, sums, name, mean[name], settings.anchor)
        for name in sums.fisher
    ]
    merged = solve(mean, systems, settings, score, progress)
    return replace(merged, mean=mean)


def sums_settings(
    solver: str = "pcg", *, structure: str = "diagonal", **options: Any
) -> MergeSettings:
    """Return :func:`merge_settings` for sums, where no client's curvature is known.

    `shrink` and `damping` have no effect on a diagonal. With ``structure="kfac"``
    clients balance their Fishers themselves, so `balance` may have any value.

    Raises
    ------
    ConfigurationError
        If `balance`, `robust`, `max_share`, `trust` or `outlier` has another value than
        the one without effect, or if an option is out of range.
    """
    of_clients = dict(_OF_CLIENTS)
    if structure == "kfac":
        # Chosen on validation data: benchmarks/results/fedfisher_defaults.md.
        own = options.get("balance")
        options["balance"] = _BALANCE if own is None else own
        del of_clients["balance"]
    for name, nothing in of_clients.items():
        if options.get(name) not in (None, nothing):
            raise ConfigurationError(
                f"{name} must be {nothing:g}, got {options[name]}: the server knows "
                f"only sums, and {name} needs each client's own curvature"
            )
    return merge_settings(solver, **(options | of_clients))


def _tensor_system(
    sums: DiagonalSums, name: str, mean: Tensor, anchor: float, _: Reads
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
    entries: dict[str, Tensor] = {}
    for block in posterior.curvature.made().blocks():
        if not isinstance(block, Diagonal):
            raise StructureError(
                f"the curvature of {list(block.shapes)} is a {type(block).__name__}, "
                "but only diagonals can be summed: use structure='diagonal'"
            )
        entries |= block.entries
    return entries
