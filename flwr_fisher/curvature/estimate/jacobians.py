"""Per-example Jacobians through ``torch.func``: exact for any parameter, and slow."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from flwr_fisher.curvature.models import is_refusal
from flwr_fisher.curvature.operators.plain import Dense, Diagonal
from flwr_fisher.curvature.sums import Sums, widened
from flwr_fisher.errors import StructureError

_ENTRIES_AT_ONCE = 2**24  # 64 MiB in float32


class Jacobians:
    """Per-example gradients of some parameters."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        parameters = dict(model.named_parameters())
        self.model = model
        self.params = {name: parameters[name].detach() for name in names}
        self.rest = {k: v.detach() for k, v in parameters.items() if k not in names}
        self.rest |= dict(model.named_buffers())

    def gradients(self, inputs: Tensor, pieces: Tensor) -> Iterator[dict[str, Tensor]]:
        """Yield ``[n', K, *shape]``: the pieces pulled back, in small chunks."""
        size = sum(p.numel() for p in self.params.values()) * len(pieces)
        chunk = max(1, _ENTRIES_AT_ONCE // size)
        pull = vmap(self._pulled_back, in_dims=(0, 1))
        for x, v in zip(
            torch.split(inputs, chunk), torch.split(pieces, chunk, 1), strict=True
        ):
            try:
                with _without_slow_fallbacks():
                    rows = pull(x, v)
            except RuntimeError as error:
                if not is_refusal(error):
                    raise
                raise StructureError(
                    f"no per-example gradients for {list(self.params)}, which are not "
                    "in linear or convolution layers called once; freeze them or make "
                    f"the model work under torch.func.vmap: {error}"
                ) from error
            yield {name: widened(row) for name, row in rows.items()}

    def _pulled_back(self, x: Tensor, pieces: Tensor) -> dict[str, Tensor]:
        """Return one example's gradients, one for each piece ``[K, *outputs]``."""
        output, pull, *_ = vjp(lambda params: self._outputs(params, x), self.params)
        # One by one: a second vmap within that over examples has wrong rules (PReLU's).
        rows = [pull(v.to(output.dtype))[0] for v in pieces.unbind(0)]
        return {name: torch.stack([row[name] for row in rows]) for name in self.params}

    def _outputs(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        state = (params | self.rest,)
        output: Tensor = functional_call(self.model, state, (x.unsqueeze(0),))
        return output.squeeze(0)


@contextmanager
def _without_slow_fallbacks() -> Iterator[None]:
    """Take attention's form that vmap has a rule for; be quiet where it has none."""
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        yield


class DiagonalJacobian(Jacobians):
    """The exact diagonal."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__(model, names)
        self.sums = Sums(self.params)

    def add(self, inputs: Tensor, pieces: Tensor) -> None:
        """Add the squared gradients."""
        for gradients in self.gradients(inputs, pieces):
            self.sums.add(gradients[k].square().sum((0, 1)) for k in self.params)

    def mean(self, num_examples: int) -> Diagonal:
        """Return the diagonal."""
        return Diagonal(self.sums.mean(num_examples))


class DenseJacobian(Jacobians):
    """The full matrix, for small models."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__(model, names)
        size = sum(p.numel() for p in self.params.values())
        self.like = next(iter(self.params.values()))
        self.total = widened(self.like.new_zeros(size, size))

    def add(self, inputs: Tensor, pieces: Tensor) -> None:
        """Add the gradients' outer products."""
        for gradients in self.gradients(inputs, pieces):
            # Not flatten(2), which a parameter that is a single number does not have.
            flat = [g.reshape(*g.shape[:2], -1) for g in gradients.values()]
            rows = torch.cat(flat, 2).flatten(0, 1)
            self.total.addmm_(rows.mT, rows)

    def mean(self, num_examples: int) -> Dense:
        """Return the matrix."""
        shapes = {name: p.shape for name, p in self.params.items()}
        return Dense(shapes, (self.total / num_examples).to(self.like.dtype))


JacobianAccumulator = DiagonalJacobian | DenseJacobian
