"""Each client's influence on a merge, found by merging without it."""

from collections.abc import Sequence
from dataclasses import dataclass

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.log_lines import watching
from flwr_fisher.merge.fedfisher import merge_posteriors
from flwr_fisher.merge.linear_system import Device
from flwr_fisher.merge.options import Score
from flwr_fisher.merge.posterior import LocalPosterior
from flwr_fisher.merge.solve import MergeResult
from flwr_fisher.params import Params, norm, select, subtract


@dataclass(frozen=True)
class Influence:
    r"""One client's influence on a merge.

    Parameters
    ----------
    distance : float
        :math:`\|\theta - \theta_{-i}\| / \|\theta_{-i}\|` over the parameters that the
        curvature covers, with :math:`\theta_{-i}` the merge of all others: how far the
        client moves the model. For M similar clients it is about 1/M of the difference
        between them. If it is above 1, the client has more influence than all others
        together. If the denominator is 0, it is the numerator.
    score : float, optional
        The score of :math:`\theta_{-i}`.
    """

    distance: float
    score: float | None = None


def influence(
    posteriors: Sequence[LocalPosterior],
    merged: MergeResult,
    *,
    score: Score | None = None,
    device: Device = None,
) -> list[Influence]:
    """Return each client's influence, by one more merge for each client.

    Parameters
    ----------
    posteriors : Sequence[LocalPosterior]
        The merged posteriors; at least two.
    merged : MergeResult
        The result of :func:`~flwr_fisher.merge.fedfisher`. The other merges use its
        settings, but not a score that ``solver="adam"`` used.
    score : Callable[[dict[str, Tensor]], float], optional
        Scores parameters, such as by their accuracy.
    device : torch.device | str, optional
        As for ``fedfisher``.

    Returns
    -------
    list[Influence]
        In the order of the posteriors.

    Raises
    ------
    ConfigurationError
        If there are no two clients, or the merge is not ``fedfisher``'s.

    Examples
    --------
    Two clients agree, and the third is far away:

    >>> import torch
    >>> from flwr_fisher.curvature import Diagonal
    >>> from flwr_fisher.merge import fedfisher
    >>> F = Diagonal({"w": torch.ones(1)})
    >>> values = torch.tensor([[1.0], [1.0], [7.0]])
    >>> clients = [LocalPosterior({"w": value}, F, 1) for value in values]
    >>> merged = fedfisher(clients, solver="closed-form")
    >>> [round(each.distance, 2) for each in influence(clients, merged)]
    [0.25, 0.25, 2.0]
    """
    if len(posteriors) < 2:
        raise ConfigurationError("influence needs the posteriors of at least 2 clients")
    if merged.settings is None or not merged.shares:
        raise ConfigurationError(
            "influence takes a merge by fedfisher; a merge from sums does not know "
            "the clients' parts"
        )
    influences, names = [], list(posteriors[0].curvature.shapes)
    with watching("influence", len(posteriors), "clients") as progress:
        for index in range(len(posteriors)):
            others = [*posteriors[:index], *posteriors[index + 1 :]]
            without = merge_posteriors(others, merged.settings, device=device).params
            distance = _distance(merged.params, without, names)
            scored = None if score is None else score(without)
            influences.append(Influence(distance, scored))
            progress.advance()
    return influences


def _distance(full: Params, without: Params, names: Sequence[str]) -> float:
    rest = select(without, names)
    moved = subtract(select(full, names), rest)
    return float(norm(moved)) / (float(norm(rest)) or 1.0)
