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
from flwr_fisher.params import Params, check_finite, check_same_layout, select

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}
OPTIMIZERS = tuple(sorted(_CLASSES.keys() - {"lbfgs", "sparseadam"}))
# An optimiser's Python values as tensors, whose keys name the former type.
_PLAIN: dict[str, Callable[[Tensor], Any]] = {
    "": lambda tensor: tensor,
    "None": lambda tensor: None,
    **{kind.__name__: lambda tensor: tensor.item() for kind in (bool, int, float)},
}


def make_optimizer(
    optimizer: str | OptimizerFactory,
    lr: float | None = None,
    *,
    name: str = "optimizer",
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
    name : str, default "optimizer"
        What errors call the first argument.

    Raises
    ------
    UnknownNameError
        If there is no such optimiser.
    ConfigurationError
        If `lr` is negative, torch refuses an argument, the optimiser cannot step on a
        dense gradient alone (LBFGS, SparseAdam), or it lacks a given parameter. The
        factory raises it, too.

    Examples
    --------
    >>> factory = make_optimizer("adam", lr=1e-3)
    >>> type(factory([torch.nn.Parameter(torch.zeros(2))])).__name__
    'Adam'
    """
    if isinstance(optimizer, str):
        if optimizer.lower() not in _CLASSES:
            raise UnknownNameError(name, optimizer, OPTIMIZERS)
        optimizer = _CLASSES[optimizer.lower()]
        if lr is not None:
            check_range("lr", lr, 0)
            optimizer = partial(optimizer, lr=lr)
    elif not callable(optimizer):
        raise ConfigurationError(
            f"{name} must be a name or a factory such as functools.partial("
            f"torch.optim.SGD, lr=1.0), got {type(optimizer).__name__}"
        )
    _build(optimizer, [nn.Parameter(torch.zeros(1, 1))])
    return partial(_build, optimizer)


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
        The gradient to descend, shaped like `params`. The step changes its
        floating-point tensors; other params are returned as they are, so leave out a
        batch norm's statistics.
    state : Mapping[str, Tensor]
        What the last step returned; empty before the first.
    factory : Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
        From :func:`make_optimizer`. It is called at every step, so its arguments are
        not part of the state.

    Returns
    -------
    params, state : dict[str, Tensor]
        The new parameters in the old ones' order, and the optimiser's state under keys
        ``<param>/<entry>``. If the state is saved and restored between steps, the
        parameters are those of one optimiser, bit for bit. A Python value's key ends in
        ``:<type>``.

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
    kept, own = _restored(state, params, stepped)
    if stepped:
        optimizer = _build(factory, list(stepped.values()))
        optimizer.state.update({stepped[name]: own[name] for name in own})
        settings = _settings(optimizer)
        _translated(optimizer.step)
        names: dict[Tensor, str] = {p: name for name, p in stepped.items()}
        if _settings(optimizer) != settings or optimizer.state.keys() - names.keys():
            raise ConfigurationError(
                f"{type(optimizer).__name__} keeps state that belongs to no parameter, "
                "and the server would lose it between rounds: use an optimizer of "
                "torch.optim"
            )
        for p, entries in optimizer.state.items():
            kept |= dict(_saved(f"{names[p]}/{k}", v) for k, v in entries.items())
    moved = {name: value.detach() for name, value in stepped.items()}
    check_finite(moved, "the server optimizer's step")
    # A square that overflowed would stop its parameter for good.
    check_finite(kept, "the server optimizer's state")
    return {k: moved.get(k, v) for k, v in params.items()}, kept


def _stepped(params: Params, gradient: Params) -> list[str]:
    """Return the names to step, in the order of the parameters."""
    check_same_layout(select(params, gradient), gradient, "the gradient")
    for name, value in gradient.items():
        if not value.is_floating_point():
            continue
        if not params[name].is_floating_point():
            raise ParamsError(
                f"the gradient's '{name}' is {value.dtype}, but the parameter is "
                f"{params[name].dtype}: leave it out of the gradient"
            )
        if not value.isfinite().all():
            raise ParamsError(f"the gradient's '{name}' holds NaN or infinity")
    return [k for k in params if k in gradient and gradient[k].is_floating_point()]


def _build(
    factory: OptimizerFactory, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    parameters = list(parameters)
    optimizer = _translated(lambda: factory(parameters))
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"the optimizer's factory must return a torch optimizer, not a {name}"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigurationError(
            f"optimizer '{name}' takes sparse gradients, but a pseudo-gradient is "
            "dense: use another optimizer"
        )
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not known.issuperset(map(id, parameters)):
        raise ConfigurationError(
            f"optimizer '{name}' lacks parameters with which its factory is called, so "
            "it would not move them: make it of these, for example by "
            "functools.partial(torch.optim.SGD, lr=1.0)"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigurationError(
            f"optimizer '{name}' needs a closure, but a server has no loss to "
            "evaluate: use another optimizer"
        )
    return optimizer


def _translated(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"the server's optimizer: {error}") from error


def _settings(optimizer: torch.optim.Optimizer) -> str:
    groups = (group.items() for group in optimizer.param_groups)
    return str([[item for item in group if item[0] != "params"] for group in groups])


def _saved(key: str, value: Any) -> tuple[str, Tensor]:
    """Return a state's entry as a tensor, under a key that names its type."""
    if isinstance(value, Tensor):
        return key, value.detach()
    kind = "None" if value is None else type(value).__name__
    if kind not in _PLAIN:
        raise ConfigurationError(
            f"the optimizer's state '{key}' is a {kind}, and only tensors and numbers "
            "can be saved: use an optimizer of torch.optim"
        )
    dtype = torch.float64 if isinstance(value, float) else None
    return f"{key}:{kind}", torch.tensor([] if value is None else value, dtype=dtype)


def _restored(
    state: Mapping[str, Tensor], params: Params, stepped: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return the other parameters' state, and the entries of each to step."""
    kept, own = dict[str, Tensor](), dict[str, dict[str, Any]]()
    for key, tensor in state.items():
        name, _, entry = key.rpartition("/")
        entry, _, kind = entry.partition(":")
        if name not in params or kind not in _PLAIN:
            raise ParamsError(f"the optimizer's state '{key}' belongs to no parameter")
        if name in stepped:
            value = _PLAIN[kind](tensor)
            if isinstance(value, Tensor):
                # A step count stays on its device, as torch leaves it.
                device = value.device if entry == "step" else stepped[name].device
                value = value.detach().to(device, copy=True)
            own.setdefault(name, {})[entry] = value
        else:
            kept[key] = tensor
    return kept, own
