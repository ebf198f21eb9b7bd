"""The expectation of a Fisher over labels: all classes, drawn labels, or the data's."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from flwr_fisher.curvature.batch import Batch, check_classes
from flwr_fisher.curvature.estimate.likelihood import Likelihood
from flwr_fisher.curvature.estimate.pieces import Pieces, given_pieces
from flwr_fisher.curvature.operators.plain import Diagonal
from flwr_fisher.curvature.sums import Sums, widened
from flwr_fisher.errors import DataError, StructureError
from flwr_fisher.params import trainable

_PASSES = 9  # backward passes of an example: a guess, as if there were ten classes


@dataclass(frozen=True)
class Expectation:
    """The expectation over labels, which decides the rank-one pieces of a batch.

    Parameters
    ----------
    likelihood : Likelihood
        What the model's outputs mean.
    kind, num_samples, max_passes, seed
        As for :func:`flwr_fisher.curvature.fisher`, `kind` as its `expectation`.
    tolerance : float
        As for ``fisher`` if `kind` is ``exact``; else 0, so that every piece counts.
    """

    likelihood: Likelihood
    kind: str
    tolerance: float
    num_samples: int
    max_passes: int | None
    seed: int

    @property
    def passes(self) -> int:
        """About how many backward passes an example takes.

        With ``exact`` these are the most: `max_passes`, or without it a guess.
        """
        if self.kind == "exact":
            return self.max_passes or _PASSES
        return self.num_samples  # one, where no labels are drawn

    def with_labels(self, batch: Batch) -> Batch:
        """Return a batch without the examples that have no label other than -100."""
        label_mask = self.label_mask(batch)
        if label_mask is None or len(label_mask) != len(batch):
            return batch
        return batch[label_mask.reshape(len(batch), -1).any(1)]

    def label_mask(self, batch: Batch) -> Tensor | None:
        """Return which labels are not -100, in their shape; None if none is -100."""
        ignored = self.likelihood.ignored(batch.labels)
        if ignored is None or batch.num_labels == ignored.numel():
            return None
        return ~ignored

    def pieces(
        self,
        outputs: Tensor,
        batch: Batch,
        label_mask: Tensor | None,
        generator: torch.Generator,
    ) -> Pieces:
        """Return the rank-one pieces of the Fisher with respect to a batch's outputs.

        Parameters
        ----------
        outputs : Tensor
            ``[n, ...]``.
        batch : Batch
            Has the labels.
        label_mask : Tensor | None
            From :meth:`label_mask`. Positions with the label -100 are left out.
        generator : torch.Generator
            Draws labels, and the random passes that replace those above `max_passes`.
        """
        if self.kind == "empirical":
            given = _score(self.likelihood, outputs, batch.tensor_labels())
            return given_pieces(given.unsqueeze(0))
        self.likelihood.check_order(outputs, batch.labels)
        labels = batch.labels
        fits = isinstance(labels, Tensor) and labels.shape == outputs.shape[:-1]
        if fits and self.likelihood.labels_are_classes:
            check_classes(batch.extremes, outputs.shape[-1])
        mask = label_mask
        if mask is not None and mask.shape[1:] != outputs.shape[1:-1]:
            mask = None
        if self.kind == "exact":
            pieces = self.likelihood.pieces(outputs, self.max_passes, generator)
            return pieces if mask is None else replace(pieces, mask=mask.flatten(1))
        score = self.likelihood.sample_score
        draws = [score(outputs, generator) for _ in range(self.num_samples)]
        drawn = torch.stack(draws) / math.sqrt(self.num_samples)
        if mask is not None:
            drawn = drawn * mask.unsqueeze(-1)
        return given_pieces(drawn)


def _score(likelihood: Likelihood, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return a likelihood's score, after a check of its shape."""
    score = likelihood.score(outputs, labels)
    if score.shape != outputs.shape:
        raise StructureError(
            f"{type(likelihood).__name__}.score returned shape {tuple(score.shape)} "
            f"for outputs of shape {tuple(outputs.shape)} and labels of shape "
            f"{tuple(labels.shape)}: return the outputs' shape; labels may be "
            "broadcast, so give them that shape by batch_fn"
        )
    return score


def squared_batch_gradients(
    model: nn.Module, batches: Iterable[Batch], likelihood: Likelihood
) -> Diagonal:
    r"""Return :math:`\frac1B \sum_b (\nabla \bar\ell_b)^2`, elementwise.

    :math:`\bar\ell_b` is a batch's mean negative log-likelihood of the given labels
    (FedFish, Algorithm 2, which takes the sum over batches): as for
    ``F.cross_entropy``, the mean is over the labels other than -100. An example has one
    label for each position.

    Parameters
    ----------
    model : nn.Module
        In eval mode.
    batches : Iterable[Batch]
        On the model's device.
    likelihood : Likelihood
        What the model's outputs mean.

    Raises
    ------
    DataError
        If there is no batch, or one without labels.
    """
    parameters = trainable(model)
    leaves, sums, count = list(parameters.values()), Sums(parameters), 0
    for batch in batches:
        given = batch.tensor_labels()
        outputs = batch.inputs(model)
        score = _score(likelihood, widened(outputs), given)
        mean = (score / likelihood.num_labels(given)).to(outputs.dtype)
        sums.add_squares(torch.autograd.grad(outputs, leaves, mean, allow_unused=True))
        count += 1
    if not count:
        raise DataError("the loader has no examples, so it has no Fisher")
    return Diagonal(sums.mean(count))
