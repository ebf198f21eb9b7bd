"""The server's optimiser: one torch step on a pseudo-gradient (Reddi et al. 2021)."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flwr_fisher.errors import (
    ConfigurationError,
    ParamsError,
    UnknownNameError,
    check_range,
)
from flwr_fisher.params import Params, check_finite

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_REFUSED = {
    "lbfgs": "it calls a closure, and a server has no loss to evaluate",
    "sparseadam": "it takes sparse gradients, and a pseudo-gradient is dense",
}
_CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}
OPTIMIZERS = tuple(sorted(_CLASSES.keys() - _REFUSED.keys()))
# An optimiser's own Python values, as tensors that say what they were.
_PLAIN: dict[str, type] = {"bool": bool, "int": int, "float": float}


def make_optimizer(
    optimizer: str | OptimizerFactory, lr: float | None = None
) -> OptimizerFactory:
    """Return a factory of server optimisers for :func:`server_step`.

    Parameters
    ----------
    optimizer : str | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
        The name of a ``torch.optim`` class in any case (:data:`OPTIMIZERS`), or a
        factory, such as ``functools.partial(torch.optim.SGD, lr=1.0, momentum=0.9)``.
    lr : float, optional
        The server's learning rate, by default torch's. A factory has its own, and this
        is not used.

    Raises
    ------
    UnknownNameError
        If there is no such optimiser.
    ConfigurationError
        If `lr` is negative, torch refuses an argument, or the optimiser cannot step on
        a dense gradient alone (LBFGS, SparseAdam).

    Examples
    --------
    >>> factory = make_optimizer("adam", lr=1e-3)
    >>> type(factory([torch.nn.Parameter(torch.zeros(2))])).__name__
    'Adam'
    """
    if isinstance(optimizer, str):
        name = optimizer.lower()
        if name in _REFUSED:
            raise ConfigurationError(f"optimizer '{optimizer}': {_REFUSED[name]}")
        if name not in OPTIMIZERS:
            raise UnknownNameError("optimizer", optimizer, OPTIMIZERS)
        factory: OptimizerFactory = _CLASSES[name]
        if lr is not None:
            check_range("lr", lr, 0)
            factory = partial(_CLASSES[name], lr=lr)
    elif not callable(optimizer):
        raise ConfigurationError(
            "optimizer takes a name or a factory such as functools.partial(torch.optim."
            f"SGD, lr=1.0), got {type(optimizer).__name__}"
        )
    else:
        factory = optimizer
    _build(factory, [nn.Parameter(torch.zeros(1, 1))])
    return factory


def server_step(
    params: Params,
    gradient: Params,
    state: Mapping[str, Tensor],
    factory: OptimizerFactory,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    r"""Take one step of a torch optimiser on a pseudo-gradient.

    With SGD it is :math:`\theta \leftarrow \theta - \eta_g g`, the FedFish paper's
    Algorithm 1, line 8; with Adam, the server step of its experiments (A.3.2) and of
    FedAdam (Reddi et al. 2021).

    Parameters
    ----------
    params : Mapping[str, Tensor]
        The global parameters and buffers, of any shapes.
    gradient : Mapping[str, Tensor]
        What to descend, shaped like `params`. Its floating tensors are stepped; other
        params come back as they are, so leave out a batch norm's statistics.
    state : Mapping[str, Tensor]
        What the last step returned; empty before the first.
    factory : Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
        From :func:`make_optimizer`. It is called at every step: what it was given is
        not part of the state.

    Returns
    -------
    params, state : dict[str, Tensor]
        The new parameters in the old ones' order, and the optimiser's state under keys
        ``<param>/<entry>``. Saved and restored between steps, it leaves them
        those of one optimiser, bit for bit. A Python value's key ends in ``:<type>``.

    Raises
    ------
    ParamsError
        If `gradient` or `state` names what `params` lack, if shapes differ, or if a
        gradient, a stepped parameter or its new state is not finite.
    ConfigurationError
        If the optimiser needs a closure or sparse gradients, refuses a parameter, or
        keeps state that cannot be saved.

    Examples
    --------
    >>> factory = make_optimizer("sgd", lr=1.0)
    >>> params = {"w": torch.ones(2), "count": torch.tensor(7)}
    >>> server_step(params, {"w": torch.tensor([0.25, 0.5])}, {}, factory)
    ({'w': tensor([0.7500, 0.5000]), 'count': tensor(7)}, {})
    """
    stepped = {
        name: nn.Parameter(params[name].detach().clone())
        for name in _stepped(params, gradient)
    }
    for name, parameter in stepped.items():
        parameter.grad = gradient[name].detach().to(parameter, copy=True)
    entries = _unflatten(state, params)
    if stepped:
        optimizer = _build(factory, list(stepped.values()))
        for name, parameter in stepped.items():
            if name in entries:
                optimizer.state[parameter] = {
                    entry: _placed(entry, value, parameter)
                    for entry, value in entries[name].items()
                }
        settings = _settings(optimizer)
        _translated(optimizer.step)
        entries |= _entries(optimizer, stepped)
        if _settings(optimizer) != settings:
            raise ConfigurationError(
                f"{type(optimizer).__name__} keeps state in its parameter groups, "
                "which would be lost between rounds: use one of torch.optim's"
            )
    moved = {name: value.detach() for name, value in stepped.items()}
    check_finite(moved, "the server optimizer's step")
    kept = _flatten(entries)
    # A square that overflowed would hold its parameter still from then on.
    check_finite(kept, "the server optimizer's state")
    return {k: moved.get(k, v) for k, v in params.items()}, kept


def _stepped(params: Params, gradient: Params) -> list[str]:
    """Return the names to step, in the order of the parameters."""
    for name, value in gradient.items():
        if name not in params:
            raise ParamsError(f"the gradient has '{name}', which the params lack")
        if value.shape != params[name].shape:
            raise ParamsError(
                f"the gradient's '{name}' has shape {tuple(value.shape)}, expected "
                f"{tuple(params[name].shape)}"
            )
        if not value.is_floating_point():
            continue
        if not params[name].is_floating_point():
            raise ParamsError(
                f"the gradient's '{name}' is {value.dtype}, but the parameter is "
                f"{params[name].dtype}: leave it out"
            )
        if not value.isfinite().all():
            raise ParamsError(f"the gradient's '{name}' holds NaN or infinity")
    return [k for k in params if k in gradient and gradient[k].is_floating_point()]


def _build(
    factory: OptimizerFactory, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    optimizer = _translated(lambda: factory(parameters))
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"the optimizer's factory returned a {name}")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigurationError(f"optimizer '{name}': {_REFUSED['sparseadam']}")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigurationError(f"optimizer '{name}': {_REFUSED['lbfgs']}")
    return optimizer


def _translated(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"the server's optimizer: {error}") from error


def _settings(optimizer: torch.optim.Optimizer) -> str:
    groups = (group.items() for group in optimizer.param_groups)
    return str([[item for item in group if item[0] != "params"] for group in groups])


Entries = dict[str, dict[str, Any]]


def _entries(
    optimizer: torch.optim.Optimizer, stepped: Mapping[str, nn.Parameter]
) -> Entries:
    names: dict[Tensor, str] = {p: name for name, p in stepped.items()}
    if optimizer.state.keys() - names.keys():
        raise ConfigurationError(
            f"{type(optimizer).__name__} keeps state that belongs to no parameter, "
            "which would be lost between rounds: use one of torch.optim's"
        )
    return {names[p]: dict(values) for p, values in optimizer.state.items()}


def _flatten(entries: Entries) -> dict[str, Tensor]:
    flat = {}
    for name, values in entries.items():
        for entry, value in values.items():
            key = f"{name}/{entry}"
            if isinstance(value, Tensor):
                flat[key] = value.detach()
            elif value is None:
                flat[f"{key}:None"] = torch.empty(0)
            elif type(value).__name__ in _PLAIN:
                dtype = torch.float64 if isinstance(value, float) else None
                flat[f"{key}:{type(value).__name__}"] = torch.tensor(value, dtype=dtype)
            else:
                raise ConfigurationError(
                    f"the optimizer's state '{key}' is a "
                    f"{type(value).__name__}, which cannot be saved as a tensor"
                )
    return flat


def _unflatten(state: Mapping[str, Tensor], params: Params) -> Entries:
    entries: Entries = {}
    for key, value in state.items():
        name, _, entry = key.rpartition("/")
        entry, _, kind = entry.partition(":")
        if name not in params or kind not in ("", "None", *_PLAIN):
            raise ParamsError(f"the state has '{key}', which fits no parameter")
        plain = _PLAIN[kind](value.item()) if kind in _PLAIN else None
        entries.setdefault(name, {})[entry] = plain if kind else value
    return entries


def _placed(entry: str, value: Any, parameter: nn.Parameter) -> Any:
    """Return a copy beside the parameter; a step's count stays, as torch leaves it."""
    if not isinstance(value, Tensor):
        return value
    device = value.device if entry == "step" else parameter.device
    return value.detach().to(device, copy=True)
