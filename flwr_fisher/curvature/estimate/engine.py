"""The engine behind :func:`flwr_fisher.curvature.fisher`: the way of one batch.

A Fisher is a sum of rank-one pieces (:mod:`~flwr_fisher.curvature.estimate.pieces`).
:meth:`Engine.add` runs a batch forward, gets the pieces of its outputs, plans which of
them count, and runs these backward. A backward pass goes only as far as the layers'
outputs (:mod:`~flwr_fisher.curvature.estimate.forms`), where each layer's accumulator
adds up what it needs. K-FAC's input factors are computed once for each example.

Examples of a batch that need different numbers of passes wait for others like them,
across batches. Parameters without a form
(:mod:`~flwr_fisher.curvature.estimate.forms`) need passes of their own, by per-example
gradients.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flwr_fisher.curvature.data import Batch, Inputs, concatenated
from flwr_fisher.curvature.estimate.forms import Tap, tapped_once
from flwr_fisher.curvature.estimate.layers import Positions
from flwr_fisher.curvature.estimate.likelihood import Expectation, check_labels
from flwr_fisher.curvature.estimate.model_sums import Room, make_sums
from flwr_fisher.curvature.estimate.pieces import Group, backward_plan, drawn
from flwr_fisher.curvature.models import device_of
from flwr_fisher.curvature.operators.base import Curvature
from flwr_fisher.params import widened

_QUEUE = 64  # examples that a CPU runs together, where memory allows
_MOST_BUNDLED = 16  # pieces of an example whose gradients are summed at once
_MOST_ENTRIES = 2**20  # entries that the gradients of these pieces have


class _Forward(NamedTuple):
    """A forward pass of some examples, and the call of each layer in it."""

    inputs: Inputs
    outputs: Tensor
    taps: dict[str, Tap]


class _Waiting(NamedTuple):
    """A group's examples, and the shares of each layer's positions that count."""

    inputs: Inputs
    group: Group
    shares: Mapping[str, Tensor]


class Engine:
    """Runs batches through the model, and passes inputs and gradients to the sums.

    Parameters
    ----------
    model : nn.Module
        What to differentiate, in eval mode.
    first : Batch
        The first batch, which is checked, but not added. It shows which form each layer
        has, and how many examples fit in memory.
    structure : str
        The structure of the sums.
    expectation : Expectation
        Makes the pieces of a batch's outputs.
    max_batch_bytes : int | None
        As for :meth:`Room.of`.
    """

    def __init__(
        self,
        model: nn.Module,
        first: Batch,
        structure: str,
        expectation: Expectation,
        max_batch_bytes: int | None,
    ) -> None:
        self.model, self.expectation = model, expectation
        options, seed = expectation.options, expectation.seed
        reduces = options.weight_sharing == "reduce"
        forms, self.sums = make_sums(
            model, first.inputs, structure, options.weight_sharing, max_batch_bytes
        )
        most = None if structure == "diagonal" or reduces else options.max_positions
        self.positions, self.padded = Positions(most, seed), forms.padded
        of_sums = forms, self.sums, self.positions
        self.room = Room.of(model, *of_sums, len(first), max_batch_bytes)
        self.chunk, accumulators = self.room.examples, self.sums.accumulators
        self.layers = {name: each.layer for name, each in accumulators.items()}
        self._tapped = {**self.layers, **self.sums.direct.layers}
        self._on_cpu = device_of(model).type == "cpu"
        self._enough = min(self.chunk, _QUEUE) if self._on_cpu else self.chunk
        # On the CPU, so that a seed draws the same on every device.
        self._generator = torch.Generator().manual_seed(seed)
        self.count = 0
        # By the number of pieces, and the form of the inputs.
        self._queues: dict[Any, list[_Waiting]] = {}

    def add(self, batch: Batch, labels: Any) -> None:
        """Run a batch forward, and back once for each of its pieces that count.

        Parameters
        ----------
        batch : Batch
            On the model's device. Positions with the label -100 are left out. The
            values of the other labels matter only for the empirical Fisher.
        labels : Any
            The batch's labels where they came from, to be checked: on the CPU no
            device is waited for.
        """
        # In parts that fit in memory: the sums do not depend on how they are cut.
        label_mask = self.expectation.label_mask(batch)
        for start in range(0, len(batch), self.chunk):
            rows = slice(start, start + self.chunk)
            part, mask = batch[rows], None if label_mask is None else label_mask[rows]
            run = self._forward(part.inputs)
            if isinstance(labels, Tensor):
                check_labels(self.expectation.likelihood, run.outputs, labels[rows])
            self._add_part(part, run, mask)
            self.count += len(part)

    def result(self) -> Curvature:
        """Run what still waits; return the mean over all examples."""
        for key in list(self._queues):
            self._run_queue(key)
        return self.sums.mean(self.count)

    def _add_part(self, batch: Batch, run: _Forward, label_mask: Tensor | None) -> None:
        """Plan which pieces of some outputs count, and run or queue these."""
        outputs = widened(run.outputs)
        pieces = self.expectation.pieces(outputs, batch, label_mask, self._generator)
        groups = backward_plan(pieces, self.expectation.tolerance)
        # If all examples need about equally many passes, this forward pass serves for
        # the backward passes, too. If not, none runs backward here: each group waits,
        # and has a forward pass of its own. The second is cheaper: `backward_plan`
        # separates groups only where the passes that it saves pay for it.
        columns = self._columns(run) if groups and groups[0].rows is None else {}
        # K-FAC's `A` is of the inputs alone. It needs each example once, with or
        # without pieces.
        active = self._active_positions(run, label_mask)
        self._observe(run, active)
        shares = {name: _share(each) for name, each in active.items()}
        for group in groups:
            if group.rows is None:
                self._backward(run, columns, group.of_passes, len(group.order), shares)
                continue
            of_group = {name: share[group.rows] for name, share in shares.items()}
            self._queue(_Waiting(run.inputs[group.rows], group, of_group))

    def _queue(self, waiting: _Waiting) -> None:
        """Keep a group's examples until there are enough of its size to run."""
        inputs, group, shares = waiting
        # Only examples of one form can be concatenated.
        key = group.size, inputs.form, group.pieces.shape[1:], tuple(shares)
        queue = self._queues.setdefault(key, [])
        queue.append(waiting)
        if sum(len(x) for x, *_ in queue) >= self._enough:
            self._run_queue(key)

    def _run_queue(self, key: Any) -> None:
        """Run the waiting examples of several batches together, forward and back."""
        queue = self._queues.pop(key)
        passes = max(len(group.order) for _, group, _ in queue)
        inputs = concatenated([x for x, *_ in queue])
        shares = {
            name: torch.cat([of_group[name] for *_, of_group in queue])
            for name in queue[0].shares
        }

        # Groups of one queue need up to twice as many passes as each other; a group
        # that has no more pieces gives zeros.
        def pieces_of(rows: slice, start: int, stop: int) -> Tensor:
            parts = [group.of_passes(start, stop) for _, group, _ in queue]
            return torch.cat(parts, 1)[:, rows]

        for start in range(0, len(inputs), self.chunk):
            rows = slice(start, start + self.chunk)
            run = self._forward(inputs[rows])
            of_rows = {name: share[rows] for name, share in shares.items()}
            pieces = partial(pieces_of, rows)
            self._backward(run, self._columns(run), pieces, passes, of_rows)

    def _forward(self, inputs: Inputs) -> _Forward:
        return _Forward(inputs, *tapped_once(self.model, inputs, self._tapped))

    def _columns(self, run: _Forward) -> dict[str, Tensor]:
        """Return the input columns that accumulators pair with gradients."""
        return {
            name: layer.input_columns(run.taps[name].inputs)
            for name, layer in self.layers.items()
            if self.sums.accumulators[name].takes_inputs
        }

    def _active_positions(
        self, run: _Forward, label_mask: Tensor | None
    ) -> dict[str, Tensor]:
        """Return which positions of each layer have a gradient, ``[n, T]``.

        Positions that are padding, or that no output with a label depends on, have a
        gradient of 0, and are left out of K-FAC's factors, as if they were not there.
        It costs a backward pass, and is taken where the first batch, labels, or a
        transformers model's mask say that there may be such.
        """
        inputs, outputs, taps = run
        layers = [
            name
            for name, layer in self.layers.items()
            if self.sums.accumulators[name].observes
            and math.prod(layer.positions(taps[name].inputs.shape)) > 1
        ]
        padded = self.padded or inputs.is_padded
        if not layers or (label_mask is None and not padded):
            return {}
        # A random direction of the outputs: a position that has no gradient for it has
        # none for any other.
        generator = torch.Generator().manual_seed(0)
        direction = drawn(Tensor.normal_, outputs, generator)
        if label_mask is not None and label_mask.shape == outputs.shape[:-1]:
            direction = direction * label_mask.unsqueeze(-1)
        edges = [taps[name].edge() for name in layers]
        gradients = torch.autograd.grad(outputs, edges, direction, retain_graph=True)
        return {
            name: self.layers[name].output_columns(gradient).ne(0).flatten(1, 2).any(1)
            for name, gradient in zip(layers, gradients, strict=True)
        }

    def _observe(self, run: _Forward, active: Mapping[str, Tensor]) -> None:
        """Give every example's input columns to the accumulators that need them."""
        for name, layer in self.layers.items():
            accumulator = self.sums.accumulators[name]
            if not accumulator.observes:
                continue
            inputs = run.taps[name].inputs
            sizes = layer.positions(inputs.shape)
            grid, weight = self.positions.of_inputs(sizes)
            observed = layer.input_columns(inputs, grid)
            share = None
            if name in active:
                on_grid = active[name].reshape(-1, *sizes)[:, *grid].flatten(1)
                observed = observed * on_grid[:, None, None]
                share = _share(active[name])
            with _full_precision(observed):
                accumulator.observe(observed, weight, share)

    def _backward(
        self,
        run: _Forward,
        columns: Mapping[str, Tensor],
        pieces: Callable[[int, int], Tensor],
        passes: int,
        shares: Mapping[str, Tensor],
    ) -> None:
        """Run pieces backward to every layer's output, and add up there.

        `pieces` returns those from one pass to another, ``[passes, n, *outputs]``.
        """
        inputs, outputs, taps = run
        # The pass ends at the layers' outputs: the gradients of weights, which
        # autograd would sum over the batch, are never formed.
        edges = [tap.edge() for tap in taps.values()]
        sizes = {n: x.positions(taps[n].inputs.shape) for n, x in self.layers.items()}
        prepared = {
            name: layer.prepared(taps[name].inputs)
            for name, layer in self.sums.direct.layers.items()
        }
        weights: dict[str, float] = {}  # of a layer's gradient columns

        def add(name: str, gradients: list[Tensor]) -> None:
            """Give a layer's gradients, one tensor a pass, to its accumulator."""
            accumulator = self.sums.accumulators[name]
            if accumulator.takes_inputs:
                accumulator.add_pairs(columns[name], gradients)
            else:
                accumulator.add_gradients(gradients, weights[name], shares.get(name))

        size = self._bundle_size(outputs, sizes)
        for start in range(0, passes, size):
            stop = min(start + size, passes)
            bundle = pieces(start, stop)
            # Those of several pieces are added together, which takes fewer and larger
            # operations: of layers with one position, whose gradients are small, and on
            # a device other than the CPU of all layers that take no inputs.
            bundled: dict[str, list[Tensor]] = {}
            for number, piece in enumerate(bundle if taps else (), start + 1):
                at_layers = torch.autograd.grad(
                    outputs,
                    edges,
                    piece.to(outputs.dtype),
                    retain_graph=number < passes,
                    allow_unused=True,
                )
                found = zip(taps, at_layers, strict=True)
                used = {k: v for k, v in found if v is not None}  # by some example
                # What a layer's type needs decides its way: norms and embeddings square
                # each example's gradient; a grouped convolution takes whole calls; all
                # others take columns.
                direct = {name: used.pop(name) for name in prepared if name in used}
                with _full_precision(outputs):
                    self.sums.direct.add(prepared, direct)
                    for name, gradient in used.items():
                        layer, grid = self.layers[name], None
                        accumulator = self.sums.accumulators[name]
                        if accumulator.takes_calls:
                            accumulator.add_call(taps[name].inputs, gradient)
                            continue
                        # One that pairs gradients with inputs needs all positions. For
                        # another one those of a grid are enough.
                        if not accumulator.takes_inputs:
                            grid, weight = self.positions.of_gradients(sizes[name])
                            weights[name] = weight / math.prod(sizes[name])
                        g = layer.output_columns(gradient, grid)
                        if self._on_cpu and math.prod(sizes[name]) > 1:
                            add(name, [g])
                        else:
                            bundled.setdefault(name, []).append(g)
            with _full_precision(outputs):
                for name, gradients in bundled.items():
                    add(name, gradients)
            # What has no form takes each example's gradient, with passes of its own.
            if self.sums.others is not None:
                self.sums.others.add(inputs, bundle)

    def _bundle_size(self, outputs: Tensor, sizes: Mapping[str, list[int]]) -> int:
        """Return for how many passes some examples' gradients fit in memory."""
        n, entries = len(outputs), outputs.numel()
        if self._on_cpu:
            single = [x for k, x in self.layers.items() if math.prod(sizes[k]) == 1]
            entries += n * sum(len(x.kernel) for x in single)
        most = max(1, _MOST_ENTRIES // max(entries, 1))
        if not self._on_cpu:
            most = min(most, self.room.passes(n))
        return min(_MOST_BUNDLED, most)


def _share(active: Tensor) -> Tensor:
    """Return the share of each example's positions that count, ``[n]``."""
    counts = active.sum(1)
    return torch.where(counts > 0, counts / active.shape[1], 1.0)


def _full_precision(columns: Tensor) -> torch.autocast:
    """Leave the caller's autocast, which would multiply in half precision."""
    return torch.autocast(columns.device.type, enabled=False)
