"""What clients add so that a server can precondition a merge of K-FAC Fishers.

``curvature/kfac/<weight>/A`` and ``…/G``, ``curvature/diagonal/<parameter>``
    a layer's partial traces, or what is no layer's diagonal;
``pull/<parameter>``
    the curvature's product with the way from the clients' mean to this client.
"""

from dataclasses import dataclass
from typing import ClassVar

from flwr.app import ArrayRecord

from flwr_fisher.curvature import Curvature
from flwr_fisher.errors import WireError
from flwr_fisher.params import Params
from flwr_fisher.wire.arrays import arrays_to_tensors, tensors_to_arrays
from flwr_fisher.wire.checks import check_layout
from flwr_fisher.wire.layout import PREFIX, curvature_to_tensors
from flwr_fisher.wire.payload import Payload
from flwr_fisher.wire.read_curvature import tensors_to_curvature
from flwr_fisher.wire.secure_upload import summand_bytes

_PULL = "pull/"


@dataclass(frozen=True)
class TracesUpload(Payload):
    r"""A client's summand, in the mean over clients by their examples.

    A policy does not limit it: it would have to be cut in every product alike.

    Parameters
    ----------
    traces : Curvature
        See :func:`~flwr_fisher.merge.partial_traces`.
    pull : Mapping[str, Tensor]
        :math:`F_i (\theta_i - \bar\theta)`.
    """

    disagreement: ClassVar[tuple[str, str]] = (
        PREFIX,
        "covers other parameters than most clients' does",
    )

    traces: Curvature
    pull: Params

    def layout(self) -> tuple[str, ...]:
        """Return the kinds and shapes of the parts, which clients must share."""
        return tuple(
            f"{key} {tuple(value.shape)}"
            for key, value in curvature_to_tensors(self.traces).items()
        )

    def to_arrays(self) -> ArrayRecord:
        """Return the one record that travels; it is lossless."""
        pulls = {f"{_PULL}{name}": value for name, value in self.pull.items()}
        return tensors_to_arrays({**curvature_to_tensors(self.traces), **pulls})

    @classmethod
    def from_arrays(cls, record: ArrayRecord, like: Params) -> "TracesUpload":
        """Read and check a record, none of which is trusted.

        Raises
        ------
        WireError
            Naming the key that is missing, unexpected, unreadable, of another shape or
            dtype, not finite, not symmetric or negative on a diagonal.
        """
        tensors = arrays_to_tensors(
            record, limit=summand_bytes(like), most=4 * len(like)
        )
        pulls = {k: v for k, v in tensors.items() if k.startswith(_PULL)}
        parts = {k: v for k, v in tensors.items() if k not in pulls}
        for key in parts:
            if not key.startswith(PREFIX):
                raise WireError("unexpected key", field=key)
        traces = tensors_to_curvature(parts, like)
        pull = {}
        for name in traces.shapes:
            if (value := pulls.pop(f"{_PULL}{name}", None)) is None:
                raise WireError("missing", field=f"{_PULL}{name}")
            check_layout(f"{_PULL}{name}", value, like[name].shape, like[name].dtype)
            pull[name] = value
        for key in pulls:
            raise WireError("unexpected key", field=key)
        return cls(traces, pull)
