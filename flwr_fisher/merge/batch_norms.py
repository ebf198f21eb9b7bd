"""Running statistics of batch norms as tensors: which have moved, and by what shift.

After a merge they are means over the clients' statistics, which belong to the clients'
own weights. A *shift* is the distance from them to the statistics of the merged model's
inputs. Clients measure shifts, and a mean over clients can be taken. A shift of the
mean is counted in deviations, and one of the variance in variances, so that all layers
have one scale.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from flwr_fisher.errors import ParamsError
from flwr_fisher.params import NORM_STATISTICS, Params

MEAN, VARIANCE, _COUNT = NORM_STATISTICS
_STEPPED = ("weight", "bias")
_FLOOR = 1e-5  # torch's eps of a batch norm, added to every variance


def norms_of(params: Params) -> list[str]:
    """Return the batch norms' prefixes: what precedes ``running_mean`` in their names.

    Examples
    --------
    >>> norms_of({"bn.running_mean": torch.zeros(2), "bn.running_var": torch.ones(2)})
    ['bn.']
    """
    prefixes = (key.removesuffix(MEAN) for key in params if key.endswith(MEAN))
    return [prefix for prefix in prefixes if prefix + VARIANCE in params]


def moved_norms(before: Params, after: Params, *, in_eval: bool = False) -> list[str]:
    """Return the norms whose statistics a round's mean of clients no longer fits.

    A norm that stays in eval mode while clients train is frozen: its statistics are a
    part of the network, and right for all weights. Such a norm is recognised by its
    count of batches, which does not change, and which a mean over clients keeps
    exactly. If a norm has no count, its statistics decide.

    Parameters
    ----------
    before, after : Mapping[str, Tensor]
        A model's parameters and buffers at the start of a round, and merged.
    in_eval : bool, default False
        Whether all norms are in eval mode while clients train. Then a norm is frozen if
        its own parameters do not change.

    Examples
    --------
    >>> names = "running_mean", "running_var", "num_batches_tracked"
    >>> before = {f"bn.{name}": torch.zeros(2) for name in names}
    >>> moved_norms(before, before | {"bn.num_batches_tracked": torch.ones(2)})
    ['bn.']
    >>> moved_norms(before, before)
    []
    """

    def moved(prefix: str) -> bool:
        names = _STEPPED if in_eval else (_COUNT,)
        own = [prefix + name for name in names if prefix + name in before]
        if not own and not in_eval:
            own = [prefix + MEAN, prefix + VARIANCE]
        return not own or any(not torch.equal(before[n], after[n]) for n in own)

    return [prefix for prefix in norms_of(after) if moved(prefix)]


def shifts_of(mean: Tensor, square: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the shift from a norm's statistics :math:`\mu, v` to those of its inputs.

    .. math:: \frac{E[x] - \mu}{\sqrt{v + \epsilon}}, \qquad
              \frac{E[(x - \mu)^2] - v}{v + \epsilon}

    Parameters
    ----------
    mean, square : Tensor [C]
        The means of :math:`x - \mu` and of its square over all inputs.
    variance : Tensor [C]
        :math:`v`.
    """
    scale = variance + _FLOOR
    return mean / scale.sqrt(), (square - variance) / scale


def with_shifts(params: Params, shifts: Params) -> dict[str, Tensor]:
    r"""Return parameters with their norms' statistics moved by a mean of shifts.

    The result is exact: it equals :math:`E[x]` and :math:`E[x^2] - E[x]^2` of one pass
    over all inputs. It is computed in float64.

    Parameters
    ----------
    params : Mapping[str, Tensor]
        The parameters and buffers with the old statistics.
    shifts : Mapping[str, Tensor]
        The result of :func:`shifts_of`, under the names of these statistics.

    Raises
    ------
    ParamsError
        If a variance would be below zero, or a number is not finite.
    """
    check_shifts(shifts)
    made = dict(params)
    for prefix in norms_of(shifts):
        names = prefix + MEAN, prefix + VARIANCE
        mean, variance = (params[name].cpu().double() for name in names)
        to_mean, to_square = (shifts[name].cpu().double() for name in names)
        scale = variance + _FLOOR
        off = to_mean * scale.sqrt()
        # Only rounding takes it below 0, if all inputs are the same.
        new = (variance + to_square * scale - off.square()).clamp(min=0)
        for name, value in zip(names, (mean + off, new), strict=True):
            made[name] = value.to(params[name])
    return made


def check_shifts(shifts: Params) -> None:
    """Raise :class:`ParamsError` if no inputs could have such shifts.

    For any inputs, the mean of the squares is at least the square of the mean.
    """
    for prefix in norms_of(shifts):
        names = prefix + MEAN, prefix + VARIANCE
        mean, square = (shifts[name].cpu().double() for name in names)
        if not (mean.isfinite().all() and square.isfinite().all()):
            raise ParamsError(f"'{prefix}' has statistics of NaN or infinity")
        rounding = 1e-3 * (1 + mean.square())  # at most, of a difference of squares
        if (1 + square - mean.square() < -rounding).any():
            raise ParamsError(f"'{prefix}' has a variance below 0")


def zero_shifts(params: Params, prefixes: Iterable[str]) -> dict[str, Tensor]:
    """Return shifts of zero for some norms, under their statistics' names."""
    names = (prefix + name for prefix in prefixes for name in (MEAN, VARIANCE))
    return {name: torch.zeros_like(params[name]) for name in names}
