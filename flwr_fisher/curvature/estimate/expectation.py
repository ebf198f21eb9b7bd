"""The labels that a Fisher is a mean over: all, drawn ones, or given ones."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flwr_fisher.curvature.batches import Batch
from flwr_fisher.curvature.estimate.engine import Engine
from flwr_fisher.curvature.estimate.likelihood import Likelihood, check_labels
from flwr_fisher.curvature.estimate.pieces import Pieces
from flwr_fisher.curvature.operators.plain import Diagonal
from flwr_fisher.curvature.sums import Sums, widened
from flwr_fisher.errors import DataError
from flwr_fisher.params import trainable_names


@dataclass(frozen=True)
class Expectation:
    """Which labels a Fisher is a mean over, and so which rank-one pieces it sums.

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

    def add(self, engine: Engine, batch: Batch, generator: torch.Generator) -> None:
        """Have the engine sum the pieces of a batch.

        Parameters
        ----------
        engine : Engine
            What keeps the sums.
        batch : tuple[Tensor, Any]
            Inputs and labels; the latter's values matter to the empirical Fisher alone.
        generator : torch.Generator
            Draws labels, and what stands for the passes that are too many.
        """
        inputs, labels = batch

        def make_pieces(outputs: Tensor) -> Pieces:
            self.likelihood.check_order(outputs, labels)
            return self.likelihood.pieces(outputs, self.max_passes, generator)

        def pieces_of(outputs: Tensor, rows: slice) -> Iterable[Tensor]:
            if self.kind == "empirical":
                given = check_labels(labels)[rows]
                return self.likelihood.score(outputs, given).unsqueeze(0)
            if self.kind == "exact":
                return make_pieces(outputs).all()
            self.likelihood.check_order(outputs, labels)
            return self._sampled(outputs, generator)

        if self.kind == "exact" and self.tolerance > 0:
            engine.add_within(inputs, make_pieces, self.tolerance)
        else:
            engine.add(inputs, pieces_of)

    def _sampled(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        score = self.likelihood.sample_score
        draws = [score(outputs, generator) for _ in range(self.num_samples)]
        return torch.stack(draws) / math.sqrt(self.num_samples)


def squared_batch_gradients(
    model: nn.Module, batches: Iterable[tuple[Tensor, Any]], likelihood: Likelihood
) -> Diagonal:
    r"""Return :math:`\frac1B \sum_b (\nabla \bar\ell_b)^2`, elementwise.

    :math:`\bar\ell_b` is a batch's mean negative log-likelihood of the given labels
    (FedFish, Algorithm 2, which takes the sum over batches): as ``F.cross_entropy``'s,
    over the labels other than -100, of which an example has one a position.

    Parameters
    ----------
    model : nn.Module
        In eval mode.
    batches : Iterable[tuple[Tensor, Any]]
        Inputs and labels on the model's device.
    likelihood : Likelihood
        What the model's outputs mean.

    Raises
    ------
    DataError
        If there is no batch, or one without labels.
    """
    parameters = {name: model.get_parameter(name) for name in trainable_names(model)}
    leaves, sums, count = list(parameters.values()), Sums(parameters), 0
    for inputs, labels in batches:
        given = check_labels(labels)
        outputs = model(inputs)
        score = likelihood.score(widened(outputs), given)
        mean = (score / likelihood.num_labels(given)).to(outputs.dtype)
        sums.add_squares(torch.autograd.grad(outputs, leaves, mean, allow_unused=True))
        count += 1
    if not count:
        raise DataError("the loader has no examples, so there is no Fisher to take")
    return Diagonal(sums.mean(count))
