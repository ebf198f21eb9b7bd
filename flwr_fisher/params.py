"""Arithmetic on named tensors, strict about keys and shapes.

This library keeps a model's parameters, a gradient or a direction as a
``dict[str, Tensor]``. Two of them can be combined if they have the same keys and
shapes. If not, a :class:`~flwr_fisher.errors.ParamsError` names the difference.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flwr_fisher.errors import ParamsError

Params = Mapping[str, Tensor]
Shapes = Mapping[str, torch.Size]
# Endings of the names of a batch norm's statistics: mean, variance, batches.
NORM_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def check_same_layout(reference: Params, other: Params, what: str = "params") -> None:
    """Raise :class:`ParamsError` unless both have the same keys and shapes.

    Parameters
    ----------
    reference, other : Mapping[str, Tensor]
        The tensors to compare; their order does not matter.
    what : str
        The name of `other` in the message.
    """
    faults = {
        "lacks the keys": reference.keys() - other.keys(),
        "has the unexpected keys": other.keys() - reference.keys(),
    }
    if told := [f"{text} {sorted(keys)}" for text, keys in faults.items() if keys]:
        raise ParamsError(f"{what} {' and '.join(told)}")
    for key, value in reference.items():
        if value.shape != other[key].shape:
            raise ParamsError(
                f"{what}: '{key}' has shape {tuple(other[key].shape)}, "
                f"expected {tuple(value.shape)}"
            )


def check_finite(params: Params, what: str) -> None:
    """Raise :class:`ParamsError` if an entry is NaN or infinite."""
    for key, value in params.items():
        if not all_finite(value):
            raise ParamsError(f"{what}: '{key}' holds NaN or infinity")


def is_finite(params: Params) -> bool:
    """Return whether no entry is NaN or infinite."""
    return all(map(all_finite, params.values()))


def all_finite(tensor: Tensor) -> Tensor:
    """Return, as a scalar tensor, whether all entries are finite.

    It checks the least and the largest number, which are NaN if any entry is. This
    takes a tenth of the time of a check of each entry.

    Examples
    --------
    >>> all_finite(torch.tensor([1.0, torch.nan])), all_finite(torch.zeros(2, 0))
    (tensor(False), tensor(True))
    """
    if not tensor.numel() or not tensor.is_floating_point():
        return tensor.isfinite().all()
    low, high = torch.aminmax(tensor)
    return low.isfinite() & high.isfinite()


def finite(params: Params, what: str) -> dict[str, Tensor]:
    """Return params unchanged, or raise :class:`ParamsError` if they are not finite."""
    check_finite(params, what)
    return dict(params)


def double(params: Params, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Return the named tensors, or all, in float64.

    A tensor that is converted to float64 and back is the same, bit for bit.
    """
    selected = params if names is None else select(params, names)
    return {name: value.double() for name, value in selected.items()}


def add(left: Params, right: Params, factor: float = 1.0) -> dict[str, Tensor]:
    """Return ``left + factor * right``, key by key."""
    check_same_layout(left, right, "the right-hand side")
    return {k: torch.add(v, right[k], alpha=factor) for k, v in left.items()}


def subtract(left: Params, right: Params) -> dict[str, Tensor]:
    """Return ``left - right``, key by key."""
    return add(left, right, -1.0)


def scale(params: Params, factor: float) -> dict[str, Tensor]:
    """Return ``factor * params``, key by key."""
    return {k: v * factor for k, v in params.items()}


