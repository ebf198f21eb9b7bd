"""The clients' networks as one that is only asked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.params import shared_state

Score = Callable[[dict[str, Tensor]], float]


@dataclass
class Ensemble:
    """Clients' networks, whose logits are added by weights."""

    models: Sequence[nn.Module]
    weights: Tensor

    @classmethod
    def of(cls, models: Sequence[nn.Module]) -> "Ensemble":
        """Return their mean."""
        if not models:
            raise ConfigurationError("there is no client's model to distil")
        weights = torch.full((len(models),), 1 / len(models))
        return cls(models, weights.to(next(models[0].parameters()).device))

    @property
    def device(self) -> torch.device:
        """Where the networks are."""
        return self.weights.device

    def each(self, inputs: Tensor) -> Tensor:
        """Return the networks' logits, ``[clients, n, C]``."""
        return torch.stack([model(inputs) for model in self.models])

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the ensemble's logits."""
        return torch.einsum("i,inc->nc", self.weights, self.each(inputs))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Have the networks evaluate, and their parameters stay as they are."""
        before = [(m, m.training) for model in self.models for m in model.modules()]
        grads = [(p, p.requires_grad) for m in self.models for p in m.parameters()]
        try:
            for model in self.models:
                model.eval().requires_grad_(False)
            yield
        finally:
            for module, training in before:
                module.training = training
            for parameter, wanted in grads:
                parameter.requires_grad_(wanted)


class Best:
    """The parameters of a student that scored best; without a score, the last."""

    def __init__(self, score: Score | None) -> None:
        self.score, self.value = score, float("-inf")
        self.params: Mapping[str, Tensor] = {}

    def look(self, student: nn.Module) -> None:
        """Keep its parameters if they are better."""
        params = {name: value.clone() for name, value in shared_state(student).items()}
        value = 0.0 if self.score is None else self.score(params)
        if self.score is None or value > self.value or not self.params:
            self.params, self.value = params, value
