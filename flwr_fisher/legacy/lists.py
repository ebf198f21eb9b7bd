"""The names of older Flower apps' lists of arrays, which have no names.

Nearly all such lists are ``[v.numpy() for v in model.state_dict().values()]``. Some
have only the parameters, or only the trained ones. Each of the three is a part of the
one before it, in the same order. So two lists with the same length are the same.
"""

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from flwr_fisher.errors import ParamsError, check_known
from flwr_fisher.params import trainable_names

NDArray = npt.NDArray[Any]
Order = str | Sequence[str]


def names_of(model: nn.Module, order: Order) -> list[str]:
    """Return the names of a list's arrays.

    Parameters
    ----------
    model : nn.Module
        The model.
    order : "state" | "parameters" | "trainable" | Sequence[str]
        ``state``: all of ``model.state_dict()``. ``parameters``:
        ``model.parameters()``. ``trainable``: parameters that require a gradient. Or
        the names themselves.

    Raises
    ------
    UnknownNameError
        If there is no such order.
    ParamsError
        If the model has no such entry.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    >>> [len(names_of(model, order)) for order in ("state", "parameters")]
    [7, 4]
    """
    if isinstance(order, str):
        orders = _orders(model)
        check_known("order", order, orders)
        return orders[order]
    state, names = model.state_dict(), list(order)
    if odd := [name for name in names if name not in state]:
        raise ParamsError(f"order names {odd}, which the model does not have")
    return names


def order_of(model: nn.Module, arrays: Sequence[NDArray]) -> str | None:
    """Return the order of a list of arrays, from its length and shapes.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    >>> order_of(model, [p.detach().numpy() for p in model.parameters()])
    'parameters'
    """
    state, shapes = model.state_dict(), [np.shape(a) for a in arrays]
    for order, names in _orders(model).items():
        if shapes == [tuple(state[name].shape) for name in names]:
            return order
    return None


def to_list(model: nn.Module, names: Sequence[str]) -> list[NDArray]:
    """Return copies of a model's entries as arrays.

    bfloat16, which NumPy lacks, becomes float32.
    """
    state = model.state_dict()
    tensors = [state[name].detach().cpu() for name in names]
    return [
        (t.float() if t.dtype == torch.bfloat16 else t).numpy().copy() for t in tensors
    ]


def from_list(
    model: nn.Module, names: Sequence[str], arrays: Sequence[NDArray], what: str
) -> dict[str, Tensor]:
    """Return arrays by name, in the dtypes of the model's entries.

    Parameters
    ----------
    model : nn.Module
        The model.
    names : Sequence[str]
        The names of the list's entries, in order.
    arrays : Sequence[ndarray]
        The list.
    what : str
        The list's name in the message.

    Raises
    ------
    ParamsError
        It names the position and the shapes that differ, and says what to do.
    """
    some = f"'{names[0]}', …" if names else "none"
    if len(arrays) != len(names):
        orders = {order: len(own) for order, own in _orders(model).items()}
        fits = order_of(model, arrays)
        way_out = f"order={fits!r}" if fits else "order=[names, …]"
        raise ParamsError(
            f"{what}: {len(arrays)} arrays, not {len(names)} ({some}). The model has "
            f"{orders}: pass {way_out}"
        )
    state, tensors = model.state_dict(), {}
    for place, (name, array) in enumerate(zip(names, arrays, strict=True)):
        own = state[name]
        if np.shape(array) != tuple(own.shape):
            raise ParamsError(
                f"{what}: array {place} has shape {np.shape(array)}, but '{name}' has "
                f"{tuple(own.shape)}. The list must have the order of the model's "
                f"entries, {some}: if it has another order, pass order=[names, …]"
            )
        try:
            tensors[name] = torch.tensor(np.asarray(array)).to(own.dtype)
        except TypeError as error:
            raise ParamsError(
                f"{what}: array {place}, '{name}', cannot be a tensor: {error}"
            ) from error
    return tensors


def _orders(model: nn.Module) -> dict[str, list[str]]:
    return {
        "state": list(model.state_dict()),
        "parameters": [name for name, _ in model.named_parameters()],
        "trainable": trainable_names(model),
    }


def arrays_of(parameters: Any) -> list[NDArray]:
    """Return Flower's older ``Parameters``, or a list of arrays, as a list of arrays.

    Raises
    ------
    ParamsError
        If it is neither.
    """
    tensors = getattr(parameters, "tensors", None)
    if isinstance(tensors, list):
        if (kind := getattr(parameters, "tensor_type", "")) != "numpy.ndarray":
            raise ParamsError(f"initial_parameters are {kind!r}, not 'numpy.ndarray'")
        return [np.load(BytesIO(data), allow_pickle=False) for data in tensors]
    if isinstance(parameters, Sequence):
        return [np.asarray(array) for array in parameters]
    raise ParamsError(
        "initial_parameters must be Parameters or a list of arrays, got "
        f"{type(parameters).__name__}"
    )
