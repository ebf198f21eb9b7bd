"""Per-example Jacobians through ``torch.func``: exact for any parameter, and slow."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from flwr_fisher.curvature.base import Curvature
from flwr_fisher.curvature.dense import Dense
from flwr_fisher.curvature.diagonal import Diagonal
from flwr_fisher.errors import StructureError

__all__ = ["DenseJacobian", "DiagonalJacobian", "JacobianMoments"]

_ENTRIES_AT_ONCE = 2**24  # 64 MiB in float32


class JacobianMoments(ABC):
    """Sums products of per-example Jacobians of some parameters over batches."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        parameters = dict(model.named_parameters())
        self.model = model
        self.params = {name: parameters[name].detach() for name in names}
        self.rest = {k: v.detach() for k, v in parameters.items() if k not in names}
        self.rest |= dict(model.named_buffers())

    @abstractmethod
    def add(self, inputs: Tensor, factors: Tensor) -> None:
        """Take a batch ``[n, ...]`` with its likelihood's factors ``[K, n, C]``."""

    @abstractmethod
    def mean(self, num_examples: int) -> Curvature:
        """Return the mean over examples."""

    def gradients(self, inputs: Tensor, factors: Tensor) -> Iterator[dict[str, Tensor]]:
        """Yield ``[K, n', *shape]``: the factors times Jacobians, in small chunks."""
        size = sum(p.numel() for p in self.params.values()) * factors.shape[2]
        chunk = max(1, _ENTRIES_AT_ONCE // size)
        jacobian = vmap(jacrev(self._logits), in_dims=(None, 0))
        for x, v in zip(
            torch.split(inputs, chunk), torch.split(factors, chunk, 1), strict=True
        ):
            try:
                with _without_slow_fallbacks():
                    rows = jacobian(self.params, x)
            except RuntimeError as error:
                raise StructureError(
                    f"no per-example gradients for {list(self.params)}, which are not "
                    "in linear or convolution layers called once; freeze them or make "
                    f"the model work under torch.func.vmap: {error}"
                ) from error
            yield {
                name: torch.einsum("knc,nc...->kn...", v, row.detach())
                for name, row in rows.items()
            }

    def _logits(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        state = (params | self.rest,)
        output: Tensor = functional_call(self.model, state, (x.unsqueeze(0),))
        return output.squeeze(0)


@contextmanager
def _without_slow_fallbacks() -> Iterator[None]:
    """Take attention's form that vmap has a rule for; be quiet where it has none."""
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        yield


class DiagonalJacobian(JacobianMoments):
    """The exact diagonal."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__(model, names)
        self.total = {k: torch.zeros_like(p) for k, p in self.params.items()}

    def add(self, inputs: Tensor, factors: Tensor) -> None:
        """Add the squared gradients."""
        for gradients in self.gradients(inputs, factors):
            for name, gradient in gradients.items():
                self.total[name] += gradient.square_().sum((0, 1))

    def mean(self, num_examples: int) -> Diagonal:
        """Return the diagonal."""
        return Diagonal({k: v / num_examples for k, v in self.total.items()})


class DenseJacobian(JacobianMoments):
    """The full matrix, for small models."""

    total: Tensor | float = 0.0

    def add(self, inputs: Tensor, factors: Tensor) -> None:
        """Add the gradients' outer products."""
        for gradients in self.gradients(inputs, factors):
            rows = torch.cat([g.flatten(2) for g in gradients.values()], 2).flatten(
                0, 1
            )
            self.total = self.total + rows.mT @ rows

    def mean(self, num_examples: int) -> Dense:
        """Return the matrix."""
        assert isinstance(self.total, Tensor)
        shapes = {name: p.shape for name, p in self.params.items()}
        return Dense(shapes, self.total / num_examples)
