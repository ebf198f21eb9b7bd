"""Sums over examples of second moments of one layer's inputs and gradients."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from flwr_fisher.curvature.estimate.layers import ConvolutionLayer, KroneckerLayer
from flwr_fisher.curvature.operators.base import Curvature, Diagonal
from flwr_fisher.curvature.operators.kronecker import Kronecker

Columns = Sequence[Tensor]  # some examples' columns, one tensor a backward pass
Share = Tensor | None  # [n], the share of positions that count; None: all count

# With far fewer rows in a block, half of a matrix takes as long as all of it: on a CPU;
# on another device, where each product costs a launch.
_BLOCK, _BLOCK_ELSEWHERE = 128, 1024
_MOST = 16  # blocks of rows


class SecondMoment:
    r"""Second moments :math:`\sum_k w_k x_k x_k^\top`, one matrix for each group.

    In each block of rows, only the diagonal block and the entries to the right of it
    are computed. The other entries are copied from their mirror images at the end. For
    large matrices this is little more than half of the work.

    Parameters
    ----------
    groups, size : int
        The sizes of the matrices, ``[groups, size, size]``.
    like : Tensor
        Gives dtype and device.
    """

    def __init__(self, groups: int, size: int, like: Tensor) -> None:
        self.total = like.new_zeros(groups, size, size)
        least = _BLOCK if like.device.type == "cpu" else _BLOCK_ELSEWHERE
        self.block = -(-size // min(_MOST, max(1, round(size / least))))

    def add(self, columns: Tensor, weight: float = 1.0) -> None:
        """Add the columns' outer products, of ``[groups, size, count]``, weighted."""
        for start in range(0, columns.shape[1], self.block):
            rows = columns[:, start : start + self.block]
            part = self.total[:, start : start + self.block, start:]
            # In place, so that autocast leaves its dtype alone.
            part.baddbmm_(rows, columns[:, start:].mT, alpha=weight)

    def result(self) -> Tensor:
        """Return the matrices, completed in place."""
        for end in range(self.block, self.total.shape[1], self.block):
            rows = slice(end - self.block, end)
            self.total[:, end:, rows] = self.total[:, rows, end:].mT
        return self.total


_AT_ONCE = 2**22  # entries of examples' gradients: 16 MiB in float32
_CACHED = 2**19  # entries that stay in a processor's cache
_LARGE = 2**14  # entries of one example, from which a CPU takes one at a time


class LayerAccumulator(ABC):
    """Base class: what one structure sums of a layer's inputs and output gradients."""

    observes = False  # whether `observe` wants every example's input columns
    # Whether it takes pairs of inputs and gradients, at all positions (`add_pairs`). If
    # not, the gradients and the columns for `observe` may be of only a few positions.
    takes_inputs = True
    takes_calls = False  # whether `add_call` replaces the other methods

    def __init__(self, layer: KroneckerLayer) -> None:
        self.layer = layer

    @property
    def totals(self) -> list[Tensor]:
        """The sums, each as one tensor."""
        held = vars(self).values()
        tensors = [v.total if isinstance(v, SecondMoment) else v for v in held]
        return [each for each in tensors if isinstance(each, Tensor)]

    def observe(self, columns: Tensor, weight: float, share: Share) -> None:
        """Add every example's input columns ``[n, groups, in, T]``, once each.

        Each column stands for `weight` columns. `share` ``[n]`` is the share of an
        example's positions that count; the columns of all other positions are 0.
        """
        raise AssertionError("only accumulators that observe are shown inputs")

    def add_gradients(self, gradients: Columns, weight: float, share: Share) -> None:
        """Add some examples' gradient columns, one tensor for each backward pass.

        Each column counts `weight` times in a mean over positions; `share` is the share
        of the positions that count.
        """
        raise AssertionError("only accumulators without inputs get gradients alone")

    def add_pairs(self, inputs: Tensor, gradients: Columns) -> None:
        """Add some examples' gradient columns, beside the same examples' inputs'."""
        raise AssertionError("only accumulators that take inputs get pairs")

    def add_call(self, inputs: Tensor, output: Tensor) -> None:
        """Add some examples' layer inputs, with the gradients of the layer's output."""
        raise AssertionError("only accumulators that take calls are given them")

    @abstractmethod
    def result(self) -> Curvature:
        """Return `totals` as a curvature; these are used up."""


