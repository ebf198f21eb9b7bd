"""The engine behind :func:`flwr_fisher.curvature.fisher`.

A Fisher is a sum of rank-one pieces (:mod:`~flwr_fisher.curvature.likelihood`), and
each piece costs a backward pass, which goes only as far as the layers' outputs:
gradients of weights are never formed for a whole batch. One pass serves every structure
at once, and K-FAC's input factors are taken once an example. With a tolerance, a first
forward pass without gradients tells which pieces matter
(:mod:`~flwr_fisher.curvature.plan`); the examples that need about equally many are then
run together, across batches.

Parameters outside linear and convolution layers, and those of a layer that is not
called exactly once through its own ``forward``, one row an example, get their exact
diagonal from per-example gradients.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from flwr_fisher.curvature.jacobians import JacobianMoments
from flwr_fisher.curvature.likelihood import Likelihood
from flwr_fisher.curvature.moments import LayerMoments
from flwr_fisher.curvature.plan import Group, groups
from flwr_fisher.curvature.taps import Tap, tapped_forward
from flwr_fisher.errors import StructureError

__all__ = ["Engine"]

PiecesOf = Callable[[Tensor, slice], Tensor]

_QUEUE = 64  # examples that are run together, where memory allows


class Engine:
    """Sums moments over batches; the model is in eval mode already.

    Parameters
    ----------
    model : nn.Module
        What to differentiate.
    moments : Mapping[str, list[LayerMoments]]
        What to sum for each tapped layer.
    jacobians : list[JacobianMoments]
        What to sum for other parameters.
    chunk : int
        At most this many examples at once.
    """

    def __init__(
        self,
        model: nn.Module,
        moments: Mapping[str, list[LayerMoments]],
        jacobians: list[JacobianMoments],
        chunk: int,
    ) -> None:
        self.model, self.moments, self.jacobians = model, moments, jacobians
        self.layers = {name: found[0].layer for name, found in moments.items()}
        self.chunk = chunk
        self.count = 0
        self._waiting: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def add(self, inputs: Tensor, pieces_of: PiecesOf) -> None:
        """Take a batch, with pieces ``[K, n, *outputs]`` made of outputs and rows."""
        for start in range(0, len(inputs), self.chunk):
            rows = slice(start, start + self.chunk)
            x = inputs[rows]
            outputs, taps = self._forward(x)
            columns = self._columns(taps)
            for name, column in columns.items():
                self._observe(name, column)
            self._pull(x, outputs, taps, columns, pieces_of(outputs, rows))
            self.count += len(x)

    def add_within(
        self, inputs: Tensor, likelihood: Likelihood, tolerance: float
    ) -> None:
        """Take a batch, leaving out pieces worth at most `tolerance` of its trace."""
        seen = []
        with torch.no_grad():
            for x in torch.split(inputs, self.chunk):
                outputs, taps = self._forward(x)
                seen.append(outputs)
                for name, tap in taps.items():
                    if any(moments.observes for moments in self.moments[name]):
                        columns = self.layers[name].input_columns(tap.inputs)
                        self._observe(name, columns)
        self.count += len(inputs)
        pieces = likelihood.columns(torch.cat(seen))
        for group in groups(pieces, tolerance):
            self._queue(inputs, group)

    def _queue(self, inputs: Tensor, group: Group) -> None:
        """Run a group's examples once there are enough of its kind."""
        waiting = self._waiting.setdefault(group.size, [])
        waiting.append((inputs[group.rows], group.pieces))
        if sum(len(x) for x, _ in waiting) >= min(self.chunk, _QUEUE):
            self._run_waiting(group.size)

    def finish(self) -> None:
        """Run what still waits."""
        for size in list(self._waiting):
            self._run_waiting(size)

    def _run_waiting(self, size: int) -> None:
        waiting = self._waiting.pop(size)
        passes = max(len(pieces) for _, pieces in waiting)
        inputs = torch.cat([x for x, _ in waiting])
        padded = [_padded(pieces, passes) for _, pieces in waiting]
        chunks = torch.split(torch.cat(padded, dim=1), self.chunk, dim=1)
        for x, v in zip(torch.split(inputs, self.chunk), chunks, strict=True):
            outputs, taps = self._forward(x)
            paired = {
                name: tap
                for name, tap in taps.items()
                if any(moments.pairs for moments in self.moments[name])
            }
            self._pull(x, outputs, taps, self._columns(paired), v)

    def _forward(self, inputs: Tensor) -> tuple[Tensor, dict[str, Tap]]:
        outputs, taps = tapped_forward(self.model, inputs, self.layers)
        for name, calls in taps.items():
            if len(calls) != 1:
                raise StructureError(
                    f"layer '{name}' was called {len(calls)} times in one batch and "
                    "once in the first; its calls must not depend on the data"
                )
            if (rows := calls[0].inputs.shape[0]) != len(inputs):
                raise StructureError(
                    f"layer '{name}' was called with {rows} rows for a batch of "
                    f"{len(inputs)}, and with one row an example in the first batch"
                )
        return outputs, {name: calls[0] for name, calls in taps.items()}

    def _columns(self, taps: Mapping[str, Tap]) -> dict[str, Tensor]:
        return {n: self.layers[n].input_columns(tap.inputs) for n, tap in taps.items()}

    def _observe(self, name: str, columns: Tensor) -> None:
        for moments in self.moments[name]:
            if moments.observes:
                moments.observe(columns)

    def _pull(
        self,
        inputs: Tensor,
        outputs: Tensor,
        taps: Mapping[str, Tap],
        columns: Mapping[str, Tensor],
        pieces: Tensor,
    ) -> None:
        """Pull pieces back to every layer's output, and sum."""
        for jacobian in self.jacobians:
            jacobian.add(inputs, pieces)
        if not taps:
            return
        edges = [tap.edge() for tap in taps.values()]
        waiting: dict[str, list[Tensor]] = {}
        for k, piece in enumerate(pieces.to(outputs.dtype), start=1):
            keep = k < len(pieces)
            found = torch.autograd.grad(outputs, edges, piece, retain_graph=keep)
            for name, gradient in zip(taps, found, strict=True):
                g = self.layers[name].output_columns(gradient)
                if g.shape[3] == 1:  # small, and cheaper together
                    waiting.setdefault(name, []).append(g)
                else:
                    self._add(name, columns, [g])
        for name, gradients in waiting.items():
            self._add(name, columns, gradients)

    def _add(
        self, name: str, columns: Mapping[str, Tensor], gradients: list[Tensor]
    ) -> None:
        for moments in self.moments[name]:
            moments.add_gradients(columns.get(name, gradients[0]), gradients)


def _padded(pieces: Tensor, passes: int) -> Tensor:
    missing = pieces.new_zeros(passes - len(pieces), *pieces.shape[1:])
    return torch.cat([pieces, missing])
