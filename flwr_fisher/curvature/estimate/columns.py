"""The rank-one pieces that a likelihood makes of a batch's outputs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_fisher.errors import StructureError


@dataclass(frozen=True)
class Columns:
    """The rank-one pieces of a batch of examples.

    Parameters
    ----------
    values : Tensor
        ``[k, n, T, C]``: k pieces at every position, each zero elsewhere, so k T pieces
        an example. Piece ``t k + i`` is the i-th at position t.
    shape : torch.Size
        The outputs' shape.
    """

    values: Tensor
    shape: torch.Size

    def weights(self) -> Tensor:
        """Return every piece's share of the trace: squared norms ``[k T, n]``."""
        return self.values.square().sum(-1).permute(2, 0, 1).flatten(0, 1)

    def pick(self, rows: Tensor, pieces: Tensor) -> Tensor:
        """Return one piece for each of some examples, shaped like their outputs."""
        k, _, t, c = self.values.shape
        picked = self.values.new_zeros(len(rows), t, c)
        every = torch.arange(len(rows), device=rows.device)
        position = torch.div(pieces, k, rounding_mode="floor")
        picked[every, position] = self.values[pieces % k, rows, position]
        return picked.reshape(len(rows), *self.shape[1:])

    def all(self) -> Tensor:
        """Return every piece of every example, ``[k T, *shape]``."""
        k, _, t, _ = self.values.shape
        if t == 1:
            return self.values.reshape(k, *self.shape)
        spread = torch.einsum(
            "kntc,ts->tknsc", self.values, torch.eye(t).to(self.values)
        )
        return spread.reshape(t * k, *self.shape)


def categorical_factors(logits: Tensor) -> Tensor:
    r"""Factor the Fisher of a softmax likelihood with respect to its logits.

    For probabilities :math:`p` it is :math:`\operatorname{diag}(p) - pp^\top`, of rank
    :math:`C - 1`, and so equals :math:`\sum_k v_k v_k^\top` with :math:`C - 1` columns
    of its Cholesky factor, known in closed form (Tanabe & Sagae 1992): with classes
    sorted by falling probability and tails :math:`q_k = \sum_{j > k} p_j`,

    .. math:: L_{kk} = \sqrt{p_k q_k / q_{k-1}}, \quad L_{jk} = -L_{kk} p_j / q_k .

    One backward pass for each column thus gives the *true* Fisher, one pass fewer than
    the sum over all classes, and the likeliest classes come first.

    Parameters
    ----------
    logits : Tensor
        ``[n, C]`` with at least two classes.

    Returns
    -------
    Tensor
        ``[C - 1, n, C]``: :math:`v_k` for each example.

    Raises
    ------
    StructureError
        If logits have another shape.

    Examples
    --------
    >>> v = categorical_factors(torch.zeros(1, 2))
    >>> torch.einsum("knc,knd->ncd", v, v)
    tensor([[[ 0.2500, -0.2500],
             [-0.2500,  0.2500]]])
    """
    if logits.dim() != 2 or logits.shape[1] < 2:
        raise StructureError(
            "the model's output must be logits of shape [batch, classes] with at least "
            f"2 classes, got {tuple(logits.shape)}"
        )
    p, order = torch.softmax(logits.detach(), dim=1).sort(dim=1, descending=True)
    # Tails summed from the small end, so that a confident example loses no digits.
    q_before = p.flip(1).cumsum(1).flip(1)
    q = torch.cat([q_before[:, 1:], torch.zeros_like(q_before[:, :1])], dim=1)
    tiny = torch.finfo(p.dtype).tiny
    pivot = (p * (q / q_before.clamp_min(tiny))).sqrt()
    columns = torch.diag_embed(pivot)
    below = torch.tril(p.unsqueeze(2) / q.clamp_min(tiny).unsqueeze(1), diagonal=-1)
    columns = columns - below * pivot.unsqueeze(1)
    index = order.unsqueeze(2).expand_as(columns)
    factors = torch.zeros_like(columns).scatter_(1, index, columns)
    return factors[:, :, :-1].permute(2, 0, 1).contiguous()
