"""A client's posterior: its parameters, and the curvature of its loss at them."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flwr_fisher.curvature import Curvature
from flwr_fisher.errors import ConfigurationError, ParamsError, check_positive
from flwr_fisher.params import (
    DeferredParams,
    Params,
    all_finite,
    check_finite,
    check_same_layout,
    layout_of,
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
        The client's parameters and buffers after training. They are not copied: a merge
        refuses them if they have been changed in place since.
    curvature : Curvature
        The client's Fisher at these parameters, a mean over its examples. It covers the
        parameters to merge by curvature; all others (buffers) are averaged.
    num_examples : float
        The client's weight, as Flower counts it.

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
    _versions: list[tuple[str, Tensor, int]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.params, Mapping) or not isinstance(
            self.curvature, Curvature
        ):
            raise ConfigurationError(
                "a LocalPosterior takes a mapping of parameters, such as "
                "shared_state(model), and a Curvature; got "
                f"{type(self.params).__name__} and {type(self.curvature).__name__}"
            )
        if not isinstance(self.params, DeferredParams):
            _check_dense(self.params)
            detached = {name: value.detach() for name, value in self.params.items()}
            object.__setattr__(self, "params", detached)
        # PyTorch counts a tensor's changes in place, together with its views'.
        held = {} if isinstance(self.params, DeferredParams) else self.params
        counted = [(k, v, v._version) for k, v in held.items() if not v.is_inference()]
        object.__setattr__(self, "_versions", counted)
        check_positive("num_examples", self.num_examples)
        layout = layout_of(self.params)
        for name, shape in self.curvature.shapes.items():
            if name not in layout or layout[name].shape != shape:
                own = layout.get(name)
                raise ParamsError(
                    f"the curvature covers '{name}' as {tuple(shape)}, but the params "
                    f"have {'no such key' if own is None else tuple(own.shape)}"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how a copy is made: its tensors have version counters of their own."""
        return LocalPosterior, (self.params, self.curvature, self.num_examples)

    def check_unchanged(self, what: str) -> None:
        """Raise :class:`ParamsError` if a parameter was changed in place since."""
        for name, tensor, version in self._versions:
            if tensor._version != version:
                raise ParamsError(
                    f"{what}: '{name}' was changed in place after the posterior was "
                    "made. It is a model's own tensor, and the model was trained "
                    "further or loaded since: load a merged model into a copy, "
                    "copy.deepcopy(model), or make the posterior of copies, {k: "
                    "v.clone() for k, v in shared_state(model).items()}"
                )


def _check_dense(params: Params) -> None:
    for name, value in params.items():
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            what = getattr(value, "layout", type(value).__name__)
            raise ParamsError(
                f"'{name}' is no dense tensor, but {what}: a LocalPosterior is of the "
                "tensors that shared_state(model) returns"
            )


def check_is_sequence(posteriors: Sequence[LocalPosterior]) -> None:
    """Raise :class:`ConfigurationError` unless this is a sequence of posteriors."""
    types = {type(posteriors).__name__}
    if isinstance(posteriors, Sequence):
        types = {type(each).__name__ for each in posteriors} - {"LocalPosterior"}
    if types:
        raise ConfigurationError(
            "a merge takes a list of LocalPosterior, one for each client, got "
            f"{', '.join(sorted(types))}: pass [LocalPosterior(params, curvature, "
            "num_examples), ...]"
        )


def check_posteriors(posteriors: Sequence[LocalPosterior]) -> None:
    """Raise :class:`ParamsError` unless they can be merged.

    There must be at least one. None may have been changed in place since it was made.
    All must be finite, and have the same layout, and the
    same dtype for each parameter and its curvature. No diagonal may be negative.
    Deferred values are not checked here: those of an upload were checked when it was
    read.
    """
    check_is_sequence(posteriors)
    if not posteriors:
        raise ParamsError("there is no posterior to merge: pass at least one")
    first = layout_of(posteriors[0].params)
    for index, posterior in enumerate(posteriors):
        what, layout = f"posterior {index}", layout_of(posterior.params)
        posterior.check_unchanged(what)
        if layout is posterior.params:
            check_finite(posterior.params, what)
        check_same_layout(first, layout, what)
        for name, value in layout.items():
            _check_dtype(f"{what}: '{name}'", value.dtype, first[name].dtype)
        for block in posterior.curvature.blocks():
            _check_block(f"{what}: the curvature of {list(block.shapes)}", block, first)


def _check_block(what: str, block: Curvature, params: Params) -> None:
    tensors, numbers = block.tensors(), block.non_negative()
    # Directions may still be the integers of the wire; their matrices are floats.
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    for tensor, name in itertools.product([*floating, *numbers], block.shapes):
        _check_dtype(what, tensor.dtype, params[name].dtype)
    # A factor's scale may be a number beside its tensors.
    if not all(map(all_finite, [*floating, *numbers])):
        raise ParamsError(f"{what} holds NaN or infinity")
    if any((each < 0).any() for each in numbers):
        raise ParamsError(f"{what} is negative on a diagonal")


def _check_dtype(what: str, dtype: torch.dtype, expected: torch.dtype) -> None:
    if dtype != expected:
        raise ParamsError(f"{what} is {dtype}, expected {expected}")


def fedavg(posteriors: Sequence[LocalPosterior]) -> dict[str, Tensor]:
    r"""Return FedAvg's mean :math:`\sum_i p_i \theta_i`; curvatures are not used."""
    check_posteriors(posteriors)
    params = [posterior.params for posterior in posteriors]
    return weighted_mean(params, [p.num_examples for p in posteriors])
