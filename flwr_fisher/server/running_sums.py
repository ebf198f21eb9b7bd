"""Sums that are taken while uploads come, so that no more than one is held."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from flwr_fisher.errors import ParamsError
from flwr_fisher.params import Params
from flwr_fisher.server.exchange import Uploads
from flwr_fisher.wire import Payload


@dataclass(frozen=True)
class Folded(Payload):
    """What is left of an upload that was added to a sum: what it was of.

    Parameters
    ----------
    parts : tuple[str, ...]
        The upload's layout.
    disagreement : tuple[str, str]
        The upload's.
    """

    parts: tuple[str, ...]
    disagreement: ClassVar[tuple[str, str]] = (
        "arrays",
        "covers other parameters than most clients' does",
    )

    def layout(self) -> tuple[str, ...]:
        """Return the upload's."""
        return self.parts

    def to_arrays(self) -> NoReturn:
        """Refuse: its numbers are in the sum."""
        raise NotImplementedError


class MeanSums:
    """The mean of uploads of one layout, in float64, by default weighted.

    Uploads are added when it is called with each, or else all at the end.
    What float64 loses in an addition is kept beside the sum (Knuth's two-sum), so that
    the order in which uploads come does not matter to the result's bits.

    Parameters
    ----------
    parts : Callable[[Payload], Mapping[str, Tensor]]
        Returns an upload's tensors.

    Examples
    --------
    >>> total = Sum()
    >>> for value, weight in ((1.0, 1.0), (4.0, 2.0)):
    ...     total.add({"w": torch.tensor([value])}, weight)
    >>> total.mean()
    {'w': tensor([3.], dtype=torch.float64)}
    """

    def __init__(
        self, parts: Callable[[Any], Params], *, weighted: bool = True
    ) -> None:
        self._parts, self._weighted = parts, weighted
        self._sums: dict[tuple[str, ...], Sum] = {}

    def __call__(self, payload: Any, weight: float) -> Any:
        """Add an upload; return what is left of it."""
        layout = payload.layout()
        self._add(self._sums.setdefault(layout, Sum()), payload, weight)
        return Folded(layout)

    def _add(self, total: "Sum", payload: Any, weight: float) -> None:
        total.add(self._parts(payload), weight if self._weighted else 1.0)

    def mean(self, uploads: Uploads[Any]) -> dict[str, Tensor]:
        """Return the mean over a step's uploads: of those that were added, or anew.

        Raises
        ------
        ParamsError
            If what was added is of others, too.
        """
        if not isinstance(uploads[0].payload, Folded):
            total = Sum()
            for upload in uploads:
                self._add(total, upload.payload, upload.num_examples)
            return total.mean()
        total = self._sums[uploads[0].payload.layout()]
        if total.count != len(uploads):
            raise ParamsError(
                f"a sum over {total.count} uploads, and {len(uploads)} were admitted"
            )
        return total.mean()


class Sum:
    """A weighted sum of named tensors, and what rounding took from it."""

    def __init__(self) -> None:
        self.count = 0
        self._weights: list[float] = []
        self._total: dict[str, Tensor] = {}
        self._lost: dict[str, Tensor] = {}

    def add(self, tensors: Params, weight: float) -> None:
        """Add tensors times a weight."""
        self.count += 1
        self._weights.append(weight)
        for name, value in tensors.items():
            term = value.detach().cpu().double() * weight
            total = self._total.get(name)
            if total is None:
                self._total[name], self._lost[name] = term, torch.zeros_like(term)
                continue
            new = total + term
            virtual = new - total
            self._lost[name] += (total - (new - virtual)) + (term - virtual)
            self._total[name] = new

    def mean(self) -> dict[str, Tensor]:
        """Return the sum over the sum of the weights."""
        weight = math.fsum(self._weights)
        return {k: (v + self._lost[k]) / weight for k, v in self._total.items()}
