"""A client's posterior: its parameters, and the curvature of its loss at them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from flwr_fisher.curvature import Curvature
from flwr_fisher.errors import ParamsError, check_positive
from flwr_fisher.params import (
    Params,
    all_finite,
    check_finite,
    check_same_layout,
    weighted_mean,
)


@dataclass(frozen=True)
class LocalPosterior:
    """A client's posterior, FedFisher's Laplace approximation: a Gaussian.

    Its mean is `params`. Its precision is `num_examples` times `curvature`, plus that
    of a prior, which a merge leaves out.

    Parameters
    ----------
    params : Mapping[str, Tensor]
        The client's parameters and buffers after training. They are not copied: if they
        are a model's own tensors, do not train or load that model before the merge.
    curvature : Curvature
        The client's Fisher at these parameters, a mean over its examples. It covers the
        parameters to merge by curvature; all others (buffers) are averaged.
    num_examples : float
        The client's weight, as Flower counts it.
    name : str, optional
        What errors call this posterior, such as its file. By default its position.

    Raises
    ------
    ConfigurationError
        If `num_examples` is not positive.
    ParamsError
        If the curvature covers a parameter that is missing or has another shape.
    """

    params: Params
    curvature: Curvature
    num_examples: float
    name: str = ""

    def __post_init__(self) -> None:
        check_positive("num_examples", self.num_examples)
        params = {name: value.detach() for name, value in self.params.items()}
        object.__setattr__(self, "params", params)
        for name, shape in self.curvature.shapes.items():
            if name not in params or params[name].shape != shape:
                shown = tuple(params[name].shape) if name in params else "no such key"
                raise ParamsError(
                    f"the curvature covers '{name}' as {tuple(shape)}, but the params "
                    f"have {shown}"
                )


def check_posteriors(posteriors: Sequence[LocalPosterior]) -> None:
    """Raise an error unless these are posteriors that can be merged.

    Deferred values are not checked here: those of an upload were checked when it was
    read.

    Raises
    ------
    ParamsError
        If there is none, a number is not finite, a diagonal is negative, or layouts
        differ. It tells which posterior.
    """
    if not posteriors:
        raise ParamsError("there is no posterior to merge: pass at least one")
    for index, posterior in enumerate(posteriors):
        what = posterior.name or f"posterior {index}"
        check_finite(posterior.params, what)
        check_same_layout(posteriors[0].params, posterior.params, what)
        for block in posterior.curvature.blocks():
            name, numbers = list(block.shapes), block.non_negative()
            if not all(map(all_finite, [*block.tensors(), *numbers])):
                raise ParamsError(
                    f"{what}: the curvature of {name} holds NaN or infinity"
                )
            if any((number < 0).any() for number in numbers):
                raise ParamsError(
                    f"{what}: the curvature of {name} is negative on a diagonal"
                )


def fedavg(posteriors: Sequence[LocalPosterior]) -> dict[str, Tensor]:
    r"""Return FedAvg's mean :math:`\sum_i p_i \theta_i`; curvatures are not used."""
    check_posteriors(posteriors)
    params = [posterior.params for posterior in posteriors]
    return weighted_mean(params, [p.num_examples for p in posteriors])
