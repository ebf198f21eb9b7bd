"""Whose gradients a Fisher is made of, and how many of them."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flwr_fisher.curvature.engine import Engine, PiecesOf
from flwr_fisher.curvature.likelihood import Likelihood, check_labels

__all__ = ["Terms"]


class Terms:
    """The terms of an expectation; :func:`flwr_fisher.curvature.fisher` says which."""

    def __init__(
        self,
        likelihood: Likelihood,
        expectation: str,
        tolerance: float,
        num_samples: int,
        seed: int,
    ) -> None:
        self.likelihood, self.expectation = likelihood, expectation
        self.tolerance, self.num_samples, self.seed = tolerance, num_samples, seed

    def add(
        self, engine: Engine, batch: tuple[Tensor, Any], generator: torch.Generator
    ) -> None:
        """Have the engine sum a batch's terms."""
        inputs, labels = batch
        if self.expectation == "exact" and self.tolerance > 0:
            engine.add_within(inputs, self.likelihood, self.tolerance)
            return
        pieces: PiecesOf = self._exact
        if self.expectation == "sampled":
            pieces = partial(self._sampled, generator)
        elif self.expectation == "empirical":
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
