"""Per-example Jacobians by ``torch.func``: exact for any parameter, but slow."""

import warnings
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from flwr_fisher.curvature.data import Inputs
from flwr_fisher.curvature.models import outputs_with
from flwr_fisher.curvature.operators.base import Diagonal
from flwr_fisher.log_lines import logger
from flwr_fisher.params import Params, Sums, widened

_ENTRIES_AT_ONCE = 2**24  # 64 MiB in float32
_SHARE = 0.05  # of a gradient's norm: far above the rounding of half precision
_ROUNDING = 1e-5  # of the sum of all gradients' norms


class Jacobians:
    """Computes per-example gradients of some parameters."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        parameters = dict(model.named_parameters())
        self.model = model
        self.params = {name: parameters[name].detach() for name in names}
        self.rest = {k: v.detach() for k, v in parameters.items() if k not in names}
        self.rest |= dict(model.named_buffers())
        self.loops = False  # whether examples are taken one by one
        self._checked = False

    def gradients(self, inputs: Inputs, pieces: Tensor) -> Iterator[dict[str, Tensor]]:
        """Yield the pieces' gradients ``[n', K, *shape]``, a few examples at a time."""
        size = sum(p.numel() for p in self.params.values()) * len(pieces)
        chunk = max(1, _ENTRIES_AT_ONCE // max(size, 1))
        parts = zip(inputs.split(chunk), torch.split(pieces, chunk, 1), strict=True)
        for x, v in parts:
            rows = self._one_by_one(x, v) if self.loops else self._together(x, v)
            yield {name: widened(row.to_dense()) for name, row in rows.items()}

    def _together(self, inputs: Inputs, pieces: Tensor) -> dict[str, Tensor]:
        """Return some examples' gradients by ``vmap``, or by a loop if it fails."""

        def pulled_back(tensors: list[Tensor], v: Tensor) -> dict[str, Tensor]:
            one = inputs.with_tensors([t.unsqueeze(0) for t in tensors])

            def outputs(params: dict[str, Tensor]) -> Tensor:
                return outputs_with(self.model, params | self.rest, one).squeeze(0)

            output, pull, *_ = vjp(outputs, self.params)
            # One by one: a second vmap within that over examples has wrong rules
            # (PReLU's).
            rows = [pull(each.to(output.dtype))[0] for each in v.unbind(0)]
            return {name: torch.stack([r[name] for r in rows]) for name in self.params}

        try:
            # The form of attention that vmap supports, and no warnings of vmap's.
            with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")
                of_all = vmap(pulled_back, in_dims=(0, 1))
                found: dict[str, Tensor] = of_all(inputs.tensors, pieces)
        except (RuntimeError, TypeError, ValueError) as error:
            # The error depends on the model: a mask that reads numbers, an LSTM cell.
            logger.debug("No vmap over examples: %s", error)
        else:
            if self._checked or self._are_right(found, inputs, pieces):
                self._checked = True
                return found
            logger.debug("No vmap over examples: one example alone has other gradients")
        self.loops = True
        return self._one_by_one(inputs, pieces)

    def _are_right(self, found: Params, inputs: Inputs, pieces: Tensor) -> bool:
        """Return whether one example has the same gradients by itself.

        It has others if the model reaches a parameter not by its module, but in a list
        or a closure: there ``functional_call`` does not replace it.
        """
        largest = int(pieces.movedim(1, 0).flatten(1).square().sum(1).argmax())
        row = slice(largest, largest + 1)
        alone = self._one_by_one(inputs[row], pieces[:, row])
        pairs = [(widened(found[k][row]), widened(x)) for k, x in alone.items()]
        off = torch.stack([torch.dist(a, b) for a, b in pairs])
        norms = torch.stack([torch.linalg.vector_norm(b) for _, b in pairs])
        # A parameter may have no gradient but rounding.
        return bool((off <= _SHARE * norms + _ROUNDING * norms.sum()).all())

    def _one_by_one(self, inputs: Inputs, pieces: Tensor) -> dict[str, Tensor]:
        """Return the same by one forward pass for each example, for any model."""
        parameters = dict(self.model.named_parameters())
        leaves = [parameters[name] for name in self.params]
        pull = partial(torch.autograd.grad, retain_graph=True, materialize_grads=True)
        rows = []
        for i in range(len(inputs)):
            output = inputs[i : i + 1](self.model)
            vectors = pieces[:, i : i + 1].to(output.dtype)
            rows.append([pull(output, leaves, v) for v in vectors])
        return {
            name: torch.stack([torch.stack([r[k] for r in each]) for each in rows])
            for k, name in enumerate(self.params)
        }


class DiagonalJacobian(Jacobians):
    """The exact diagonal."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__(model, names)
        self.sums = Sums(self.params)

    def add(self, inputs: Inputs, pieces: Tensor) -> None:
        """Add the squared gradients."""
        for gradients in self.gradients(inputs, pieces):
            self.sums.add(gradients[k].square().sum((0, 1)) for k in self.params)

    def mean(self, num_examples: int) -> Diagonal:
        """Return the diagonal."""
        return Diagonal(self.sums.mean(num_examples))
