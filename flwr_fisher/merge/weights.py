"""The clients' weights in a layer of a merge."""

import math
import statistics
from collections.abc import Sequence

from flwr_fisher.merge.options import MergeSettings
from flwr_fisher.params import shares_of

MAJORITY = 3  # at least so many clients have a majority without any one of them


def layer_weights(
    examples: Sequence[float],
    traces: Sequence[float],
    squared_distances: Sequence[float],
    settings: MergeSettings,
) -> list[float]:
    r"""Return the clients' weights :math:`w_i` in a layer, which add up to 1.

    :math:`w_i \propto n_i / (t_i^\gamma (1 + \kappa q_i / \operatorname{median} q))`,
    with the options `balance` (:math:`\gamma`) and `robust` (:math:`\kappa`). For three
    or more clients, each :math:`w_i t_i` is then limited to `outlier` times the median,
    and to `max_share` of the sum.

    Parameters
    ----------
    examples : Sequence[float]
        :math:`n_i`.
    traces : Sequence[float]
        :math:`t_i = \operatorname{tr} F_i`, at any one scale.
    squared_distances : Sequence[float]
        :math:`q_i = \|\bar\theta - \theta_i\|^2_{F_i}`, each client's distance from the
        mean, measured by its own Fisher. It is twice the rise of its loss at the mean
        that the Fisher predicts.
    settings : MergeSettings
        The settings of the merge.
    """
    # A client without curvature has nothing to balance.
    powers = [trace**settings.balance if trace > 0 else 1.0 for trace in traces]
    usual = statistics.median(squared_distances)
    doubts = [
        1 + settings.robust * q / usual if usual else 1.0 for q in squared_distances
    ]
    weights = zip(examples, powers, doubts, strict=True)
    shares = shares_of([n / (power * doubt) for n, power, doubt in weights])
    if len(shares) < MAJORITY:
        return shares
    if settings.outlier < math.inf:
        shares = _near_median(shares, traces, settings.outlier)
    return _capped(shares, traces, settings.max_share)


def _near_median(
    weights: list[float], traces: Sequence[float], outlier: float
) -> list[float]:
    """Return weights that limit each client to a multiple of the median curvature."""
    held = [weight * trace for weight, trace in zip(weights, traces, strict=True)]
    most = outlier * statistics.median(held)
    if not most or max(held) <= most:  # a median of 0 is no measure
        return weights
    pairs = zip(weights, held, strict=True)
    return shares_of([w * most / own if own > most else w for w, own in pairs])


def _capped(
    weights: list[float], traces: Sequence[float], max_share: float
) -> list[float]:
    """Return weights that limit each client to a share of the summed curvature.

    At one half or more, no more than one client can be above it. One that alone has
    curvature gets no weight: its layer stays at the mean.
    """
    held = [weight * trace for weight, trace in zip(weights, traces, strict=True)]
    top = max(range(len(held)), key=held.__getitem__)
    others = sum(held[:top]) + sum(held[top + 1 :])
    if max_share == 1 or not held[top] * (1 - max_share) > others * max_share:
        return weights
    factor = others * max_share / (held[top] * (1 - max_share))
    return shares_of([w * factor if i == top else w for i, w in enumerate(weights)])
