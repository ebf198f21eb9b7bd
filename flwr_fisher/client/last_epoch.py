"""FedFish's Fisher without an extra pass: gradients squared while training."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from flwr_fisher.curvature import Diagonal
from flwr_fisher.curvature.sums import Sums
from flwr_fisher.params import trainable_names


class SquaredGradients:
    r"""The mean of the squared batch gradients that it is shown.

    FedFish, Appendix A.5.1: taken over the last local epoch, at parameters that still
    move, instead of in another pass at the end.

    Parameters
    ----------
    model : nn.Module
        Its trainable parameters' ``grad`` is read at each call of the last epoch.
    epochs : int
        How many there are.
    """

    def __init__(self, model: nn.Module, epochs: int) -> None:
        self._parameters = {n: model.get_parameter(n) for n in trainable_names(model)}
        self._sums = Sums({})
        self._count, self._epochs = 0, epochs

    def __call__(self, epoch: int, step: int) -> None:
        """Add the gradients as they are now, in the last epoch."""
        if epoch < self._epochs:
            return
        if not self._count:
            self._sums = Sums(self._parameters)
        self._sums.add_squares(p.grad for p in self._parameters.values())
        self._count += 1

    def curvature(self) -> Diagonal:
        """Return the mean over the calls."""
        return Diagonal(self._sums.mean(self._count))

    def state_dict(self) -> dict[str, Any]:
        """Return what it has seen so far."""
        return {"sums": self._sums.totals, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._count = state["count"]
        self._sums = Sums(self._parameters if self._count else {})
        self._sums.totals = dict(state["sums"])
