"""Running statistics of batch norms: which have moved, and those of a merged model.

After a merge they are means over the clients' statistics, which belong to the clients'
own weights. A *shift* is the distance from them to the statistics of the merged model's
inputs. Clients measure shifts, and a mean over clients can be taken. A shift of the
mean is counted in deviations, and one of the variance in variances, so that all layers
have one scale.
"""

from collections.abc import Collection, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_fisher.curvature import models
from flwr_fisher.curvature.data import batches_of
from flwr_fisher.devices import has_float64
from flwr_fisher.errors import DataError, ParamsError
from flwr_fisher.log_lines import watching
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
        known = [prefix + name for name in names if prefix + name in before]
        if not known and not in_eval:
            known = [prefix + MEAN, prefix + VARIANCE]
        return not known or any(not torch.equal(before[n], after[n]) for n in known)

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


# A pass over data


def refresh_norms(model: nn.Module, loader: Iterable[Any]) -> None:
    r"""Set a model's batch norms to the statistics of their inputs on some data.

    Use it for merged models. The running statistics of their batch norms are means over
    the clients' statistics, which belong to other weights. In eval mode, such a model
    can be far worse than the clients' models. One forward pass corrects this: with the
    batch norms in train mode, and all other modules in eval mode, the statistics become

    .. math:: \mu = E[x], \qquad \sigma^2 = E[x^2] - E[x]^2

    over all inputs x of a norm, of all batches, whatever its ``momentum``. A norm in
    train mode normalises by its batch. So, as in training, the statistics of all norms
    but the first depend on how examples are batched. Frozen norms (with parameters,
    none of them trained) and norms without running statistics stay as they are.

    Parameters
    ----------
    model : nn.Module
        The model, whose statistics are changed in place; its parameters and modes stay
        as they are.
    loader : Iterable
        Batches as a training has them; labels are not used. For data sets of several
        clients, pass ``DataLoader(ConcatDataset(datasets), batch_size=64,
        shuffle=True)``, with ``ConcatDataset`` of ``torch.utils.data``: batches of one
        client each would normalise by that client's statistics, and not by those of all
        data as in eval mode. A batch of one example is left out if a norm refuses it in
        train mode.

    Raises
    ------
    DataError
        If the loader has no batch that a norm accepts in train mode.

    Examples
    --------
    >>> model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2))
    >>> refresh_norms(model, [torch.tensor([[0.0], [4.0], [8.0]])])
    >>> model[0].running_mean
    tensor([4.])
    """
    if not (prefixes := _trained(model)):
        return
    state = dict(model.named_buffers(remove_duplicate=False))
    new = with_shifts(state, norm_shifts(model, loader, prefixes))
    with torch.no_grad():
        for prefix in prefixes:
            for name in (prefix + MEAN, prefix + VARIANCE):
                state[name].copy_(new[name])


def norm_shifts(
    model: nn.Module, loader: Iterable[Any], prefixes: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Return the shifts from batch norms' running statistics to those of their inputs.

    Parameters
    ----------
    model : nn.Module
        The model, which is left as it was.
    loader : Iterable
        As for :func:`refresh_norms`.
    prefixes : Collection[str], optional
        The norms to measure, by the names of
        :func:`~flwr_fisher.merge.batch_norms.norms_of`. All others stay in eval mode.
        Default: all norms that are not frozen.

    Returns
    -------
    dict[str, Tensor]
        The shifts of :func:`~flwr_fisher.merge.batch_norms.shifts_of`, in float64 on
        the CPU, under the names of the statistics. A shift is zero if its name is not a
        batch norm's, or the norm is not used.

    Raises
    ------
    DataError
        As for :func:`refresh_norms`.
    """
    known = norms_by_prefix(model)
    prefixes = _trained(model) if prefixes is None else prefixes
    buffers = dict(model.named_buffers(remove_duplicate=False))
    shifts = {k: v.cpu().double() for k, v in zero_shifts(buffers, prefixes).items()}
    meant = {prefix: known[prefix] for prefix in prefixes if prefix in known}
    if not meant:
        return shifts
    means = _input_means(model, loader, set(meant.values()))
    for prefix, norm in meant.items():
        if norm in means:
            names = prefix + MEAN, prefix + VARIANCE
            variance = buffers[names[1]].cpu().double()
            mean, square = means[norm]
            shifts |= dict(zip(names, shifts_of(mean, square, variance), strict=True))
    return shifts


def _input_means(
    model: nn.Module, loader: Iterable[Any], norms: Collection[_BatchNorm]
) -> dict[_BatchNorm, Tensor]:
    """Return the means of norms' inputs minus their running means, and of the squares.

    The model runs over the loader with the norms in train mode. A norm that is not used
    has no entry.
    """
    usable = False
    totals: dict[_BatchNorm, tuple[Any, Any, int]] = {}
    inputs: list[tuple[_BatchNorm, Tensor, Tensor, int]] = []  # of the current batch

    def see(norm: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(norm, _BatchNorm)
        inputs.append((norm, *_sums(args[0], norm)))

    device = next(p.device for norm in norms for p in norm.buffers())
    watched, in_eval = watching("norm statistics"), models.evaluating(model)
    by_batch = models.by_batch_statistics(norms)
    with watched, in_eval, by_batch, torch.no_grad(), ExitStack() as hooks:
        for norm in norms:
            hooks.enter_context(norm.register_forward_pre_hook(see))
        for batch in batches_of(loader, model, device):
            inputs.clear()
            try:
                batch.inputs(model)
            except ValueError as error:
                if models.TOO_FEW not in str(error):
                    raise
                continue  # also without what the norms before have seen
            usable = True
            for norm, *new, count in inputs:
                first, second, before = totals.get(norm, (0.0, 0.0, 0))
                totals[norm] = first + new[0], second + new[1], before + count
    if not usable:
        raise DataError(
            "the loader has no batch that batch norms can use in train mode: it takes "
            "two examples or more"
        )
    return {
        norm: torch.stack([first, second]).cpu().double() / count
        for norm, (first, second, count) in totals.items()
    }


def _sums(x: Tensor, norm: _BatchNorm) -> tuple[Tensor, Tensor, int]:
    """Return the sums over an input minus the running mean, and over its square.

    They are by channel. The third is the number of entries of a channel.
    """
    assert norm.running_mean is not None
    mean = norm.running_mean
    wide = torch.float64 if has_float64(mean.device) else torch.float32
    over, count = [0, *range(2, x.dim())], x.numel() // x.shape[1]
    shape = [1, -1, *(1 for _ in over[1:])]
    off = x.detach().to(mean.dtype) - mean.reshape(shape)
    first = off.sum(over, dtype=wide)
    # Squares of large numbers would lose their differences to rounding.
    centre = (first / count).to(off.dtype)
    squares = (off - centre.reshape(shape)).square().sum(over, dtype=wide)
    centre = centre.to(wide)
    return first, squares + centre * (2 * first - count * centre), count


def norms_by_prefix(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch norms with running statistics, by the prefix of their names.

    A norm with several names is returned under each of them.
    """
    return {
        f"{name}." if name else "": module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }


def _trained(model: nn.Module) -> list[str]:
    """Return norms that are not frozen: without parameters, or with a trained one."""
    norms = norms_by_prefix(model).items()
    return [prefix for prefix, norm in norms if not models.is_frozen(norm)]
