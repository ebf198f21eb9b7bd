"""What a model does of itself with a few examples, for formulas to agree with."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from flwr_fisher.curvature.estimate.direct_layers import DirectLayer
from flwr_fisher.curvature.estimate.tappable import TappableLayer
from flwr_fisher.curvature.estimate.taps import tapped_forward
from flwr_fisher.curvature.sums import widened

_FEW = 5
_EVERY = 3  # of them has a gradient; not the first, which a kernel may read alone
# Relative: above rounding, TF32's too; a wrong formula is off by far more.
_TOLERANCE = 5e-3


class Trial:
    """Outputs and gradients on a few examples, of which some have a gradient.

    So the others' are exactly zero wherever a row is an example's.

    Parameters
    ----------
    model : nn.Module
        In eval mode.
    inputs : Tensor
        A batch, of which a few examples are taken.
    layers : Mapping[str, TappableLayer | DirectLayer]
        Those whose calls matter.

    Attributes
    ----------
    inputs : Tensor
        The examples, more than one.
    outputs, direction : Tensor
        What the model returns, and a random gradient of it.
    others : Tensor
        Booleans: which examples have no gradient.
    calls : dict[str, Tap]
        The call of each layer that was called once.
    at_outputs : dict[str, Tensor | None]
        The gradients of these layers' outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Tensor,
        layers: Mapping[str, TappableLayer | DirectLayer],
    ) -> None:
        self.model, self.layers = model, layers
        self.inputs = torch.cat([inputs[:_FEW]] * 2)[:_FEW]
        outputs, taps = tapped_forward(model, self.inputs, layers)
        calls = {name: each[0] for name, each in taps.items() if len(each) == 1}
        self.calls = {n: call for n, call in calls.items() if call.output is not None}
        generator = torch.Generator().manual_seed(0)
        self.direction = torch.randn(outputs.shape, generator=generator).to(outputs)
        rows = torch.arange(len(outputs), device=outputs.device)
        self.others = rows % _EVERY != 1
        self.direction[self.others] = 0
        self.outputs = outputs.detach()
        trained = [p for p in model.parameters() if p.requires_grad]
        edges = [call.edge() for call in self.calls.values()]
        edges += [get_gradient_edge(parameter) for parameter in trained]
        gradients = iter(
            torch.autograd.grad(outputs, edges, self.direction, allow_unused=True)
        )
        self.at_outputs = {name: next(gradients) for name in self.calls}
        self._of = {id(parameter): next(gradients) for parameter in trained}

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return a trained parameter's gradient, if it has one that is dense."""
        found = self._of[id(parameter)]
        return None if found is None or found.is_sparse else found


def agree(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two tensors are equal up to rounding in a dtype."""
    tolerance = max(_TOLERANCE, 4 * torch.finfo(dtype).eps)
    a, b = widened(found), widened(wanted)
    return bool(torch.dist(a, b) <= tolerance * torch.linalg.vector_norm(b))
