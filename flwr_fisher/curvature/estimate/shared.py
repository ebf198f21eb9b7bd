"""Parameters that all examples share: a class token, positions, a layer's scale.

In place of such a parameter the model is given a copy an example; a copy's gradient is
that of its example. Whether a model takes copies, of which shape, is found by trial.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flwr_fisher.curvature.estimate.direct_layers import DirectLayer

_FEW = 4  # examples that are tried
_ONE = 1  # of them, that has a gradient: not the first, which a kernel may read alone
_AXES = 3  # at most, that a parameter is stretched along: positions, or an image's


@dataclass(frozen=True)
class SharedParameter(DirectLayer):
    """One parameter, and the shape of an example's copy of it.

    Parameters
    ----------
    layer : nn.Module
        Whose own parameter it is.
    names : dict[str, str]
        Its one name there, and in the model.
    shape : torch.Size
        The parameter's, but for axes of length 1.
    """

    shape: torch.Size

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        (name,) = self.names.values()
        return name

    def copies(self, count: int) -> Tensor:
        """Return one an example, ``[count, *shape]``, in no memory of their own."""
        (parameter,) = self.parameters()
        one = parameter.detach().reshape(self.shape)
        return one.expand(count, *self.shape).requires_grad_()

    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether there is a copy an example."""
        return inputs == output == torch.Size([inputs[0], *self.shape])

    def entries(self, inputs: Tensor) -> int:
        """Return the parameter's size."""
        return self.shape.numel()

    def prepared(self, inputs: Tensor) -> None:
        """Return nothing: the gradient of a copy is all that it takes."""

    def reduced(
        self, prepared: None, output: Tensor, function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Return the sum, of a tensor like the parameter."""
        (parameter,) = self.parameters()
        return [function(self.widened(output)).sum(0).reshape(parameter.shape)]


def shared_parameters(
    model: nn.Module, inputs: Tensor, names: Sequence[str]
) -> dict[str, SharedParameter]:
    """Return those parameters of which the model takes a copy an example.

    Parameters
    ----------
    model : nn.Module
        In eval mode.
    inputs : Tensor
        A few examples.
    names : Sequence[str]
        The parameters to try.
    """
    few = torch.cat([inputs[:_FEW]] * 2)[:_FEW]  # more than one
    outputs = model(few)
    if outputs.shape[:1] != few.shape[:1]:
        return {}
    trial, found = _Trial(model, few, outputs, names), {}
    for name in names:
        for candidate in _candidates(model, name):
            if trial.agrees(candidate):
                found[name] = candidate
                break
    return found


def _candidates(model: nn.Module, name: str) -> Iterator[SharedParameter]:
    module, _, own = name.rpartition(".")
    layer, shape = model.get_submodule(module), model.get_parameter(name).shape
    if shape[:1] == (1,):  # in the place of the examples
        yield SharedParameter(layer, {own: name}, shape[1:])
    for axes in range(_AXES + 1):
        yield SharedParameter(layer, {own: name}, torch.Size([1] * axes) + shape)


class _Trial:
    """What a model does of itself with some examples, to compare with."""

    def __init__(
        self, model: nn.Module, inputs: Tensor, outputs: Tensor, names: Sequence[str]
    ) -> None:
        self.model, self.inputs = model, inputs
        generator = torch.Generator().manual_seed(0)
        direction = torch.randn(outputs.shape, generator=generator).to(outputs)
        others = torch.arange(len(inputs)) != _ONE
        direction[others] = 0  # so these examples' gradients are exactly zero
        parameters = [model.get_parameter(name) for name in names]
        gradients = torch.autograd.grad(
            outputs, parameters, direction, allow_unused=True
        )
        self.outputs, self.direction, self.others = outputs.detach(), direction, others
        self.gradients = dict(zip(names, gradients, strict=True))

    def agrees(self, candidate: SharedParameter) -> bool:
        """Return whether outputs and gradients with copies are the model's own.

        They are not if copies are mixed up with something that is no example, or if the
        model has no place for them.
        """
        gradient = self.gradients[candidate.name]
        if gradient is None or gradient.is_sparse:
            return False
        copies = candidate.copies(len(self.inputs))
        try:
            outputs = functional_call(
                self.model, {candidate.name: copies}, (self.inputs,)
            )
            (rows,) = torch.autograd.grad(
                outputs, [copies], self.direction, allow_unused=True
            )
        except Exception:  # whatever a model raises at a shape that it does not expect
            return False
        if rows is None or rows[self.others].any():
            return False
        (total,) = candidate.gradients(copies, rows)
        return _close(outputs, self.outputs) and _close(total, gradient)


def _close(found: Tensor, wanted: Tensor) -> bool:
    # The model's own may be in half precision; something else is off by far more.
    tolerance = max(1e-3, 4 * torch.finfo(wanted.dtype).eps)
    error = torch.linalg.vector_norm(found.float() - wanted.float())
    return bool(error <= tolerance * torch.linalg.vector_norm(wanted.float()))
