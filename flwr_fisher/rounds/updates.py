"""The clients' updates in a round, and steps along their mean."""

from collections.abc import Collection, Sequence

from torch import Tensor

from flwr_fisher.errors import ParamsError
from flwr_fisher.params import (
    NORM_STATISTICS,
    Params,
    add,
    double,
    finite,
    subtract,
    weighted_mean,
)


def stepped(params: Params, direction: Params, factor: float) -> dict[str, Tensor]:
    """Return ``params + factor * direction``; parameters without a direction stay.

    Raises
    ------
    ParamsError
        If the direction has a key that the params lack, or another shape; or if a
        stepped parameter is not finite.
    """
    if unknown := sorted(direction.keys() - params.keys()):
        raise ParamsError(f"the step has {unknown}, which the params lack")
    moved = {key: value for key, value in params.items() if key in direction}
    step = add(moved, direction, factor)
    return {**params, **finite(step, f"the params plus {factor:g} times the step")}


def stepped_names(params: Params, trained: Collection[str] | None = None) -> list[str]:
    """Return the names to step, where uploads do not say which parameters are trained.

    A model that a client uploads also has buffers, which a server only averages.

    Parameters
    ----------
    params : Mapping[str, Tensor]
        The model: parameters and buffers.
    trained : Collection[str], optional
        The names of the trained parameters (``trainable_names(model)``). By default,
        these are all floating-point tensors except those that are named like the
        statistics of torch's batch norm.

    Examples
    --------
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    >>> stepped_names(model.state_dict())
    ['0.weight', '1.weight', '1.bias']
    """
    if trained is not None:
        return [key for key in params if key in trained]
    return [
        key
        for key, value in params.items()
        if value.is_floating_point() and key.rpartition(".")[2] not in NORM_STATISTICS
    ]


def updates(
    start: Params, models: Sequence[Params], names: Collection[str]
) -> list[dict[str, Tensor]]:
    r"""Return each client's :math:`\Delta_i = \theta - \theta_i`, in float64.

    They cover these names, and have a gradient's sign: a server steps against them.
    """
    before = double(start, names)
    return [subtract(before, double(params, names)) for params in models]


def with_averages(
    start: Params,
    moved: Params,
    models: Sequence[Params],
    weights: Sequence[float],
) -> dict[str, Tensor]:
    """Return the stepped parameters, with the mean of everything else, in their dtypes.

    Parameters
    ----------
    start : Mapping[str, Tensor]
        The global parameters and buffers; the result has their order and dtypes.
    moved : Mapping[str, Tensor]
        The new values of some of them.
    models : Sequence[Mapping[str, Tensor]]
        The clients' trained models, which give the mean of all other tensors.
    weights : Sequence[float]
        The clients' weights.

    Raises
    ------
    ParamsError
        If the result is not finite.
    """
    averaged = weighted_mean(models, weights)
    new = {
        key: moved[key].to(value.dtype) if key in moved else averaged[key]
        for key, value in start.items()
    }
    return finite(new, "the new model")
