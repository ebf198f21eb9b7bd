"""Parameters that all examples share: a class token, positions, a layer's scale.

In place of such a parameter the model is given a copy an example; a copy's gradient is
that of its example.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_fisher.curvature.estimate.direct_layers import DirectLayer


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
