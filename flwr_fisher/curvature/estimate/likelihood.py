r"""What a model's outputs mean: the curvature of the loss with respect to them.

A likelihood says how the Fisher with respect to one example's outputs falls into
rank-one pieces, :math:`\sum_k v_k v_k^\top`; each piece costs one backward pass.
Outputs are seen as ``[n, T, C]``: C numbers at each of T independent positions, with
T = 1 for an ordinary classifier.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flwr_fisher.errors import DataError, StructureError

_IGNORED = -100  # PyTorch's ignore_index: no label


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


class Likelihood(ABC):
    """How outputs turn into a distribution over labels."""

    @abstractmethod
    def columns(self, outputs: Tensor) -> Columns:
        """Return the pieces of the exact Fisher."""

    @abstractmethod
    def sample_score(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return the gradient of the log-likelihood of a sampled label, same shape."""

    @abstractmethod
    def score(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the gradient of the log-likelihood of given labels, same shape."""

    def num_labels(self, labels: Tensor) -> int:
        """Return how many terms a batch's mean loss has; at least 1."""
        return len(labels)

    def check_order(self, outputs: Tensor, labels: object) -> None:
        """Raise where a batch's labels show that outputs are not as read here."""
        return


class Categorical(Likelihood):
    """Softmax over the last dimension: ``[n, C]``, or ``[n, T, C]`` for tokens."""

    def columns(self, outputs: Tensor) -> Columns:
        """Return C - 1 pieces a position; see :func:`categorical_factors`."""
        logits = _at_least_2d(outputs)
        flat = categorical_factors(logits.reshape(-1, logits.shape[-1]))
        positions = logits.shape[1:-1].numel()
        values = flat.reshape(len(flat), len(logits), positions, logits.shape[-1])
        return Columns(values, outputs.shape)

    def sample_score(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return ``onehot(y) - p`` for y drawn from p."""
        p = _at_least_2d(outputs).softmax(-1)
        draws = torch.multinomial(p.flatten(0, -2), 1, generator=generator)
        return F.one_hot(draws.reshape(p.shape[:-1]), p.shape[-1]) - p

    def score(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return ``onehot(y) - p`` for labels ``[n]`` or ``[n, T]``, 0 for -100."""
        self.check_order(outputs, labels)
        p = _at_least_2d(outputs).softmax(-1)
        if labels.shape != p.shape[:-1] or labels.is_floating_point():
            raise DataError(
                f"labels of shape {tuple(labels.shape)} and dtype {labels.dtype} do "
                f"not fit logits of shape {tuple(p.shape)}: give class indices"
            )
        labels, classes = labels.long(), p.shape[-1]
        ignored = labels == _IGNORED
        if len(wrong := labels[~ignored & ((labels < 0) | (labels >= classes))]):
            raise DataError(
                f"label {int(wrong[0])} is outside [0, {classes}): give class indices, "
                f"and {_IGNORED}, PyTorch's ignore_index, where there is no label"
            )
        scores = F.one_hot(labels.clamp_min(0), classes) - p
        return scores.masked_fill(ignored.unsqueeze(-1), 0)

    def num_labels(self, labels: Tensor) -> int:
        """Count the labels, of which an example may have several, without -100."""
        return max(1, int((labels.long() != _IGNORED).sum()))

    def check_order(self, outputs: Tensor, labels: object) -> None:
        """Raise where labels fit classes in PyTorch's place, second, and not last."""
        shape = labels.shape[1:] if isinstance(labels, Tensor) else None
        if shape == outputs.shape[2:] != outputs.shape[1:-1]:
            raise StructureError(
                f"by the labels, outputs of shape {tuple(outputs.shape)} have classes "
                "second: put them last, by outputs.transpose(1, 2) for [n, C, T]"
            )


class Bernoulli(Likelihood):
    """Independent sigmoids: logits ``[n]`` or ``[n, …]``, labels 0 or 1."""

    def columns(self, outputs: Tensor) -> Columns:
        """Return one piece an output, the square root of p (1 - p)."""
        flat = outputs.detach().reshape(len(outputs), -1, 1)
        deviation = (flat.sigmoid() * (-flat).sigmoid()).sqrt()
        return Columns(deviation.unsqueeze(0), outputs.shape)

    def sample_score(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return ``y - p`` for y drawn from p."""
        p = outputs.sigmoid()
        return torch.bernoulli(p, generator=generator) - p

    def score(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return ``y - p``."""
        return _same_shape(outputs, labels) - outputs.sigmoid()


class Gaussian(Likelihood):
    """Regression with unit variance: the loss is half the squared error."""

    def columns(self, outputs: Tensor) -> Columns:
        """Return one piece an output, a one."""
        flat = outputs.detach().reshape(1, len(outputs), -1, 1)
        return Columns(torch.ones_like(flat), outputs.shape)

    def sample_score(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return standard normal noise."""
        return torch.empty_like(outputs).normal_(generator=generator)

    def score(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return ``y - output``."""
        return _same_shape(outputs, labels) - outputs


def check_labels(labels: object) -> Tensor:
    """Return a batch's labels; raise :class:`DataError` where there are none."""
    if not isinstance(labels, Tensor):
        raise DataError(
            "this expectation needs labels: batches must be (inputs, labels)"
        )
    return labels


LIKELIHOODS: dict[str, Likelihood] = {
    "categorical": Categorical(),
    "bernoulli": Bernoulli(),
    "gaussian": Gaussian(),
}


def _at_least_2d(outputs: Tensor) -> Tensor:
    if outputs.dim() < 2 or outputs.shape[-1] < 2:
        raise StructureError(
            "the model's output must be logits of shape [batch, classes], or [batch, "
            f"time, classes], with at least 2 classes, got {tuple(outputs.shape)}"
        )
    return outputs.detach()


def _same_shape(outputs: Tensor, labels: Tensor) -> Tensor:
    if labels.shape != outputs.shape:
        raise DataError(
            f"labels of shape {tuple(labels.shape)} do not fit outputs of shape "
            f"{tuple(outputs.shape)}"
        )
    return labels.to(outputs.dtype)


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
