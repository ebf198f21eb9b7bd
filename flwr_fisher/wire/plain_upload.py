"""The upload of a client that trained for one of Flower's own strategies."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.errors import WireError
from flwr_fisher.params import Params
from flwr_fisher.wire.arrays import arrays_to_tensors, tensors_to_arrays
from flwr_fisher.wire.displacement import displacements, drawn_back
from flwr_fisher.wire.payload import Payload

_SLACK = 4096  # bytes that one array's headers may take
_MOST = 4  # such a strategy may have clients send several tensors of the model's size


@dataclass(frozen=True)
class PlainUpload(Payload):
    """A record of arrays of which nothing is known but the model's parameters.

    Parameters
    ----------
    tensors : dict[str, Tensor]
        All that arrived, in its order.
    """

    disagreement: ClassVar[tuple[str, str]] = (
        "arrays",
        "has other arrays than most clients' have",
    )

    tensors: dict[str, Tensor]

    def layout(self) -> tuple[str, ...]:
        """Return names, dtypes and shapes, which clients must share."""
        return tuple(
            f"{name} {value.dtype} {tuple(value.shape)}"
            for name, value in sorted(self.tensors.items())
        )

    def to_arrays(self) -> ArrayRecord:
        """Return the one record that travels."""
        return tensors_to_arrays(self.tensors)

    def step_norms(self, like: Params) -> dict[str, float]:
        """Return how far the parameters are from those that were sent out."""
        return displacements(self.tensors, like)

    def scaled(self, factors: Mapping[str, float], like: Params) -> Self:
        """Return it with parameters drawn back."""
        return replace(self, tensors=dict(drawn_back(self.tensors, like, factors)))

    @classmethod
    def from_arrays(cls, record: ArrayRecord, like: Params) -> "PlainUpload":
        """Read and check a record.

        Raises
        ------
        WireError
            If an array is unreadable or not finite, a parameter has another shape than
            was sent out, or the record is much larger than the model.
        """
        room = sum(value.nbytes + _SLACK for value in like.values())
        tensors = arrays_to_tensors(record, limit=_MOST * room)
        for name, value in tensors.items():
            if name in like and value.shape != like[name].shape:
                reason = f"shape {tuple(value.shape)}, expected "
                raise WireError(f"{reason}{tuple(like[name].shape)}", field=name)
        return cls(tensors)
