r"""FedFisher's merge of diagonal Fishers from sums over the clients.

With diagonals, the merge needs only sums over the clients: :math:`\sum n_i`,
:math:`\sum n_i \theta_i`, :math:`\sum n_i F_i` and :math:`\sum n_i F_i \theta_i`. A
secure sum reveals nothing else.

Long: the sums, their merge and its options.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flwr_fisher.curvature import Diagonal, WeightedSum
from flwr_fisher.curvature.operators.rescaled import (
    exponent_of,
    largest_entry,
    widest_exponent,
)
from flwr_fisher.devices import Reads
from flwr_fisher.errors import (
    ConfigurationError,
    ParamsError,
    StructureError,
    check_positive,
)
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
    rounded,
    select,
    sum_dtype,
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
    r"""One client's contribution to the sums, or the sums over several clients.

    Floats are float32, or float64 for a float64 model; integers are int64. float32 is
    enough: no :math:`F_i` is negative, so that in
    :math:`\sum n_i F_i \theta_i / \sum n_i F_i` rounding costs some 1e-7 of the largest
    :math:`|\theta_i|`.

    Parameters
    ----------
    num_examples : float
        :math:`n_i`.
    params : dict[str, Tensor]
        :math:`n_i \theta_i`, parameters and buffers.
    fisher : dict[str, Tensor]
        :math:`n_i F_i`, over the parameters to merge by curvature.
    fisher_params : dict[str, Tensor]
        :math:`n_i F_i \theta_i`, over the same.

    Raises
    ------
    ConfigurationError
        If `num_examples` is not positive.
    ParamsError
        If keys or shapes do not fit each other.
    """

    num_examples: float
    params: dict[str, Tensor]
    fisher: dict[str, Tensor]
    fisher_params: dict[str, Tensor]

    def __post_init__(self) -> None:
        check_positive("num_examples", self.num_examples)
        check_same_layout(self.fisher, self.fisher_params, "fisher_params")
        covered = select(self.params, self.fisher)
        check_same_layout(covered, self.fisher, "fisher")

    @classmethod
    def of(cls, posterior: LocalPosterior) -> "DiagonalSums":
        """Return a client's contribution.

        Raises
        ------
        ParamsError
            If it is not finite, of several dtypes, or its curvature is negative; or if
            a sum is more than its dtype holds.
        StructureError
            If its curvature is not diagonal.

        Examples
        --------
        >>> F = Diagonal({"w": torch.tensor([0.5])})
        >>> DiagonalSums.of(LocalPosterior({"w": torch.tensor([3.0])}, F, 4))
        DiagonalSums(num_examples=4.0, params={'w': tensor([12.])}, fisher={'w': \
tensor([2.])}, fisher_params={'w': tensor([6.])})
        """
        check_posteriors([posterior])
        n, entries = float(posterior.num_examples), _diagonal(posterior)
        weighted = {k: n * F.double() for k, F in entries.items()}
        products = {k: nF * posterior.params[k] for k, nF in weighted.items()}
        sums = cls(
            n,
            {k: _stored(n * v.double(), v.dtype) for k, v in posterior.params.items()},
            {k: _stored(nF, entries[k].dtype) for k, nF in weighted.items()},
            {k: _stored(nFt, entries[k].dtype) for k, nFt in products.items()},
        )
        for part in (sums.params, sums.fisher, sums.fisher_params):
            check_finite(part, f"the sums of a client's {n:g} examples")
        return sums

    def mean(self, like: Params | None = None) -> dict[str, Tensor]:
        r"""Return FedAvg's mean :math:`\sum n_i \theta_i / \sum n_i`.

        Parameters
        ----------
        like : Mapping[str, Tensor], optional
            Gives the dtypes. Default: those of the sums.
        """
        like = self.params if like is None else like
        check_same_layout(like, self.params, "sums")
        return {
            k: rounded(total.double() / self.num_examples, like[k].dtype)
            for k, total in self.params.items()
        }


def add_sums(parts: Sequence[DiagonalSums]) -> DiagonalSums:
    """Return the sums over all clients, in float64.

    A sum that its own dtype cannot hold stays in it.

    Raises
    ------
    ParamsError
        If there is none, or their layouts differ.
    """
    if not parts:
        raise ParamsError("there are no sums to add: pass those of at least one client")
    return DiagonalSums(
        sum(part.num_examples for part in parts),
        _added([part.params for part in parts]),
        _added([part.fisher for part in parts]),
        _added([part.fisher_params for part in parts]),
    )


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
    :math:`F \delta = \sum n_i F_i \theta_i / N - F \bar\theta`, so that the parts give
    the same model within 1e-5 (of a tensor's largest entry, or of 1). Where Fishers are
    above 1, ``adam`` magnifies any rounding to some 1e-3, of the parts as of the sums.

    Parameters
    ----------
    sums : DiagonalSums
        Over all clients.
    like : Mapping[str, Tensor], optional
        Gives the result's dtypes, which sums of integers and of half floats have lost.
    score, progress : optional
        As for ``fedfisher``.
    **options
        See :func:`sums_settings`.

    Returns
    -------
    MergeResult
        Its ``shares`` are empty: the server cannot know them.

    Raises
    ------
    ConfigurationError
        If an option is out of range, or is one that needs more than sums.
    ParamsError
        If the sums are not finite, or do not fit `like`.

    Examples
    --------
    >>> sure = LocalPosterior({"w": torch.zeros(1)}, Diagonal({"w": torch.ones(1)}), 5)
    >>> flat = Diagonal({"w": torch.full((1,), 0.25)})
    >>> unsure = LocalPosterior({"w": torch.ones(1)}, flat, 5)
    >>> sums = add_sums([DiagonalSums.of(sure), DiagonalSums.of(unsure)])
    >>> fedfisher_from_sums(sums, solver="closed-form").params
    {'w': tensor([0.2000])}
    """
    settings = sums_settings(**options)
    return merge_sums(sums, settings, like=like, score=score, progress=progress)