class KroneckerAccumulator(LayerAccumulator):
    """K-FAC's factors, with `A` summed over positions and `G` averaged (expand)."""

    observes, takes_inputs = True, False

    def __init__(self, layer: KroneckerLayer) -> None:
        super().__init__(layer)
        groups, outputs, inputs = layer.shape
        like = layer.kernel.new_empty(0, dtype=layer.dtype)
        self.A = SecondMoment(groups, inputs, like)
        self.G = SecondMoment(groups, outputs, like)

    def observe(self, columns: Tensor, weight: float, share: Share) -> None:
        """Add the inputs' second moment."""
        self.A.add(side_by_side(columns), weight)

    def add_gradients(self, gradients: Columns, weight: float, share: Share) -> None:
        """Add the gradients' second moment."""
        if gradients[0].shape[3] == 1:
            self.G.add(side_by_side(_joined(gradients, 0)), weight)
            return
        if share is not None:
            shares = share.to(gradients[0])[:, None, None, None]
            gradients = [g / shares.sqrt() for g in gradients]
        if gradients[0].device.type != "cpu":  # few launches
            columns = _joined([g.permute(1, 2, 0, 3) for g in gradients], 3)
            self.G.add(columns.flatten(2), weight)
            return
        for g in gradients:
            together = g.stride(0) == g.shape[3] * g.stride(3)
            if together or g.shape[3] <= g.shape[2]:
                self.G.add(side_by_side(g), weight)
            else:  # one matrix for each example is smaller than a copy
                self.G.total.add_((g @ g.mT).sum(0), alpha=weight)

    def result(self) -> Kronecker:
        """Return the layer's Kronecker product."""
        shape = self.layer.kernel.shape
        A, G = (x.result() for x in (self.A, self.G))
        return Kronecker(self.layer.weight, shape, A, G, self.layer.bias)


class ReducedKroneckerAccumulator(KroneckerAccumulator):
    """K-FAC-reduce's factors, from each example's mean input and summed gradient."""

    def observe(self, columns: Tensor, weight: float, share: Share) -> None:
        """Add the mean inputs' second moment."""
        means = columns.mean(3, keepdim=True)
        if share is not None:
            means = means / share.to(means)[:, None, None, None]
        super().observe(means, 1, None)

    def add_gradients(self, gradients: Columns, weight: float, share: Share) -> None:
        """Add the summed gradients' second moment."""
        super().add_gradients([g.sum(3, keepdim=True) for g in gradients], 1, None)


class DiagonalAccumulator(LayerAccumulator):
    """The exact diagonal: the sum of squared per-example gradients."""

    def __init__(self, layer: KroneckerLayer) -> None:
        super().__init__(layer)
        self.total = layer.kernel.new_zeros(layer.shape, dtype=layer.dtype)

    def add_pairs(self, inputs: Tensor, gradients: Columns) -> None:
        """Add the squares of the gradients ``sum_t g_t a_t^T``, example by example."""
        if inputs.shape[3] > 1:
            for g in gradients:
                self._add_products(inputs, g)
            return
        # One position: the square of an outer product is the outer product of squares,
        # so that passes can be summed first.
        squares = torch.stack([g.square() for g in gradients]).sum(0)
        g, a = squares[..., 0].permute(1, 2, 0), inputs.square()[..., 0]
        self.total.baddbmm_(g, a.permute(1, 0, 2))

    def _add_products(self, inputs: Tensor, gradient: Tensor) -> None:
        """Add the squares of products, a few examples at a time."""
        each = inputs[0, ..., 0].numel()
        # A few examples' products fit a CPU's cache.
        one = inputs.device.type == "cpu" and each * gradient.shape[2] >= _LARGE
        n = 1 if one else len(inputs)
        rows = max(1, (_CACHED if one else _AT_ONCE) // (n * each))
        for start in range(0, gradient.shape[2], rows):
            some = slice(start, start + rows)
            total = self.total[:, some]
            parts = (torch.split(x, n) for x in (gradient[:, :, some], inputs))
            for g, a in zip(*parts, strict=True):
                product = g @ a.mT
                if one:
                    total.addcmul_(product[0], product[0])
                else:
                    total += product.square_().sum(0)

    def result(self) -> Diagonal:
        """Return the layer's diagonal."""
        return Diagonal(self.layer.as_params(self.total))


class GroupedDiagonalAccumulator(DiagonalAccumulator):
    """The exact diagonal of a convolution with many groups, such as a depthwise one.

    The columns of such a layer take several times the memory of its input, and their
    products are small. So the examples' gradients are computed by a convolution
    instead.
    """

    takes_inputs, takes_calls = False, True
    layer: ConvolutionLayer

    def add_call(self, inputs: Tensor, output: Tensor) -> None:
        """Add the squares of the gradients, example by example."""
        self.total += self.layer.gradient_rows(inputs, output).square_().sum(0)


def diagonal_of(layer: KroneckerLayer) -> DiagonalAccumulator:
    """Return the accumulator for a layer's exact diagonal."""
    if isinstance(layer, ConvolutionLayer) and layer.is_grouped:
        return GroupedDiagonalAccumulator(layer)
    return DiagonalAccumulator(layer)


def _joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Return tensors as one; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def side_by_side(columns: Tensor) -> Tensor:
    """Return columns as ``[groups, size, n T]``, as a view where that is possible."""
    return columns.permute(1, 2, 0, 3).flatten(2)
