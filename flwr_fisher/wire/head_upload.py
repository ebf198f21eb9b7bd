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
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.errors import WireError
from flwr_fisher.params import Params
from flwr_fisher.tangent.frozen_head import HeadSums
from flwr_fisher.wire.arrays import read_named, tensors_to_arrays
from flwr_fisher.wire.checks import check_same_shape, check_second_moment
from flwr_fisher.wire.codec import FORMAT_VERSION, description_text, read_description
from flwr_fisher.wire.payload import Payload

_GRAM, _CROSS, _COUNT = "head/gram", "head/cross", "head/count"
_FORMAT = "head/format"


@dataclass(frozen=True)
class HeadUpload(Payload):
    """A client's sums for a head in closed form.

    Parameters
    ----------
    weight : str
        The head's weight, ``[C, f]``.
    bias : str | None
        The head's bias, if it has one.
    sums : HeadSums
        The sums over the client's data.
    """

    disagreement: ClassVar[tuple[str, str]] = (
        _FORMAT,
        "has another head than most clients'",
    )

    weight: str
    bias: str | None
    sums: HeadSums

    def layout(self) -> tuple[str, ...]:
        """Return the head's name, which must be equal for all clients."""
        return (self.weight, str(self.bias))

    def check_weight(self, weight: float) -> None:
        """Raise :class:`WireError` if it counts more examples than the metrics do."""
        if self.sums.count > weight:
            reason = f"{self.sums.count:g} examples, but the metrics say {weight:g}"
            raise WireError(reason, field=_COUNT)

    def curvature_norms(self) -> dict[str, float]:
        """Return the features' mean square, and the norm of the mean cross product."""
        sums = self.sums
        squares, products = sums.gram.diagonal().sum(), sums.cross.norm()
        return {
            _GRAM: float(squares) / sums.count,
            _CROSS: float(products) / sums.count,
        }

    def scaled(self, factors: Mapping[str, float], like: Params) -> Self:
        """Return it with scaled sums; one factor for both keeps the solution."""
        factor, sums = factors.get(_GRAM, 1.0), self.sums
        products = min(factor, factors.get(_CROSS, 1.0))
        lighter = replace(sums, gram=factor * sums.gram, cross=products * sums.cross)
        return replace(self, sums=lighter)

    def reweighted(self, factor: float) -> Self:
        """Return the sums of a client with `factor` times as many examples."""
        sums = self.sums
        more = HeadSums(factor * sums.gram, factor * sums.cross, factor * sums.count)
        return replace(self, sums=more)

    def to_arrays(self) -> ArrayRecord:
        """Return the one record that travels; it is lossless."""
        about = {"version": FORMAT_VERSION, "weight": self.weight, "bias": self.bias}
        tensors = {
            _FORMAT: description_text(about),
            _GRAM: self.sums.gram,
            _CROSS: self.sums.cross,
            _COUNT: torch.tensor(self.sums.count, dtype=torch.float64),
        }
        return tensors_to_arrays(tensors)

    @classmethod
    def from_arrays(cls, record: ArrayRecord, like: Params) -> "HeadUpload":
        """Read and check a record, none of which is trusted.

        Parameters
        ----------
        record : ArrayRecord
            The received record.
        like : Mapping[str, Tensor]
            The parameters that the server sent, including the head's.

        Raises
        ------
        WireError
            If a key is missing, unexpected or unreadable, has another shape or dtype,
            is not finite, or is not a second moment; it names the key. Also if there is
            no such head.
        """
        wide = torch.float64
        expected = {
            _GRAM: (wide, (None, None)),
            _CROSS: (wide, (None, None)),
            _COUNT: (wide, ()),
            _FORMAT: (torch.uint8, (None,)),
        }
        tensors = read_named(record, expected, limit=_largest(like))
        weight, bias = _head(tensors[_FORMAT], like)
        classes, features = like[weight].shape
        features += bias is not None
        check_same_shape(_GRAM, tensors[_GRAM].shape, (features, features))
        check_same_shape(_CROSS, tensors[_CROSS].shape, (features, classes))
        count = float(tensors[_COUNT])
        if count <= 0:
            raise WireError(f"must be positive, got {count:g}", field=_COUNT)
        check_second_moment(_GRAM, tensors[_GRAM].unsqueeze(0))
        return cls(weight, bias, HeadSums(tensors[_GRAM], tensors[_CROSS], count))


def _largest(like: Params) -> int:
    """Return the largest size of the sums, over a model's linear layers."""
    shapes = [value.shape for value in like.values() if value.dim() == 2]
    numbers = [(f + 1) * (f + 1 + c) for c, f in shapes]
    return 8 * max(numbers, default=0)


def _head(text: Tensor, like: Params) -> tuple[str, str | None]:
    """Return the names of the head's weight and bias."""
    found = read_description(text, _FORMAT)
    weight, bias = found.get("weight"), found.get("bias")
    if not isinstance(weight, str) or weight not in like or like[weight].dim() != 2:
        reason = f"not the weight of a linear layer: {str(weight)!r:.80}"
        raise WireError(reason, field=_FORMAT)
    outputs = like[weight].shape[:1]
    if bias is None:
        return weight, None
    if not isinstance(bias, str) or bias not in like or like[bias].shape != outputs:
        raise WireError(f"not the head's bias: {str(bias)!r:.80}", field=_FORMAT)
    return weight, bias