def merge_sums(
    sums: DiagonalSums,
    settings: MergeSettings,
    *,
    like: Params | None = None,
    score: Score | None = None,
    progress: Report | None = None,
) -> MergeResult:
    """Merge as :func:`fedfisher_from_sums` does, with the options in one object."""
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

    `shrink` and `damping` do nothing to a diagonal. For ``structure="kfac"`` clients
    balance their Fishers themselves, so `balance` may be what it likes.

    Raises
    ------
    ConfigurationError
        If `balance`, `robust`, `max_share`, `trust` or `outlier` is given another value
        than the one that does nothing, or an option is out of range.
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
    r"""Return one tensor's system; its solution is the step from the mean.

    .. math:: (F + \lambda I)\, \delta = \sum n_i F_i \theta_i / N - F \bar\theta,
              \qquad F = \sum n_i F_i / N

    As for :func:`fedfisher_from_sums`; :math:`\lambda` is `anchor` times F's mean.
    """
    entry = sums.fisher[name].double() / sums.num_examples
    pull = sums.fisher_params[name].double() / sums.num_examples
    rhs = pull - entry * mean.double()
    dtype = _dtype_for(entry, rhs, sums.fisher[name].dtype)
    curvature = WeightedSum([Diagonal({name: entry.to(dtype)})], [1.0])
    return LinearSystem.anchored(curvature, {name: rhs.to(dtype)}, anchor)


def _dtype_for(entry: Tensor, rhs: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return float64 if a solver's products may overflow the sums' dtype."""
    widest = 2 * widest_exponent(dtype)
    far = abs(exponent_of(largest_entry(entry))) > widest
    return torch.float64 if far or largest_entry(rhs) >= 2.0**widest else dtype


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


def _stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    return rounded(value, sum_dtype(dtype))


def _added(parts: Sequence[Params]) -> dict[str, Tensor]:
    for index, other in enumerate(parts[1:], start=1):
        check_same_layout(parts[0], other, f"client {index}")
    totals = {}
    for key, first in parts[0].items():
        wide = torch.float64 if first.is_floating_point() else first.dtype
        total = torch.zeros_like(first, dtype=wide)
        for part in parts:
            total.add_(part[key])
        stored = total.to(first.dtype)
        totals[key] = stored if stored.isfinite().all() else total
    return totals
