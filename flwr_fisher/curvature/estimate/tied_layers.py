"""A weight that an embedding and a linear head share, as in language models.

An example's gradient is the sum of two gradients: one of the rows that it looks up, and
one of the head. Each follows from the call's input and its output's gradient, so the
backward pass for all layers gives both.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flwr_fisher.curvature.estimate.direct_layers import (
    DirectLayer,
    EmbeddingRows,
    SquaredGradients,
)
from flwr_fisher.curvature.sums import Sums

_AT_ONCE = 2**24  # entries of examples' gradients that are held: 64 MiB in float32


class TiedEmbedding(EmbeddingRows):
    """The embedding's call, with its gradients by example, too."""

    def prepared(self, inputs: Tensor) -> Any:
        """Return the indices themselves."""
        return inputs

    def reduced(
        self, prepared: Any, output: Tensor, function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Return the sum, in the weight's shape."""
        return super().reduced(super().prepared(prepared), output, function)

    def add_rows(self, inputs: Tensor, output: Tensor, rows: Tensor) -> None:
        """Add each example's gradient to `rows`, ``[n, V, D]``."""
        assert isinstance(self.layer, nn.Embedding)
        n, size, width = rows.shape
        first = size * torch.arange(n, device=inputs.device).unsqueeze(1)
        keys = (inputs.reshape(n, -1) + first).flatten()
        gradient = self.widened(output).reshape(-1, width)
        if self.layer.padding_idx is not None:  # which is not trained
            known = inputs.flatten() != self.layer.padding_idx
            keys, gradient = keys[known], gradient[known]
        rows.view(-1, width).index_add_(0, keys, gradient)


class TiedHead(DirectLayer):
    """The head's call: a linear layer's, for examples or positions."""

    def fits(self, inputs: torch.Size, output: torch.Size) -> bool:
        """Return whether the output has one entry for each row of the weight."""
        rows, width = self.parameters()[0].shape
        return inputs == (*output[:-1], width) and output[-1] == rows

    def entries(self, inputs: Tensor) -> int:
        """Return the number of an example's outputs."""
        return inputs[:1, ..., 0].numel() * len(self.parameters()[0])

    def prepared(self, inputs: Tensor) -> Tensor:
        """Return the inputs."""
        return self.widened(inputs)

    def reduced(
        self, prepared: Any, output: Tensor, function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Return the sum, in the weight's shape."""
        return [function(self.rows(prepared, output)).sum(0)]

    def rows(self, inputs: Tensor, output: Tensor) -> Tensor:
        """Return each example's gradient, ``[n, V, D]``."""
        n, (size, width) = len(inputs), self.parameters()[0].shape
        return self.widened(output).reshape(n, -1, size).mT @ inputs.reshape(
            n, -1, width
        )


Pair = tuple[TiedEmbedding, TiedHead]


class TiedSquares:
    """The exact diagonal of a tied weight, summed over examples."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        (name,) = pair[0].names.values()
        self.sums = Sums({name: pair[0].parameters()[0]})
        self._waiting: dict[int, tuple[Tensor, Tensor]] = {}

    def parts(self) -> list[SquaredGradients]:
        """Return a pair of accumulators, one for each call; the first has the sums."""
        return [_Part(self, i) for i in range(2)]

    def take(self, index: int, inputs: Tensor, output: Tensor) -> None:
        """Keep a call's gradients; add the squares once both calls' are there."""
        self._waiting[index] = inputs, output
        if len(self._waiting) < 2:
            return
        embedding, head = self.pair
        (ids, looked_up), (x, predicted) = self._waiting.pop(0), self._waiting.pop(1)
        size = max(1, _AT_ONCE // head.parameters()[0].numel())
        for start in range(0, len(x), size):
            own = slice(start, start + size)
            rows = head.rows(x[own], predicted[own])
            embedding.add_rows(ids[own], looked_up[own], rows)
            self.sums.add([rows.square_().sum(0)])


class _Part(SquaredGradients):
    def __init__(self, whole: TiedSquares, index: int) -> None:
        self.whole, self.index = whole, index
        self.layer: DirectLayer = whole.pair[index]
        self.sums = Sums({}) if index else whole.sums

    def add(self, prepared: Any, output: Tensor) -> None:
        self.whole.take(self.index, prepared, output)


def tied_pairs(model: nn.Module) -> dict[tuple[str, str], Pair]:
    """Return the names of embeddings and heads that share one trained weight."""
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for own in module._parameters.values():
            owners.setdefault(id(own), []).append((name, module))
    pairs = {}
    for name, parameter in model.named_parameters():
        of = owners[id(parameter)]
        first = [(n, m) for n, m in of if isinstance(m, nn.Embedding)]
        last = [(n, m) for n, m in of if isinstance(m, nn.Linear) and m.bias is None]
        if parameter.requires_grad and (len(of), len(first), len(last)) == (2, 1, 1):
            (at, embedding), (end, head) = first[0], last[0]
            names = {"weight": name}
            pairs[at, end] = TiedEmbedding(embedding, names), TiedHead(head, names)
    return pairs
