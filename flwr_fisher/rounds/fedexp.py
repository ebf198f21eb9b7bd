"""FedExP's server step with extrapolation (Jhunjhunwala, Wang & Joshi 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from flwr_fisher.errors import check_range
from flwr_fisher.params import Params, check_finite, shares_of, weighted_mean
from flwr_fisher.rounds.updates import stepped

_LONG = 1e100  # an update whose squares may overflow float64 when summed


@dataclass(frozen=True)
class FedExpStep:
    r"""The result of a step of FedExP.

    Parameters
    ----------
    params : dict[str, Tensor]
        The new parameters, from which the next round goes on.
    lr : float
        :math:`\eta_g \ge 1`; 1 is FedAvg.
    """

    params: dict[str, Tensor] = field(repr=False)
    lr: float


def fedexp_step(
    params: Params,
    deltas: Sequence[Params],
    weights: Sequence[float],
    *,
    epsilon: float = 1e-3,
) -> FedExpStep:
    r"""Take FedExP's server step, :math:`\theta \leftarrow \theta - \eta_g \bar\Delta`.

    .. math:: \eta_g = \max\Big(1, \frac{\sum_i p_i \|\Delta_i\|^2}
              {2 (\|\bar\Delta\|^2 + \epsilon)}\Big), \qquad
              \bar\Delta = \sum_i p_i \Delta_i

    (Jhunjhunwala, Wang & Joshi, "FedExP: Speeding Up Federated Averaging via
    Extrapolation", ICLR 2023, Algorithm 1). The paper has equal clients, for which
    :math:`p_i = 1 / |S|`. Its released code weights them as this function does, and
    multiplies :math:`\epsilon` by :math:`|S|`.

    Parameters
    ----------
    params : Mapping[str, Tensor]
        The global parameters and buffers.
    deltas : Sequence[Mapping[str, Tensor]]
        A client's :math:`\Delta_i = \theta - \theta_i`, over the trained parameters,
        whose norms count. Other params are returned as they are.
    weights : Sequence[float]
        A client's weight; :math:`p_i` is its share.
    epsilon : float, default 1e-3
        :math:`\epsilon \ge 0`; its scale is that of a squared update.

    Returns
    -------
    FedExpStep
        The new parameters and the rate. The paper does not report these parameters, but
        :func:`last_two_mean` of them.

    Raises
    ------
    ConfigurationError
        If `epsilon` is negative.
    ParamsError
        If layouts differ, an update or the result is not finite, there is no client, or
        weights are unusable.

    Examples
    --------
    Two clients that agree on one coordinate out of three:

    >>> import torch
    >>> deltas = [torch.tensor([0.2, 2.0, 0.0]), torch.tensor([0.2, -2.0, 0.0])]
    >>> deltas = [{"w": delta} for delta in deltas]
    >>> step = fedexp_step({"w": torch.zeros(3)}, deltas, [1, 1], epsilon=0.46)
    >>> step.params["w"], round(step.lr, 3)
    (tensor([-0.8080,  0.0000,  0.0000]), 4.04)
    """
    check_range("epsilon", epsilon, 0)
    for index, delta in enumerate(deltas):
        check_finite(delta, f"client {index}")
    mean = weighted_mean(deltas, weights)
    unit = _unit(deltas)
    shares = zip(shares_of(weights), deltas, strict=True)
    squares = sum(share * _square(delta, unit) for share, delta in shares)
    below = 2 * (_square(mean, unit) + epsilon / unit / unit)
    lr = max(1.0, squares / below) if below > 0 else 1.0
    return FedExpStep(stepped(params, mean, -lr), lr)


def last_two_mean(last: Params, before: Params | None) -> dict[str, Tensor]:
    """Return the mean of the last two iterates, which FedExP's paper evaluates.

    Extrapolated iterates oscillate between valleys, and their mean lies lower. Training
    goes on from the last, not from the mean.

    Parameters
    ----------
    last : Mapping[str, Tensor]
        The newest parameters.
    before : Mapping[str, Tensor] | None
        The parameters of one step earlier; None after the first step, whose result is
        returned.
    """
    return dict(last) if before is None else weighted_mean([last, before], [1, 1])


def _unit(deltas: Sequence[Params]) -> float:
    """Return a divisor for updates, so that float64 can hold their squares."""
    sizes = (float(v.abs().max()) for d in deltas for v in d.values() if v.numel())
    largest = max(sizes, default=0.0)
    return largest if largest > _LONG else 1.0


def _square(params: Params, unit: float) -> float:
    wide = (value.double() for value in params.values())
    parts = (value if unit == 1 else value / unit for value in wide)
    return sum(float(part.square().sum()) for part in parts)
