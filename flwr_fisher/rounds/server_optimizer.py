"""The server's optimiser: one torch step on a pseudo-gradient (Reddi et al. 2021)."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from flwr_fisher.errors import ConfigurationError, check_known, check_range
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
        The name of a ``torch.optim`` class in any case, or a
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
        If `lr` is negative, or if the optimiser cannot be made, or cannot step on a
        dense gradient alone (LBFGS, SparseAdam).

    Examples
    --------
    >>> factory = make_optimizer("adam", lr=1e-3)
    >>> type(factory([torch.nn.Parameter(torch.zeros(2))])).__name__
    'Adam'
    """
    if isinstance(optimizer, str):
        check_known(name, optimizer.lower(), OPTIMIZERS)
        optimizer = _CLASSES[optimizer.lower()]
        if lr is not None:
            check_range("lr", lr, 0)
            optimizer = partial(optimizer, lr=lr)
    trial = nn.Parameter(torch.zeros(1, 1))
    trial.grad = torch.zeros(1, 1)
    try:
        optimizer([trial]).step()
    except Exception as error:
        raise ConfigurationError(
            f"{name}: {error}: pass the name of a torch optimizer that steps on a "
            "gradient, or a factory such as functools.partial(torch.optim.SGD, lr=1.0)"
        ) from error
    return optimizer


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
        parameters are those of one optimiser, bit for bit.

    Raises
    ------
    ParamsError
        If `gradient` names what `params` lack, if shapes differ, or if a stepped
        parameter or its new state is not finite.

    Examples
    --------
    >>> factory = make_optimizer("sgd", lr=1.0)
    >>> params = {"w": torch.ones(2), "count": torch.tensor(7)}
    >>> server_step(params, {"w": torch.tensor([0.25, 0.5])}, {}, factory)
    ({'w': tensor([0.7500, 0.5000]), 'count': tensor(7)}, {})
    """
    check_same_layout(select(params, gradient), gradient, "the gradient")
    parameters = {
        name: nn.Parameter(value.detach().clone())
        for name, value in params.items()
        if name in gradient and gradient[name].is_floating_point()
    }
    kept = dict(state)
    if parameters:
        for name, parameter in parameters.items():
            parameter.grad = gradient[name].detach().to(parameter, copy=True)
        optimizer = factory(list(parameters.values()))
        for key, tensor in state.items():
            name, _, entry = key.rpartition("/")
            if name in parameters:
                # A step count stays on its device, as torch leaves it.
                device = tensor if entry == "step" else parameters[name]
                restored = tensor.detach().to(device.device, copy=True)
                optimizer.state[parameters[name]][entry] = restored
        optimizer.step()
        for name, parameter in parameters.items():
            for entry, value in optimizer.state[parameter].items():
                kept[f"{name}/{entry}"] = value.detach()
    moved = {name: value.detach() for name, value in parameters.items()}
    check_finite(moved, "the server optimizer's step")
    # A square that overflowed would stop its parameter for good.
    check_finite(kept, "the server optimizer's state")
    return {k: moved.get(k, v) for k, v in params.items()}, kept
