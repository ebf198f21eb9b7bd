"""The expectation over labels in a Fisher: exact, by samples, or at given labels."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flwr_fisher.curvature.batches import Batch
from flwr_fisher.curvature.estimate.engine import Engine, PiecesOf
from flwr_fisher.curvature.estimate.likelihood import Likelihood, check_labels


@dataclass(frozen=True)
class Expectation:
    """Which labels a Fisher is a mean over, and so which rank-one pieces it sums.

    Parameters
    ----------
    likelihood : Likelihood
        What the model's outputs mean.
    kind, tolerance, num_samples, seed
        As for :func:`flwr_fisher.curvature.fisher`, `kind` as its `expectation`.
    """

    likelihood: Likelihood
    kind: str
    tolerance: float
    num_samples: int
    seed: int

    def add(self, engine: Engine, batch: Batch, generator: torch.Generator) -> None:
        """Have the engine sum the pieces of a batch.

        Parameters
        ----------
        engine : Engine
            What keeps the sums.
        batch : tuple[Tensor, Any]
            Inputs and labels; the latter matter to the empirical Fisher alone.
        generator : torch.Generator
            Draws the labels of the sampled one.
        """
        inputs, labels = batch
        if self.kind == "exact" and self.tolerance > 0:
            engine.add_within(inputs, self.likelihood, self.tolerance)
            return
        pieces: PiecesOf = self._exact
        if self.kind == "sampled":
            pieces = partial(self._sampled, generator)
        elif self.kind == "empirical":
            pieces = partial(self._empirical, check_labels(labels))
        engine.add(inputs, pieces)

    def _exact(self, outputs: Tensor, rows: slice) -> Tensor:
        return self.likelihood.columns(outputs).all()

    def _sampled(
        self, generator: torch.Generator, outputs: Tensor, rows: slice
    ) -> Tensor:
        draws = [
            self.likelihood.sample_score(outputs.detach(), generator)
            for _ in range(self.num_samples)
        ]
        return torch.stack(draws) / math.sqrt(self.num_samples)

    def _empirical(self, labels: Tensor, outputs: Tensor, rows: slice) -> Tensor:
        return self.likelihood.score(outputs.detach(), labels[rows]).unsqueeze(0)
