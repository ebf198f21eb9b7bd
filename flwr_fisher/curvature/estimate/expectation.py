"""The expectation of a Fisher over labels: all classes, drawn labels, or the data's."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flwr_fisher.curvature.batch import Batch
from flwr_fisher.curvature.batches import reads_at_random
from flwr_fisher.curvature.estimate.engine import Engine
from flwr_fisher.curvature.estimate.likelihood import Likelihood, check_labels
from flwr_fisher.curvature.estimate.pieces import Pieces
from flwr_fisher.curvature.operators.plain import Diagonal
from flwr_fisher.curvature.sums import Sums, widened
from flwr_fisher.errors import DataError
from flwr_fisher.params import trainable

_PASSES = 9  # of ten classes


@dataclass(frozen=True)
class Expectation:
    """The expectation over labels, which decides the rank-one pieces of a batch.

    Parameters
    ----------
    likelihood : Likelihood
        What the model's outputs mean.
    kind, tolerance, num_samples, max_passes, seed
        As for :func:`flwr_fisher.curvature.fisher`, `kind` as its `expectation`.
    """

    likelihood: Likelihood
    kind: str
    tolerance: float
    num_samples: int
    max_passes: int | None
    seed: int

    @property
    def passes(self) -> int:
        """An estimate of how many backward passes an example takes at most.

        With ``exact`` it is `max_passes`, or 9 without this limit.
        """
        if self.kind == "exact":
            return _PASSES if self.max_passes is None else self.max_passes
        return self.num_samples if self.kind == "sampled" else 1

    def examples_within(
        self, total_passes: int, examples: int | None, loader: Iterable[Any]
    ) -> int:
        """Return how many examples a bound on passes allows, at most."""
        each = 1 + self.passes
        if self.kind == "exact" and reads_at_random(loader):
            each = 1  # of many, it may be known that they need none
        most = max(1, total_passes // each)
        return most if examples is None else min(examples, most)

    def with_labels(self, batch: Batch) -> Batch:
        """Return a batch without the examples that have no label other than -100."""
        label_mask = self._label_mask(batch)
        if label_mask is None or len(label_mask) != len(batch):
            return batch
        return batch[label_mask.reshape(len(batch), -1).any(1)]

    def _label_mask(self, batch: Batch) -> Tensor | None:
        """Return which labels are not -100, in their shape; None if none is -100."""
        ignored = self.likelihood.ignored(batch.labels)
        if ignored is None or batch.num_labels == ignored.numel():
            return None
        return ~ignored

    def add(self, engine: Engine, batch: Batch, generator: torch.Generator) -> None:
        """Add the pieces of a batch, by the engine.

        Parameters
        ----------
        engine : Engine
            The engine, which has the sums.
        batch : Batch
            Positions with the label -100 are left out. The values of the other labels
            matter only for the empirical Fisher.
        generator : torch.Generator
            Draws labels, and the random passes that replace those above `max_passes`.
        """
        labels, label_mask = batch.labels, self._label_mask(batch)

        def mask_of(outputs: Tensor, rows: slice) -> Tensor | None:
            if label_mask is None or label_mask.shape[1:] != outputs.shape[1:-1]:
                return None
            return label_mask[rows]

        def make_pieces(outputs: Tensor, rows: slice) -> Pieces:
            self.likelihood.check_order(outputs, labels)
            pieces = self.likelihood.pieces(outputs, self.max_passes, generator)
            mask = mask_of(outputs, rows)
            return pieces if mask is None else pieces.masked(mask.flatten(1))

        def pieces_of(outputs: Tensor, rows: slice) -> Iterable[Tensor]:
            if self.kind == "empirical":
                given = check_labels(labels)[rows]
                return self.likelihood.score(outputs, given).unsqueeze(0)
            if self.kind == "exact":
                return make_pieces(outputs, rows).all()
            self.likelihood.check_order(outputs, labels)
            engine.check_finite()  # a draw from what is not ends a process with a GPU
            mask = mask_of(outputs, rows)
            drawn = self._sampled(outputs, generator)
            return drawn if mask is None else drawn * mask.unsqueeze(-1)

        if self.kind == "exact" and self.tolerance > 0:
            engine.add_within(batch.inputs, make_pieces, self.tolerance, label_mask)
        else:
            engine.add(batch.inputs, pieces_of, label_mask)

    def _sampled(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        score = self.likelihood.sample_score
        draws = [score(outputs, generator) for _ in range(self.num_samples)]
        return torch.stack(draws) / math.sqrt(self.num_samples)


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
        given = check_labels(batch.labels)
        outputs = batch.inputs(model)
        score = likelihood.score(widened(outputs), given)
        mean = (score / likelihood.num_labels(given)).to(outputs.dtype)
        sums.add_squares(torch.autograd.grad(outputs, leaves, mean, allow_unused=True))
        count += 1
    if not count:
        raise DataError("the loader has no examples, so it has no Fisher")
    return Diagonal(sums.mean(count))
