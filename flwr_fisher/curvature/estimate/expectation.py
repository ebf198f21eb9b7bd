"""The expectation over labels in a Fisher: exact, by samples, or at given labels."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_fisher.curvature.batches import Batch
from flwr_fisher.curvature.estimate.columns import Columns
from flwr_fisher.curvature.estimate.engine import Engine
from flwr_fisher.curvature.estimate.likelihood import Likelihood, check_labels


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

        def columns_of(outputs: Tensor) -> Columns:
            self.likelihood.check_order(outputs, labels)
            return self.likelihood.pieces(outputs, self.max_passes, generator)

        def pieces_of(outputs: Tensor, rows: slice) -> Iterable[Tensor]:
            if self.kind == "empirical":
                given = check_labels(labels)[rows]
                return self.likelihood.score(outputs, given).unsqueeze(0)
            if self.kind == "exact":
                return columns_of(outputs).all()
            self.likelihood.check_order(outputs, labels)
            return self._sampled(outputs, generator)

        if self.kind == "exact" and self.tolerance > 0:
            engine.add_within(inputs, columns_of, self.tolerance)
        else:
            engine.add(inputs, pieces_of)

    def _sampled(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        score = self.likelihood.sample_score
        draws = [score(outputs, generator) for _ in range(self.num_samples)]
        return torch.stack(draws) / math.sqrt(self.num_samples)