def side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors of one shape along their first dimension.

    Examples
    --------
    >>> side_by_side([torch.zeros(2, 3), torch.ones(2, 3)]).shape
    torch.Size([4, 3])
    """
    if len(tensors) == 1:
        return tensors[0]
    return torch.stack([*tensors]).flatten(0, min(1, tensors[0].dim()))


def repeated(params: Params, count: int) -> dict[str, Tensor]:
    """Return each tensor `count` times, joined along its first dimension."""
    return {k: side_by_side([value] * count) for k, value in params.items()}


def by_part(params: Params, count: int) -> list[Tensor]:
    """Return each joined tensor as a matrix, with a row for each of its parts."""
    return [v.reshape(count, v.numel() // count) for v in params.values()]


def dot(left: Params, right: Params) -> Tensor:
    """Return the inner product of two sets of tensors, a scalar tensor.

    Examples
    --------
    >>> dot({"w": torch.ones(2, 3)}, {"w": torch.full((2, 3), 2.0)})
    tensor(12.)
    """
    check_same_layout(left, right, "the right-hand side")
    if not left:
        return torch.zeros((), dtype=torch.float32)
    return torch.stack([torch.sum(v * right[k]) for k, v in left.items()]).sum()


def norm(params: Params) -> Tensor:
    """Return the Euclidean norm over all tensors, a scalar tensor.

    It is finite if the norm itself is, even if a square is not.

    Examples
    --------
    >>> norm({"w": torch.tensor([3e30, 4e30])})
    tensor(5.0000e+30)
    """
    square = dot(params, params)
    if not square.is_floating_point():
        return square.sqrt()
    fits = (square >= torch.finfo(square.dtype).tiny) & square.isfinite()
    if square.device.type == "cpu" and fits:  # an accelerator is not waited for
        return square.sqrt()
    wide = torch.promote_types(square.dtype, torch.float32)
    tops = [v.abs().max().to(wide) for v in params.values() if v.numel()]
    largest = torch.stack(tops).max() if tops else square.to(wide)
    scaled = {k: v.to(wide) / largest for k, v in params.items()}
    careful = (dot(scaled, scaled).sqrt() * largest).to(square.dtype)
    exact = fits | ~((largest > 0) & largest.isfinite())
    return torch.where(exact, square.sqrt(), careful)


def clipped(params: Params, most: float) -> dict[str, Tensor]:
    """Return tensors in float64, all scaled by one factor to a norm of at most `most`.

    Raises
    ------
    ParamsError
        If an entry is not finite.

    Examples
    --------
    >>> clipped({"w": torch.tensor([3.0, 4.0])}, most=1.0)
    {'w': tensor([0.6000, 0.8000], dtype=torch.float64)}
    """
    wide = finite(double(params), "what is to be clipped")
    return scale(wide, most / max(float(norm(wide)), most))


def select(params: Params, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors of these names, in that order, without copies."""
    names = list(names)
    if missing := [name for name in names if name not in params]:
        raise ParamsError(f"params lack the keys {missing}")
    return {name: params[name] for name in names}


def bias_of(weight: str, params: Params) -> str | None:
    """Return the name of the bias that belongs to a weight, or None."""
    bias = weight.removesuffix("weight") + "bias"
    fits = bias in params and params[bias].shape == params[weight].shape[:1]
    return bias if fits else None


def flatten(params: Params) -> Tensor:
    """Return all entries as one vector ``[d]``, in the mapping's order."""
    return torch.cat([v.reshape(-1) for v in params.values()])


