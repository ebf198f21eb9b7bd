"""A pass over data that recomputes the statistics of a merged model's batch norms."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from flwr_fisher.curvature.batches import batches_of
from flwr_fisher.curvature.models import TOO_FEW, evaluating, is_frozen
from flwr_fisher.devices import has_float64
from flwr_fisher.errors import DataError
from flwr_fisher.log_lines import watching
from flwr_fisher.merge.batch_norms import (
    MEAN,
    VARIANCE,
    shifts_of,
    with_shifts,
    zero_shifts,
)


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
        Batches of any form that :class:`~flwr_fisher.curvature.Pairs` reads; labels are
        not used. For the data of several clients, pass ``itertools.chain(*loaders)``. A
        batch of one example is left out if a norm refuses it in train mode.

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
    model: nn.Module,
    loader: Iterable[Any],
    prefixes: Collection[str] | None = None,
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
    totals = _totals(model, loader, set(meant.values()))
    for prefix, norm in meant.items():
        if totals[norm].count:
            names = prefix + MEAN, prefix + VARIANCE
            own = shifts_of(*totals[norm].means(), buffers[names[1]].cpu().double())
            shifts |= dict(zip(names, own, strict=True))
    return shifts


class _Total:
    """Sums over a norm's inputs minus its running mean, by channel."""

    def __init__(self, norm: _BatchNorm) -> None:
        assert norm.running_mean is not None
        self.mean = norm.running_mean.clone()
        wide = torch.float64 if has_float64(self.mean.device) else torch.float32
        self.first = torch.zeros_like(self.mean, dtype=wide)
        self.second, self.count, self.calls = self.first.clone(), 0, 0
        self._batch: list[tuple[Tensor, Tensor, int]] = []

    def see(self, x: Tensor) -> None:
        """Add one input to the sums of the current batch."""
        self.calls += 1
        over, wide = [0, *range(2, x.dim())], self.first.dtype
        shape, count = [1, -1, *(1 for _ in over[1:])], x.numel() // x.shape[1]
        off = x.detach().to(self.mean.dtype) - self.mean.reshape(shape)
        first = off.sum(over, dtype=wide)
        # Squares of large numbers would lose their differences to rounding.
        centre = (first / count).to(off.dtype)
        squares = (off - centre.reshape(shape)).square().sum(over, dtype=wide)
        centre = centre.to(wide)
        second = squares + centre * (2 * first - count * centre)
        self._batch.append((first, second, count))

    def forget(self) -> None:
        """Discard the sums of the current batch."""
        self._batch = []

    def add(self) -> None:
        """Add the sums of the current batch to the total."""
        for first, second, count in self._batch:
            self.first += first
            self.second += second
            self.count += count
        self.forget()

    def means(self) -> tuple[Tensor, Tensor]:
        """Return both sums divided by the count, in float64 on the CPU."""
        both = torch.stack([self.first, self.second]).cpu().double() / self.count
        return both[0], both[1]


def _totals(
    model: nn.Module, loader: Iterable[Any], norms: Collection[_BatchNorm]
) -> dict[_BatchNorm, _Total]:
    """Run a model over a loader, norms in train mode; return their inputs' sums."""
    batches, count = 0, 0
    with ExitStack() as stack:
        stack.enter_context(watching("norm statistics"))
        stack.enter_context(norms_training(model, norms))
        stack.enter_context(torch.no_grad())
        # Not before, where the caller may be in inference mode.
        totals = {norm: _Total(norm) for norm in norms}
        stack.enter_context(_watched(totals))
        device = next(iter(totals.values())).mean.device
        for batch in batches_of(loader, model, device):
            batches += 1
            try:
                batch.inputs(model)
            except ValueError as error:
                if TOO_FEW not in str(error):
                    raise
                for total in totals.values():
                    total.forget()
                continue
            count += 1
            for total in totals.values():
                total.add()
    if not batches:
        raise DataError("the loader has no examples, so norms have no statistics")
    if not count:
        raise DataError(
            f"batch norm can use none of the loader's {batches} batches in train mode: "
            "it needs batches of two examples or more"
        )
    return totals


@contextmanager
def norms_training(model: nn.Module, norms: Collection[_BatchNorm]) -> Iterator[None]:
    """Put norms in train mode and the rest in eval mode, in a ``with`` block."""
    with evaluating(model):  # which restores their statistics, too
        for norm in norms:
            norm.training = True
        yield


@contextmanager
def _watched(totals: Mapping[_BatchNorm, _Total]) -> Iterator[None]:
    """Add each norm's inputs to its total, in a ``with`` block.

    These are the inputs of ``F.batch_norm``, which may be others than the module's: a
    subclass may move channels to the second dimension, or leave out padding. A module
    with a formula of its own is given what it normalises.
    """
    calls: dict[_BatchNorm, int] = {}

    def begin(norm: Any, _: object) -> None:
        calls[norm] = totals[norm].calls

    def end(norm: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        x, total = args[0] if args else kwargs["input"], totals[norm]
        if total.calls == calls[norm] and x.shape[1:2] == total.mean.shape:
            total.see(x)

    hooks = [norm.register_forward_pre_hook(begin) for norm in totals]
    hooks += [norm.register_forward_hook(end, with_kwargs=True) for norm in totals]
    by_mean = {id(norm.running_mean): total for norm, total in totals.items()}
    try:
        with _Inputs(by_mean):
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _Inputs(TorchFunctionMode):
    """Adds what is normalised to the total of the running mean that is passed."""

    def __init__(self, totals: Mapping[int, _Total]) -> None:
        super().__init__()
        self.totals = totals

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and record the input of a batch norm."""
        kwargs = kwargs or {}
        if func is F.batch_norm:
            given = dict(zip(("input", "running_mean"), args, strict=False)) | kwargs
            if total := self.totals.get(id(given["running_mean"])):
                total.see(given["input"])
        return func(*args, **kwargs)


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
    return [prefix for prefix, norm in norms if not is_frozen(norm)]
