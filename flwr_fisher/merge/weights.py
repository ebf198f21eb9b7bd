"""How much each client counts for in a layer."""

import math
import statistics
from collections.abc import Sequence

from flwr_fisher.merge.options import MergeOptions
from flwr_fisher.params import shares_of

MAJORITY = 3  # clients, from which on one can be told from the others


def layer_weights(
    examples: Sequence[float],
    traces: Sequence[float],
    rises: Sequence[float],
    options: MergeOptions,
) -> list[float]:
    r"""Return the clients' weights :math:`w_i` in a layer, which add up to 1.

    :math:`w_i \propto n_i / (t_i^\gamma (1 + \kappa q_i / \operatorname{median} q))`,
    with the options `balance` (:math:`\gamma`) and `robust` (:math:`\kappa`). Then no
    :math:`w_i t_i` of three or more is above `outlier` times the median, or above
    `max_share` of the sum.

    Parameters
    ----------
    examples : Sequence[float]
        :math:`n_i`.
    traces : Sequence[float]
        :math:`t_i = \operatorname{tr} F_i`, at any one scale.
    rises : Sequence[float]
        :math:`q_i`, what each client's Fisher expects its loss to rise by at the mean.
    options : MergeOptions
        Of the merge.
    """
    # A client that is certain of everything has no curvature, and nothing to balance.
    powers = [trace**options.balance if trace > 0 else 1.0 for trace in traces]
    usual = statistics.median(rises)
    doubts = [1 + options.robust * rise / usual if usual else 1.0 for rise in rises]
    weights = zip(examples, powers, doubts, strict=True)
    shares = shares_of([n / (power * doubt) for n, power, doubt in weights])
    if len(shares) < MAJORITY:
        return shares
    if options.outlier < math.inf:
        shares = _near_median(shares, traces, options.outlier)
    return _capped(shares, traces, options.max_share)


def _near_median(
    weights: list[float], traces: Sequence[float], outlier: float
) -> list[float]:
    """Return the weights with at most so many times the median curvature for one."""
    held = [weight * trace for weight, trace in zip(weights, traces, strict=True)]
    most = outlier * statistics.median(held)
    if not most or max(held) <= most:  # a median of 0 says nothing
        return weights
    pairs = zip(weights, held, strict=True)
    return shares_of([w * most / own if own > most else w for w, own in pairs])


def _capped(
    weights: list[float], traces: Sequence[float], max_share: float
) -> list[float]:
    """Return the weights with no more than a share of the summed curvature for one.

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