def unflatten(vector: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """Cut a vector ``[d]`` into tensors of given shapes: the inverse of `flatten`."""
    sizes = [shape.numel() for shape in shapes.values()]
    if vector.shape != (sum(sizes),):
        raise ParamsError(
            f"cannot cut shape {tuple(vector.shape)} into {sum(sizes)} entries"
        )
    parts = zip(shapes.items(), torch.split(vector, sizes), strict=True)
    return {name: part.reshape(shape) for (name, shape), part in parts}


def weighted_mean(
    params: Sequence[Params], weights: Sequence[float]
) -> dict[str, Tensor]:
    r"""Return :math:`\sum_i p_i \theta_i` with :math:`p_i = w_i / \sum_j w_j`.

    This is FedAvg's average, summed in float64. If all inputs are equal, and at most
    float32 or integers of at most 53 bits, the result equals them, bit for bit. Means
    of integers (batch norm's counters) are rounded to the nearest integer.

    Parameters
    ----------
    params : Sequence[Mapping[str, Tensor]]
        A set of tensors for each client, all with the same keys and shapes.
    weights : Sequence[float]
        A non-negative weight for each client, not all zero.

    Returns
    -------
    dict[str, Tensor]
        The mean, in the first client's order and dtypes.

    Raises
    ------
    ParamsError
        If there is no client, if layouts differ, or if weights are unusable.

    Examples
    --------
    >>> weighted_mean([{"w": torch.zeros(2)}, {"w": torch.ones(2)}], [1, 3])
    {'w': tensor([0.7500, 0.7500])}
    """
    if not params or len(params) != len(weights):
        raise ParamsError(
            f"{len(params)} sets of params and {len(weights)} weights: pass one each"
        )
    if min(weights) < 0 or not 0 < float(sum(weights)) < float("inf"):
        raise ParamsError(
            f"weights must be >= 0 and finite, and not all 0, got {list(weights)}"
        )
    for index, other in enumerate(params[1:], start=1):
        check_same_layout(params[0], other, f"client {index}")
    shares = shares_of(weights)
    means = {}
    for key, first in params[0].items():
        mean = shares[0] * first.to(torch.float64)
        for other, share in zip(params[1:], shares[1:], strict=True):
            mean.add_(other[key].to(torch.float64), alpha=share)
        means[key] = rounded(mean, first.dtype)
    return means


def shares_of(weights: Sequence[float]) -> list[float]:
    """Return each weight's share of the sum of all weights."""
    total = float(sum(weights))
    return [float(weight) / total for weight in weights]


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return floats in another dtype; for an integer dtype, the nearest integers."""
    return (value if dtype.is_floating_point else value.round()).to(dtype)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of a tensor's products."""
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float64 if dtype == torch.float64 else torch.float32


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters that are not empty, by name, without copies.

    Raises
    ------
    ParamsError
        If a lazy layer has not been called yet, so that it has no parameters to name.
    """
    named = dict(model.named_parameters())
    for name, tensor in {**named, **dict(model.named_buffers())}.items():
        if is_lazy(tensor):
            raise ParamsError(
                f"'{name}' has no shape yet, since its layer is lazy: call the model "
                "once, on a batch, where it is made"
            )
    return {name: p for name, p in named.items() if p.requires_grad and p.numel()}


def trainable_names(model: nn.Module) -> list[str]:
    """Return the names of the :func:`trainable` parameters."""
    return list(trainable(model))


def shared_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a federation exchanges: trainable parameters and buffers.

    If all parameters are trained, this is the model's ``state_dict``. Otherwise some
    entries are left out, so that they are never uploaded: frozen parameters (such as a
    pre-trained backbone under adapters), and the second name of a tied parameter. Then
    load the result with ``strict=False``. Also left out are buffers that are not finite
    real numbers, such as a mask of minus infinity; sparse buffers, and those in
    bfloat16, which NumPy lacks; and a module's extra state that is not a tensor. Each
    client keeps its own of these, as with ``persistent=False``.

    As in a ``state_dict``, the tensors are the model's own, and change when the model
    trains further. Clone them to keep their present values.

    Raises
    ------
    ParamsError
        If a trainable parameter is complex or in bfloat16, or a layer still lazy.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> _ = model[0].requires_grad_(False)
    >>> list(shared_state(model))
    ['1.weight', '1.bias']
    """
    trained, state = trainable(model), state_of(model)
    for name, parameter in trained.items():
        if parameter.dtype not in _SENDABLE:
            raise ParamsError(
                f"'{name}' is in {parameter.dtype}, and no parameter is merged or sent "
                "in it: freeze it, or convert the model, by model.float() for example "
                "(torch.autocast still trains it in half precision)"
            )
    return {
        name: value.detach()
        for name, value in state.items()
        if name in trained or (not isinstance(value, nn.Parameter) and _travels(value))
    }


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's own parameters and buffers, by their names in ``state_dict``.

    What a module adds there (its extra state, or how its weight is quantised) is left
    out. A curvature is of parameters as they are in the model, so they must be saved as
    they are, too.

    Raises
    ------
    ParamsError
        If ``state_dict`` has something else for a trainable parameter.
    """
    state = model.state_dict()
    for name, own in trainable(model).items():
        saved = state.get(name)
        if saved is None or _place(saved) != _place(own):
            raise ParamsError(
                f"model.state_dict() has another tensor than the parameter '{name}', "
                "or none: a hook renames, reorders or converts it. Remove the hook, "
                "and convert where you save the model"
            )
    # By nn.Module's methods, with the second names of what is tied.
    every = {
        **dict(nn.Module.named_parameters(model, remove_duplicate=False)),
        **dict(nn.Module.named_buffers(model, remove_duplicate=False)),
    }
    return {name: every[name] for name in state if name in every}


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def load_state(model: nn.Module, params: Params) -> None:
    """Copy tensors into a model's own parameters and buffers of these names.

    It calls no hook of ``load_state_dict``, which may want more than tensors.

    Raises
    ------
    ParamsError
        If the model has no such entry, or one of another shape.
    """
    state = state_of(model)
    check_same_layout(select(state, state.keys() & params.keys()), params)
    with torch.no_grad():
        for name, value in params.items():
            state[name].copy_(value)


_SENDABLE = (torch.float16, torch.float32, torch.float64)


def _travels(value: Tensor) -> bool:
    if value.is_complex() or value.layout != torch.strided:
        return False
    if not value.is_floating_point():
        return True
    return value.dtype in _SENDABLE and bool(value.isfinite().all())


def curvature_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's curvature: no half holds small squares."""
    return torch.promote_types(tensor.dtype, torch.float32)


def widened(tensor: Tensor) -> Tensor:
    """Return a detached tensor in at least float32, for squares and sums."""
    return tensor.detach().to(curvature_dtype(tensor))


class Sums:
    """Sums of tensors that have the shapes of parameters.

    They are in float32 or wider: in half precision a sum would stop growing when it is
    some hundred times as large as its terms.

    Parameters
    ----------
    parameters : Mapping[str, Tensor]
        The sums have their shapes.
    """

    def __init__(self, parameters: Params) -> None:
        self.totals = {n: widened(torch.zeros_like(p)) for n, p in parameters.items()}

    def add(self, terms: Iterable[Tensor | None], weight: int = 1) -> None:
        """Add a term to each parameter's sum; None is zero."""
        for total, term in zip(self.totals.values(), terms, strict=True):
            if term is not None:
                total.add_(term.detach(), alpha=weight)

    def add_squares(self, terms: Iterable[Tensor | None]) -> None:
        """Add the terms' squares, elementwise."""
        self.add(None if term is None else widened(term).square() for term in terms)

    def mean(self, count: int) -> dict[str, Tensor]:
        """Return the sums divided by a count, in the sums' dtypes."""
        return {name: total / count for name, total in self.totals.items()}
