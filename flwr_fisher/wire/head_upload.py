"""The upload for a head in closed form: sums over a client's data, no parameters.

``head/gram``, ``head/cross``
    the second moments of the features and their products with the targets, ``[f, f]``
    and ``[f, C]`` in float64; features end in a 1 if the head has a bias;
``head/count``
    the number of rows, float64;
``head/format``
    JSON with the name of the head's weight, the same for all clients.

The server adds them up, but they are no :class:`~flwr_fisher.wire.Additive`. Their
shapes depend on the head that they name, the moments must be positive semi-definite,
and the count must not exceed the metrics' number of examples.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from flwr_fisher.errors import WireError
from flwr_fisher.params import Params
from flwr_fisher.tangent.frozen_head import HeadSums
from flwr_fisher.wire.arrays import FORMAT_VERSION, check_same_shape
from flwr_fisher.wire.schema import Payload, description, part


@dataclass(frozen=True)
class HeadUpload(Payload):
    """A client's sums for a head in closed form; :meth:`of` makes it.

    Parameters
    ----------
    about : dict[str, Any]
        The names of the head's weight ``[C, f]`` and of its bias or None.
    gram, cross, count : Tensor
        The sums over the client's data.
    """

    disagreement: ClassVar[tuple[str, str]] = (
        "head/format",
        "has another head than most clients'",
    )

    about: dict[str, Any] = description("head/format")
    gram: Tensor = part(
        "head/gram",
        torch.float64,
        ("f", "f"),
        limit="curvature",
        second_moment=True,
        summed=True,
    )
    cross: Tensor = part(
        "head/cross", torch.float64, ("f", "C"), limit="curvature", summed=True
    )
    count: Tensor = part("head/count", torch.float64, above=0, counts=True, summed=True)

    @classmethod
    def of(cls, weight: str, bias: str | None, sums: HeadSums) -> Self:
        """Return the upload of sums for the head with these parameters."""
        about = {"version": FORMAT_VERSION, "weight": weight, "bias": bias}
        count = torch.tensor(sums.count, dtype=torch.float64)
        return cls(about, sums.gram, sums.cross, count)

    @property
    def weight(self) -> str:
        """The name of the head's weight."""
        return str(self.about["weight"])

    @property
    def bias(self) -> str | None:
        """The name of the head's bias, if it has one."""
        return self.about["bias"]  # type: ignore[no-any-return]

    @property
    def sums(self) -> HeadSums:
        """The sums over the client's data."""
        return HeadSums(self.gram, self.cross, float(self.count))

    @classmethod
    def lengths(cls, like: Params) -> dict[str, int]:
        """Return the largest linear layer's numbers of features and classes."""
        shapes = [value.shape for value in like.values() if value.dim() == 2]
        return {
            "f": 1 + max((features for _, features in shapes), default=0),
            "C": max((classes for classes, _ in shapes), default=0),
        }

    def check(self, like: Params) -> None:
        """Raise :class:`WireError` unless the model has such a head."""
        weight, bias = self.about.get("weight"), self.about.get("bias")
        if not isinstance(weight, str) or weight not in like or like[weight].dim() != 2:
            reason = f"not the weight of a linear layer: {str(weight)!r:.80}"
            raise WireError(reason, field="head/format")
        classes, features = like[weight].shape
        named = isinstance(bias, str) and bias in like
        if bias is not None and not (named and like[bias].shape == (classes,)):
            reason = f"not the head's bias: {str(bias)!r:.80}"
            raise WireError(reason, field="head/format")
        inputs = features + (bias is not None)
        check_same_shape("head/cross", self.cross.shape, (inputs, classes))

    def scaled(self, factors: Mapping[str, float], like: Params) -> Self:
        """Return it with scaled sums; one factor for both keeps the solution."""
        factor = factors.get("head/gram", 1.0)
        both = {"head/cross": factor, "head/gram": factor}
        shorter = min(factor, factors.get("head/cross", 1.0))
        return super().scaled(both | {"head/cross": shorter}, like)
