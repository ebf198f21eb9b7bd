"""The engine behind :func:`flwr_fisher.curvature.fisher`.

A Fisher is a sum of rank-one pieces, which the likelihood computes from a model's
outputs. Each piece costs a backward pass. It goes only as far as the layers' outputs:
gradients of weights are never formed for a whole batch. One pass serves all structures,
and K-FAC's input factors are computed once for each example. ``add_within`` is the
usual way in. It calls back for a batch's pieces, drops those that its tolerance allows,
and runs examples with about equally many pieces together, across batches.

All other parameters get their exact diagonal from per-example gradients. For norms,
embeddings and shared parameters these come from the same pass. Other parameters need
passes of their own, and so does a layer that is not called exactly once, with one row
for each example, through its own ``forward``.

Long: the way of one batch, for whatever sums.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from flwr_fisher.curvature.batch import Inputs, concatenated
from flwr_fisher.curvature.estimate.accumulators import LayerAccumulator
from flwr_fisher.curvature.estimate.direct_layers import SquaredGradients
from flwr_fisher.curvature.estimate.jacobians import JacobianAccumulator
from flwr_fisher.curvature.estimate.pieces import Group, Pieces, backward_plan
from flwr_fisher.curvature.estimate.positions import Positions
from flwr_fisher.curvature.estimate.taps import Tap, single_calls, tapped_forward
from flwr_fisher.curvature.sums import widened
from flwr_fisher.errors import DataError

# Yields pieces, each of the outputs' shape, of outputs and their rows in the batch.
PiecesOf = Callable[[Tensor, slice], Iterable[Tensor]]
MakePieces = Callable[[Tensor, slice], Pieces]

_SLOW = 3  # passes that a piece takes where each example's gradient is taken
_QUEUE = 64  # examples that are run together, where memory allows
_MOST_BUNDLED = 16  # pieces of an example whose gradients are summed at once, and how
_MOST_ENTRIES = 2**20  # many entries these may have


class Engine:
    """Runs batches through the model, and gives the accumulators what they sum.

    Parameters
    ----------
    model : nn.Module
        What to differentiate, in eval mode.
    accumulators : Mapping[str, list[LayerAccumulator]]
        The sums to take for each layer with a Kronecker form.
    direct : Mapping[str, SquaredGradients]
        The sums to take for each norm, embedding and shared parameter.
    jacobians : list[JacobianAccumulator]
        The sums to take for other parameters.
    positions : Positions
        Which positions of a layer count, if it has several.
    chunk : int
        The largest number of examples at once.
    spread : bool, default False
        As for :func:`~flwr_fisher.curvature.estimate.taps.tapped_forward`.
    """

    def __init__(
        self,
        model: nn.Module,
        accumulators: Mapping[str, list[LayerAccumulator]],
        direct: Mapping[str, SquaredGradients],
        jacobians: list[JacobianAccumulator],
        positions: Positions,
        chunk: int,
        spread: bool = False,
    ) -> None:
        self.model, self.positions, self.chunk = model, positions, chunk
        self.spread = spread
        self.accumulators, self.jacobians = accumulators, jacobians
        self.layers = {name: each[0].layer for name, each in accumulators.items()}
        self.direct = direct
        self._tapped = self.layers | {n: sums.layer for n, sums in direct.items()}
        self.count = 0
        self._passes = 0
        # Of every example, whether its outputs and its inputs are finite.
        self._outputs: list[Tensor] = []
        self._inputs: list[Tensor] = []
        # By the number of pieces, and by what may stand in one batch.
        self._waiting: dict[Any, list[tuple[Inputs, Group, Mapping[str, Tensor]]]] = {}

    @property
    def passes(self) -> int:
        """How many forward and backward passes the examples took or will take."""
        waiting = chain.from_iterable(self._waiting.values())
        return self._passes + sum(
            (1 + self.cost * len(group.order)) * len(x) for x, group, _ in waiting
        )

    @property
    def cost(self) -> int:
        """How many passes a piece takes; more if it needs per-example gradients."""
        return _SLOW if self.jacobians else 1

    def add(
        self, inputs: Inputs, pieces_of: PiecesOf, label_mask: Tensor | None = None
    ) -> None:
        """Run a batch forward, and back once for each of its pieces.

        Parameters
        ----------
        inputs : Inputs
            The examples.
        pieces_of : PiecesOf
            Yields the pieces of some examples' outputs, as tensors.
        label_mask : Tensor, optional
            Booleans ``[n, ...]``: which positions of the outputs have a label. Default:
            all.
        """
        for start in range(0, len(inputs), self.chunk):
            rows = slice(start, start + self.chunk)
            x = inputs[rows]
            outputs, taps = self._forward(x)
            self._note_finite(x, outputs)
            columns = self._columns(taps)
            reached = self._reached(x, outputs, taps, label_mask, rows)
            self._observe(taps, columns, reached)
            pieces = pieces_of(widened(outputs), rows)
            self._backward(x, outputs, taps, columns, pieces, _shares(reached))
            self.count += len(x)

    def add_within(
        self,
        inputs: Inputs,
        make_pieces: MakePieces,
        tolerance: float,
        label_mask: Tensor | None = None,
    ) -> None:
        """Run a batch; drop pieces that are at most `tolerance` of its trace in all.

        Parameters
        ----------
        inputs : Inputs
            The examples.
        make_pieces : MakePieces
            Makes a :class:`Pieces` from outputs and their rows in the batch. Its
            tensors are made when they are needed.
        tolerance : float
            In [0, 1].
        label_mask : Tensor, optional
            As for :meth:`add`.
        """
        for start in range(0, len(inputs), self.chunk):
            rows = slice(start, start + self.chunk)
            x = inputs[rows]
            groups, shares = self._run_or_plan(
                x, make_pieces, rows, tolerance, label_mask
            )
            for group in groups:
                own = {name: each[group.rows] for name, each in shares.items()}
                self._queue(x[group.rows], group, own)
            self.count += len(x)

    def _run_or_plan(
        self,
        inputs: Inputs,
        make_pieces: MakePieces,
        rows: slice,
        tolerance: float,
        label_mask: Tensor | None,
    ) -> tuple[list[Group], dict[str, Tensor]]:
        """Run examples forward; return their groups, or run a single group backward.

        Else return the groups to run later, from a forward pass of their own, with each
        layer's :func:`_shares`.
        """
        outputs, taps = self._forward(inputs)
        self._note_finite(inputs, outputs)
        groups = backward_plan(make_pieces(widened(outputs), rows), tolerance)
        whole = [group for group in groups if len(group.rows) == len(inputs)]
        columns = self._columns(taps) if whole else {}
        reached = self._reached(inputs, outputs, taps, label_mask, rows)
        self._observe(taps, columns, reached)
        shares = _shares(reached)
        if not whole:
            return groups, shares
        self._backward(inputs, outputs, taps, columns, whole[0].all(), shares)
        return [], {}

    def _queue(
        self, inputs: Inputs, group: Group, shares: Mapping[str, Tensor]
    ) -> None:
        """Keep a group's examples until there are enough of its size to run."""
        key = group.size, inputs.form, group.pieces.shape[1:], tuple(shares)
        waiting = self._waiting.setdefault(key, [])
        waiting.append((inputs, group, shares))
        if sum(len(x) for x, *_ in waiting) >= min(self.chunk, _QUEUE):
            self._run_waiting(key)

    def check_finite(self) -> None:
        """Raise :class:`DataError` if an example's outputs were not finite."""
        if (example := _first_not_finite(self._outputs)) is not None:
            raise DataError(
                f"the model's outputs of example {example} (counted from 0) hold NaN "
                "or infinity, so the Fisher is not defined: check that example's "
                "inputs and the model's parameters"
            )

    def not_finite(self, what: str) -> DataError:
        """Return an error for a Fisher that is not finite although the outputs are."""
        example = _first_not_finite(self._inputs)
        where = "" if example is None else f"; so are the inputs of example {example}"
        return DataError(
            f"the Fisher of '{what}' is not finite{where}: check the inputs, their "
            "scale, and the model's dtype"
        )

    def finish(self) -> None:
        """Run the groups that still wait."""
        for key in list(self._waiting):
            self._run_waiting(key)

    def _run_waiting(self, key: Any) -> None:
        waiting = self._waiting.pop(key)
        passes = max(len(group.order) for _, group, _ in waiting)
        inputs = concatenated([x for x, *_ in waiting])
        shares = {
            name: torch.cat([each[name] for *_, each in waiting])
            for name in waiting[0][2]
        }

        def pieces_of(rows: slice) -> Iterator[Tensor]:
            for index in range(passes):
                every = torch.cat([group.piece(index) for _, group, _ in waiting])
                yield every[rows]

        for start in range(0, len(inputs), self.chunk):
            rows = slice(start, start + self.chunk)
            x = inputs[rows]
            outputs, taps = self._forward(x)
            columns = self._columns(taps)
            own = {name: each[rows] for name, each in shares.items()}
            self._backward(x, outputs, taps, columns, pieces_of(rows), own)

    def _forward(self, inputs: Inputs) -> tuple[Tensor, dict[str, Tap]]:
        self._passes += len(inputs)
        outputs, taps = tapped_forward(
            self.model, inputs, self._tapped, spread=self.spread
        )
        return outputs, single_calls(taps, len(inputs))

    def _note_finite(self, inputs: Inputs, outputs: Tensor) -> None:
        """Note which rows are finite, without waiting for the device."""
        self._outputs.append(_finite_rows([outputs.detach()], len(inputs)))
        self._inputs.append(_finite_rows(inputs.tensors, len(inputs)))

    def _columns(self, taps: Mapping[str, Tap]) -> dict[str, Tensor]:
        """Return the input columns that accumulators pair with gradients."""
        return {
            name: layer.input_columns(taps[name].inputs)
            for name, layer in self.layers.items()
            if any(a.takes_inputs for a in self.accumulators[name])
        }

    def _reached(
        self,
        inputs: Inputs,
        outputs: Tensor,
        taps: Mapping[str, Tap],
        label_mask: Tensor | None,
        rows: slice,
    ) -> dict[str, Tensor]:
        """Return which positions of each layer have a gradient, ``[n, T]``.

        Positions that are padding, or that no output with a label depends on, have a
        gradient of 0, and are left out of K-FAC's factors, as if they were not there.
        It costs a backward pass, and is taken where labels, or a transformers model's
        mask, say that there may be such.
        """
        layers = [
            name
            for name, layer in self.layers.items()
            if any(a.observes for a in self.accumulators[name])
            and math.prod(layer.positions(taps[name].inputs.shape)) > 1
        ]
        if not layers or (label_mask is None and not inputs.is_padded):
            return {}
        generator = torch.Generator(outputs.device).manual_seed(0)
        size, device = outputs.shape, outputs.device
        direction = torch.randn(size, generator=generator, device=device).to(outputs)
        if label_mask is not None and label_mask[rows].shape == outputs.shape[:-1]:
            direction = direction * label_mask[rows].unsqueeze(-1)
        edges = [taps[name].edge() for name in layers]
        gradients = torch.autograd.grad(outputs, edges, direction, retain_graph=True)
        return {
            name: self.layers[name].output_columns(gradient).ne(0).flatten(1, 2).any(1)
            for name, gradient in zip(layers, gradients, strict=True)
        }

    def _observe(
        self,
        taps: Mapping[str, Tap],
        columns: Mapping[str, Tensor],
        reached: Mapping[str, Tensor],
    ) -> None:
        """Give every example's input columns to the accumulators that need them.

        `columns` are those of all positions, of layers where they are known.
        """
        for name, layer in self.layers.items():
            observers = [a for a in self.accumulators[name] if a.observes]
            if not observers:
                continue
            tap = taps[name]
            sizes = layer.positions(tap.inputs.shape)
            grid, weight = self.positions.of_inputs(sizes)
            if weight == 1 and name in columns:
                shown = columns[name]
            else:
                shown = layer.input_columns(tap.inputs, grid)
            share = None
            if name in reached:
                here = reached[name].reshape(-1, *sizes)[:, *grid].flatten(1)
                shown = shown * here[:, None, None]
                share = _share(reached[name])
            with _full_precision(shown):
                for accumulator in observers:
                    accumulator.observe(shown, weight, share)

    def _backward(
        self,
        inputs: Inputs,
        outputs: Tensor,
        taps: Mapping[str, Tap],
        columns: Mapping[str, Tensor],
        pieces: Iterable[Tensor],
        shares: Mapping[str, Tensor],
    ) -> None:
        """Run pieces backward to every layer's output, and add up there."""
        edges = [tap.edge() for tap in taps.values()]
        sizes = {n: x.positions(taps[n].inputs.shape) for n, x in self.layers.items()}
        prepared = {
            n: sums.layer.prepared(taps[n].inputs) for n, sums in self.direct.items()
        }
        for some, last in _in_bundles(pieces, self._bundle_size(len(inputs), sizes)):
            self._passes += self.cost * len(some) * len(inputs)
            waiting: dict[str, list[Tensor]] = {}
            for k, piece in enumerate(some if taps else (), start=1):
                keep = not (last and k == len(some))
                v = piece.to(outputs.dtype)
                at_layers = torch.autograd.grad(outputs, edges, v, retain_graph=keep)
                for name, gradient in zip(taps, at_layers, strict=True):
                    if name in prepared:
                        with _full_precision(gradient):
                            self.direct[name].add(prepared[name], gradient)
                        continue
                    for taker in self.accumulators[name]:
                        if taker.takes_calls:
                            with _full_precision(gradient):
                                taker.add_call(taps[name].inputs, gradient)
                    if math.prod(sizes[name]) == 1:  # small, and cheaper together
                        waiting.setdefault(name, []).append(gradient)
                    else:
                        each = shares.get(name)
                        self._add(name, columns, [gradient], sizes[name], each)
            for name, gradients in waiting.items():
                self._add(name, columns, gradients, sizes[name])
            # In the end, for a forward that changes weights in place.
            for jacobian in self.jacobians:
                jacobian.add(inputs, torch.stack(some))

    def _bundle_size(self, count: int, sizes: Mapping[str, list[int]]) -> int:
        """Return for how many passes `count` examples' gradients fit in memory."""
        single = [x for n, x in self.layers.items() if math.prod(sizes[n]) == 1]
        outputs = sum(layer.matrices().shape[:2].numel() for layer in single)
        return max(1, min(_MOST_BUNDLED, _MOST_ENTRIES // max(count * outputs, 1)))

    def _add(
        self,
        name: str,
        columns: Mapping[str, Tensor],
        gradients: list[Tensor],
        sizes: list[int],
        share: Tensor | None = None,
    ) -> None:
        layer, every = self.layers[name], math.prod(sizes)
        grid, weight = self.positions.of_gradients(sizes)
        with _full_precision(gradients[0]):
            for paired in (True, False):
                takers = [
                    a
                    for a in self.accumulators[name]
                    if a.takes_inputs == paired and not a.takes_calls
                ]
                if not takers:
                    continue
                chosen = None if paired else grid
                g = [layer.output_columns(each, chosen) for each in gradients]
                for taker in takers:
                    if paired:
                        taker.add_pairs(columns[name], g)
                    else:
                        taker.add_gradients(g, weight / every, share)


def _finite_rows(tensors: Sequence[Tensor], count: int) -> Tensor:
    rows = [tensor.isfinite().reshape(count, -1).all(1) for tensor in tensors]
    return torch.stack(rows).all(0)


def _first_not_finite(finite: Sequence[Tensor]) -> int | None:
    """Return the first row that is not finite, among all noted rows."""
    wrong = ~torch.cat(list(finite))
    return int(wrong.nonzero()[0]) if wrong.any() else None


def _shares(reached: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _share(each) for name, each in reached.items()}


def _share(reached: Tensor) -> Tensor:
    """Return the share of each example's positions that count, ``[n]``."""
    counts = reached.sum(1)
    return torch.where(counts > 0, counts / reached.shape[1], 1.0)


def _full_precision(columns: Tensor) -> torch.autocast:
    """Leave the caller's autocast, which would multiply in half precision."""
    return torch.autocast(columns.device.type, enabled=False)


def _in_bundles(
    pieces: Iterable[Tensor], size: int
) -> Iterator[tuple[list[Tensor], bool]]:
    """Yield pieces, `size` at a time, and whether they are the last."""
    rest = iter(pieces)
    bundle = list(islice(rest, size))
    while bundle:
        following = list(islice(rest, size))
        yield bundle, not following
        bundle = following
