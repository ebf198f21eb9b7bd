r"""The Fisher with respect to a model's outputs, in rank-one pieces.

Outputs are seen as ``[n, T, C]``: C numbers at each of T positions that are independent
given the outputs. At a position the Fisher is :math:`\sum_i v_i v_i^\top`. Each piece
costs a backward pass; this file chooses the pieces that are worth it.
"""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class OutputVectors(ABC):
    """The vectors :math:`v_1, …, v_k` at every position of some examples."""

    def __init__(self, count: int, positions: int, device: torch.device) -> None:
        self.count, self.positions, self.device = count, positions, device

    @abstractmethod
    def squares(self) -> Tensor:
        """Return each vector's squared norm, ``[k, n, T]``."""

    @abstractmethod
    def at(self, index: Tensor) -> Tensor:
        """Return one vector at each position of an example, ``[k, n, T, C]``.

        `index` ``[k, n]`` is the number of the vector, for each pass and example.
        """

    @abstractmethod
    def __getitem__(self, rows: Tensor) -> "OutputVectors":
        """Return the vectors of some examples alone."""


class GivenVectors(OutputVectors):
    """Vectors that are held as one tensor, ``[k, n, T, C]``."""

    def __init__(self, values: Tensor) -> None:
        super().__init__(len(values), values.shape[2], values.device)
        self.values = values

    def squares(self) -> Tensor:
        """Return the squared norms."""
        return self.values.square().sum(-1)

    def at(self, index: Tensor) -> Tensor:
        """Return one vector at each position."""
        return self.values[index, torch.arange(index.shape[1], device=index.device)]

    def __getitem__(self, rows: Tensor) -> "GivenVectors":
        """Return the vectors of some examples alone."""
        return GivenVectors(self.values[:, rows])


