"""The engine behind :func:`flwr_fisher.curvature.fisher`: the way of one batch.

A Fisher is a sum of rank-one pieces. ``add`` runs a batch forward, gets the pieces of
its outputs, plans which of them count, and runs these backward. A backward pass goes
only as far as the layers' outputs: gradients of weights are never formed for a whole
batch. One pass serves all structures, and K-FAC's input factors are computed once for
each example. Examples of a batch that need different numbers of passes wait for others
like them, across batches.

All other parameters get their exact diagonal from per-example gradients. For norms,
embeddings and shared parameters these come from the same pass. Other parameters need
passes of their own, and so does a layer that is not called exactly once, with one row
for each example, through its own ``forward``.

Long: the way of one batch, for whatever sums.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flwr_fisher.curvature.batch import Batch, Inputs, concatenated
from flwr_fisher.curvature.estimate.expectation import Expectation
from flwr_fisher.curvature.estimate.model_sums import ModelSums, not_finite
from flwr_fisher.curvature.estimate.pieces import Group, backward_plan
from flwr_fisher.curvature.estimate.positions import Positions
from flwr_fisher.curvature.estimate.taps import Tap, tapped_once
from flwr_fisher.curvature.models import device_of
from flwr_fisher.curvature.operators.base import Curvature
from flwr_fisher.curvature.sums import widened
from flwr_fisher.errors import DataError

_SLOW = 3  # a piece's cost in passes, if it takes each example's gradient
_QUEUE = 64  # examples that a CPU runs together, where memory allows
_MOST_BUNDLED = 16  # pieces of an example whose gradients are summed at once
_MOST_ENTRIES = 2**20  # entries that the gradients of these pieces have


class _Forward(NamedTuple):
    """A forward pass of some examples, and the call of each layer in it."""

    inputs: Inputs
    outputs: Tensor
    taps: dict[str, Tap]


class _Later(NamedTuple):
    """A group's examples, and the shares of each layer's positions that count."""

    inputs: Inputs
    group: Group
    shares: Mapping[str, Tensor]


class Engine:
    """Runs batches through the model, and gives the sums what they add up.

    Parameters
    ----------
    model : nn.Module
        What to differentiate, in eval mode.
    sums : ModelSums
        The sums to take.
    expectation : Expectation
        Makes the pieces of a batch's outputs.
    positions : Positions
        Which positions of a layer count, if it has several.
    chunk : int
        The largest number of examples at once.
    spread : bool
        As for :func:`~flwr_fisher.curvature.estimate.taps.tapped_forward`.
    """

    def __init__(
        self,
        model: nn.Module,
        sums: ModelSums,
        expectation: Expectation,
        positions: Positions,
        chunk: int,
        spread: bool,
    ) -> None:
        self.model, self.sums, self.expectation = model, sums, expectation
        self.positions, self.chunk, self.spread = positions, chunk, spread
        self.accumulators = {n: [*x.values()] for n, x in sums.accumulators.items()}
        self.layers = {name: each[0].layer for name, each in self.accumulators.items()}
        self._tapped = self.layers | {n: x.layer for n, x in sums.direct.items()}
        device = device_of(model, None)
        self._enough = min(chunk, _QUEUE) if device.type == "cpu" else chunk
        self._generator = torch.Generator(device)
        self._generator.manual_seed(expectation.seed)
        self.count, self._passes = 0, 0
        # Whether each example's outputs, and its inputs, are finite. They are read
        # late, so that a device is not waited for.
        self._outputs: list[Tensor] = []
        self._inputs: list[Tensor] = []
        # By the number of pieces, and the form of the inputs.
        self._waiting: dict[Any, list[_Later]] = {}

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
        return _SLOW if self.sums.jacobians else 1

    def add(self, batch: Batch) -> None:
        """Run a batch forward, and back once for each of its pieces that count.

        Parameters
        ----------
        batch : Batch
            On the model's device. Positions with the label -100 are left out. The
            values of the other labels matter only for the empirical Fisher.
        """
        label_mask = self.expectation.label_mask(batch)
        for start in range(0, len(batch), self.chunk):
            rows = slice(start, start + self.chunk)
            some, mask = batch[rows], None if label_mask is None else label_mask[rows]
            for later in self._run(some, mask):
                self._queue(later)
            self.count += len(some)

    def _run(self, batch: Batch, label_mask: Tensor | None) -> list[_Later]:
        """Run examples forward, plan which pieces count, and run these backward.

        If the examples need unlike numbers of passes, none runs backward here: return
        the groups to run later, from a forward pass of their own.
        """
        run = self._forward(batch.inputs)
        self._outputs.append(_finite_rows([run.outputs.detach()], len(batch)))
        self._inputs.append(_finite_rows(batch.inputs.tensors, len(batch)))
        if self.expectation.kind == "sampled":
            self.check_finite()  # drawing from NaN ends a process with a GPU
        groups = backward_plan(
            self.expectation.pieces(
                widened(run.outputs), batch, label_mask, self._generator
            ),
            self.expectation.tolerance,
        )
        whole = [group for group in groups if len(group.rows) == len(batch)]
        columns = self._columns(run) if whole else {}
        reached = self._reached(run, label_mask)
        self._observe(run, columns, reached)
        shares = {name: _share(each) for name, each in reached.items()}
        if whole:
            self._backward(run, columns, whole[0].all(), shares)
            return []
        return [
            _Later(run.inputs[g.rows], g, {n: x[g.rows] for n, x in shares.items()})
            for g in groups
        ]

    def _queue(self, later: _Later) -> None:
        """Keep a group's examples until there are enough of its size to run."""
        inputs, group, shares = later
        key = group.size, inputs.form, group.pieces.shape[1:], tuple(shares)
        waiting = self._waiting.setdefault(key, [])
        waiting.append(later)
        if sum(len(x) for x, *_ in waiting) >= self._enough:
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
            run = self._forward(inputs[rows])
            own = {name: each[rows] for name, each in shares.items()}
            self._backward(run, self._columns(run), pieces_of(rows), own)

    def results(self, structures: Sequence[str]) -> dict[str, Curvature]:
        """Run what still waits; return each structure's mean over all examples."""
        for key in list(self._waiting):
            self._run_waiting(key)
        self.check_finite()
        results = {name: self.sums.mean(name, self.count) for name in structures}
        for curvature in results.values():
            if (name := not_finite(curvature)) is not None:
                raise self._not_finite(name)
        return results

    def check_finite(self) -> None:
        """Raise :class:`DataError` if an example's outputs were not finite."""
        if (example := _first_not_finite(self._outputs)) is not None:
            raise DataError(
                f"the model's outputs of example {example} (counted from 0) hold NaN "
                "or infinity, so the Fisher is not defined: check that example's "
                "inputs and the model's parameters"
            )

    def _not_finite(self, what: str) -> DataError:
        """Return an error for a Fisher that is not finite although the outputs are."""
        example = _first_not_finite(self._inputs)
        where = "" if example is None else f"; so are the inputs of example {example}"
        return DataError(
            f"the Fisher of '{what}' is not finite{where}: check the inputs, their "
            "scale, and the model's dtype"
        )

    def _forward(self, inputs: Inputs) -> _Forward:
        self._passes += len(inputs)
        outputs, taps = tapped_once(
            self.model, inputs, self._tapped, spread=self.spread
        )
        return _Forward(inputs, outputs, taps)

    def _columns(self, run: _Forward) -> dict[str, Tensor]:
        """Return the input columns that accumulators pair with gradients."""
        return {
            name: layer.input_columns(run.taps[name].inputs)
            for name, layer in self.layers.items()
            if any(a.takes_inputs for a in self.accumulators[name])
        }

    def _reached(self, run: _Forward, label_mask: Tensor | None) -> dict[str, Tensor]:
        """Return which positions of each layer have a gradient, ``[n, T]``.

        Positions that are padding, or that no output with a label depends on, have a
        gradient of 0, and are left out of K-FAC's factors, as if they were not there.
        It costs a backward pass, and is taken where labels, or a transformers model's
        mask, say that there may be such.
        """
        inputs, outputs, taps = run
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
        if label_mask is not None and label_mask.shape == outputs.shape[:-1]:
            direction = direction * label_mask.unsqueeze(-1)
        edges = [taps[name].edge() for name in layers]
        gradients = torch.autograd.grad(outputs, edges, direction, retain_graph=True)
        return {
            name: self.layers[name].output_columns(gradient).ne(0).flatten(1, 2).any(1)
            for name, gradient in zip(layers, gradients, strict=True)
        }

    def _observe(
        self,
        run: _Forward,
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
            inputs = run.taps[name].inputs
            sizes = layer.positions(inputs.shape)
            grid, weight = self.positions.of_inputs(sizes)
            if weight == 1 and name in columns:
                shown = columns[name]
            else:
                shown = layer.input_columns(inputs, grid)
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
        run: _Forward,
        columns: Mapping[str, Tensor],
        pieces: Iterable[Tensor],
        shares: Mapping[str, Tensor],
    ) -> None:
        """Run pieces backward to every layer's output, and add up there."""
        inputs, outputs, taps = run
        edges = [tap.edge() for tap in taps.values()]
        sizes = {n: x.positions(taps[n].inputs.shape) for n, x in self.layers.items()}
        direct = self.sums.direct
        prepared = {n: x.layer.prepared(taps[n].inputs) for n, x in direct.items()}
        for some, last in _in_bundles(pieces, self._bundle_size(len(inputs), sizes)):
            self._passes += self.cost * len(some) * len(inputs)
            waiting: dict[str, list[Tensor]] = {}
            for k, piece in enumerate(some if taps else (), start=1):
                keep = not (last and k == len(some))
                v = piece.to(outputs.dtype)
                at_layers = torch.autograd.grad(
                    outputs, edges, v, retain_graph=keep, allow_unused=True
                )
                for name, gradient in zip(taps, at_layers, strict=True):
                    if gradient is None:  # no example of this batch uses the layer
                        continue
                    if name in prepared:
                        with _full_precision(gradient):
                            direct[name].add(prepared[name], gradient)
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
            # Last, because the model's forward may change weights in place.
            for jacobian in self.sums.jacobians.values():
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