class SoftmaxVectors(OutputVectors):
    r"""The Fisher of a softmax with respect to its logits, factored.

    For probabilities :math:`p` it is :math:`\operatorname{diag}(p) - pp^\top`, of rank
    :math:`C - 1`, and so equals :math:`\sum_k v_k v_k^\top` with :math:`C - 1` columns
    of its Cholesky factor, known in closed form (Tanabe & Sagae 1992): with classes
    sorted by falling probability and tails :math:`q_k = \sum_{j > k} p_j`,

    .. math:: L_{kk} = \sqrt{p_k q_k / q_{k-1}}, \quad L_{jk} = -L_{kk} p_j / q_k .

    One backward pass for each column thus gives the *true* Fisher, one pass fewer than
    the sum over all classes, and the likeliest classes come first. What the first k
    columns leave is the Fisher of a softmax again, over the other classes, times
    :math:`q_k`; one label drawn from these is an unbiased estimate of it.

    A column is computed when it is needed, so the memory is that of a few tensors like
    the logits.

    Parameters
    ----------
    logits : Tensor
        ``[n, T, C]`` with at least two classes.
    most : int, optional
        The largest number of vectors. If there are more columns, the last vector is a
        drawn label. By default all columns.
    generator : torch.Generator, optional
        Draws the label, on the logits' device.

    Examples
    --------
    >>> vectors = SoftmaxVectors(torch.zeros(1, 1, 2))
    >>> v = vectors.at(torch.tensor([[0]]))[0]
    >>> v.mT @ v
    tensor([[[ 0.2500, -0.2500],
             [-0.2500,  0.2500]]])
    """

    def __init__(
        self,
        logits: Tensor,
        most: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        rank = logits.shape[-1] - 1
        # One vector of `most` is kept for the drawn label, if there are more columns.
        columns = rank if most is None or most >= rank else most - 1
        super().__init__(columns + (columns < rank), logits.shape[1], logits.device)
        self.p = logits.detach().softmax(-1)
        # Only the likeliest classes are sorted: there may be a vocabulary of them.
        likeliest, self.top = self.p.topk(columns, dim=-1)
        rest = self.p.scatter(-1, self.top, 0)
        others = rest.square().sum(-1, keepdim=True)
        # Tails summed from the small end, so that a confident example loses no digits.
        both = (
            torch.cat([likeliest, rest.sum(-1, keepdim=True)], -1),
            torch.cat([likeliest.square(), others], -1),
        )
        tails, of_squares = torch.stack(both).flip(-1).cumsum(-1).flip(-1).unbind()
        safe = tails.clamp_min(torch.finfo(self.p.dtype).tiny)
        squares = likeliest * (tails[..., 1:] / safe[..., :-1])  # of the pivots
        # For the vectors' norms: a column has -p_j / q_k in all classes below its own.
        after, spread = safe[..., 1:], of_squares[..., 1:]
        self.drawn: Tensor | None = None
        if columns < rank:
            squares = torch.cat([squares, tails[..., -1:]], -1)
            after = torch.cat([after, safe[..., -1:]], -1)
            # The norm of a draw is p (1 - p), summed over the other classes.
            spread = torch.cat([spread, -others], -1)
            self.drawn = _draw(rest, generator)
        self.pivots, self.after = squares.sqrt(), after
        self.norms = squares * (1 + spread / after / after)

    def squares(self) -> Tensor:
        """Return the squared norms; of a draw, the expected one."""
        return self.norms.permute(2, 0, 1)

    def at(self, index: Tensor) -> Tensor:
        """Return one column at each position, with classes in the logits' order."""
        k, positions = len(index), self.p.shape[1]
        index = index[..., None, None].expand(-1, -1, positions, 1)

        def each(values: Tensor) -> Tensor:
            return values.expand(k, *values.shape)

        below = -self.p / each(self.after).gather(-1, index)
        ranks = torch.arange(self.top.shape[-1], device=index.device)
        likeliest = below.gather(-1, each(self.top))
        likeliest = torch.where(ranks > index, likeliest, (ranks == index).to(below))
        column = below.scatter_(-1, each(self.top), likeliest)
        if self.drawn is not None:
            is_draw = (index == self.count - 1).to(below)
            column.scatter_add_(-1, each(self.drawn), is_draw)
        return column.mul_(each(self.pivots).gather(-1, index))

    def __getitem__(self, rows: Tensor) -> "SoftmaxVectors":
        """Return the columns of some examples alone."""
        part = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(part, name, value[rows])
        return part


@dataclass(frozen=True)
class Pieces:
    """The rank-one pieces of a batch; each costs a backward pass.

    A piece is one vector at one position and zero elsewhere. With a generator it is one
    at every position, with random signs that keep the positions' cross terms from
    adding up: an unbiased estimate, in T times fewer passes.

    Parameters
    ----------
    vectors : OutputVectors
        The vectors, at T positions.
    shape : torch.Size
        The outputs' shape, ``[n, ...]``.
    generator : torch.Generator, optional
        Draws the signs, on the outputs' device.
    mask : Tensor, optional
        Booleans ``[n, T]``: where the vectors are not zero. By default everywhere.
    """

    vectors: OutputVectors
    shape: torch.Size
    generator: torch.Generator | None = None
    mask: Tensor | None = None

    @property
    def count(self) -> int:
        """The number of pieces of an example."""
        positions = 1 if self.generator is not None else self.vectors.positions
        return self.vectors.count * positions

    def weights(self) -> Tensor:
        """Return each piece's share of the trace: squared norms ``[count, n]``."""
        squares = self.vectors.squares()
        if self.mask is not None:
            squares = squares * self.mask
        if self.generator is not None:
            return squares.sum(-1)
        return squares.permute(2, 0, 1).flatten(0, 1)

    def pick(self, pieces: Tensor) -> Tensor:
        """Return one piece of each example, ``[k, n]``, each in the outputs' shape."""
        count, positions = self.vectors.count, self.vectors.positions
        values = self.vectors.at(pieces if positions == 1 else pieces % count)
        if self.mask is not None:
            values = values * self.mask.unsqueeze(-1)
        # One pass for all positions: the products of two of them have random signs, and
        # are zero in expectation. Without signs, a pass is for one position alone.
        if self.generator is not None:
            heads = drawn(Tensor.uniform_, values[..., :1], self.generator) < 0.5
            values = torch.where(heads, values, -values)
        elif positions > 1:
            chosen = torch.div(pieces, count, rounding_mode="floor")
            every = torch.arange(positions, device=pieces.device)
            values = values * (every == chosen.unsqueeze(-1)).unsqueeze(-1)
        return values.reshape(len(pieces), *self.shape)

    def __getitem__(self, rows: Tensor) -> "Pieces":
        """Return the pieces of some examples alone."""
        shape = torch.Size([len(rows), *self.shape[1:]])
        mask = None if self.mask is None else self.mask[rows]
        return Pieces(self.vectors[rows], shape, self.generator, mask)


def drawn(draw: Any, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return random numbers in a tensor's shape, from a seed the same on any device."""
    numbers = torch.empty(like.shape, dtype=like.dtype)
    draw(numbers, generator=generator)  # in place
    return numbers.to(like.device, non_blocking=True)


def given_pieces(values: Tensor) -> Pieces:
    """Return the pieces that are given as one tensor, ``[k, *outputs]``."""
    k, n = values.shape[:2]
    return Pieces(GivenVectors(values.reshape(k, n, 1, -1)), values.shape[1:])


def _draw(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return a class for each position, ``[n, T, 1]``, as likely as its weight."""
    # By the inverse of the distribution, since multinomial would wait for a device.
    sums = weights.cumsum(-1)
    total = sums[..., -1:]
    draws = drawn(Tensor.uniform_, total, generator)
    found = torch.searchsorted(sums, draws * total, right=True)
    return found.clamp_(max=weights.shape[-1] - 1)


def worth_keeping(weights: Tensor, tolerance: float) -> Tensor:
    r"""Return a mask of pieces to keep, which loses at most `tolerance` of the trace.

    The trace of the batch's Fisher with respect to its outputs is
    :math:`\sum_{n,c} p_c (1 - p_c)` for a softmax, known after the forward pass; the
    smallest pieces are dropped first.

    Parameters
    ----------
    weights : Tensor
        The pieces' squared norms ``[K, n]``.
    tolerance : float
        The share that may be left out; 0 keeps every piece that is not zero.

    Returns
    -------
    Tensor
        Booleans ``[K, n]``.

    Examples
    --------
    >>> worth_keeping(torch.tensor([[0.9, 0.01], [0.09, 0.0]]), 0.02)
    tensor([[ True, False],
            [ True, False]])
    """
    flat = weights.to(torch.float64, memory_format=torch.contiguous_format).flatten()
    in_order, order = flat.sort(stable=True)
    lost = in_order.cumsum(0)
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order] = ~(lost <= tolerance * lost[-1])  # `not <=`, so that NaN is kept
    return kept.reshape(weights.shape)


@dataclass(frozen=True)
class Group:
    """Examples that need about equally many backward passes.

    Parameters
    ----------
    size : int
        The examples have at least so many pieces, and fewer than twice as many, unless
        all are in one group.
    rows : Tensor | None
        The numbers of these examples in the batch; None means all of them, in order.
    pieces : Pieces
        The pieces of these examples.
    order : Tensor
        ``[passes, examples]``: which piece of an example each pass takes.
    needed : Tensor | None
        In the shape of `order`: 0 where an example needs no more passes, and else 1;
        None means that every example needs all passes.
    """

    size: int
    rows: Tensor | None
    pieces: Pieces
    order: Tensor
    needed: Tensor | None

    def of_passes(self, start: int, stop: int) -> Tensor:
        """Return some passes' pieces, ``[stop - start, examples, *outputs]``.

        They are 0 for examples that need fewer passes, and beyond `order`.
        """
        picked = self.pieces.pick(self.order[start:stop])
        if self.needed is not None:
            needed = self.needed[start:stop]
            picked = picked * needed.reshape(*needed.shape, *[1] * (picked.dim() - 2))
        missing = stop - start - len(picked)
        if not missing:
            return picked
        return torch.cat([picked, picked.new_zeros(missing, *picked.shape[1:])])


def backward_plan(pieces: Pieces, tolerance: float) -> list[Group]:
    """Group a batch's examples by their number of pieces, without those that have none.

    They are one group if that costs no more passes: it reuses the forward pass that
    gave `pieces`. Each separate group needs another one.

    Parameters
    ----------
    pieces : Pieces
        The batch's.
    tolerance : float
        As for :func:`worth_keeping`. With 0 all pieces are taken, without a look at
        their weights.
    """
    (n, *_), device = pieces.shape, pieces.vectors.device
    if tolerance == 0:
        every = torch.arange(pieces.count, device=device)
        return [Group(0, None, pieces, every.unsqueeze(1).expand(-1, n), None)]
    kept = worth_keeping(pieces.weights(), tolerance)
    # Each example's kept pieces first, in their order.
    needed, order = kept.view(torch.uint8).sort(dim=0, descending=True, stable=True)
    counts = kept.sum(0).cpu()  # a device is waited for here, and nowhere else
    largest = int(counts.max()) if counts.numel() else 0
    if not largest:
        return []
    # Sizes are powers of two, so that there are few groups, and no example takes twice
    # the passes that it needs.
    sizes = [2**k for k in range(largest.bit_length())]
    found = [(x, ((counts >= x) & (counts < 2 * x)).nonzero()[:, 0]) for x in sizes]
    apart = [(x, rows, int(counts[rows].max())) for x, rows in found if len(rows)]
    if largest * n <= sum((1 + passes) * len(rows) for _, rows, passes in apart):
        return [Group(sizes[-1], None, pieces, order[:largest], needed[:largest])]
    groups = []
    for size, rows, passes in apart:
        there = rows.to(device, non_blocking=True)
        chosen = (each[:passes, there] for each in (order, needed))
        groups.append(Group(size, there, pieces[there], *chosen))
    return groups
