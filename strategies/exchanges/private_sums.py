"""The exchange of differentially private FedFisher, for diagonals."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord

from flwr_fisher.merge import DiagonalSums, private_sums
from flwr_fisher.merge.private_sums import VECTORS
from flwr_fisher.params import Params, clipped
from flwr_fisher.server.exchange import Exchange, ServerState, Step, Summation, Uploads
from flwr_fisher.server.privacy import Privacy, noised
from flwr_fisher.wire import Additive, ConfigValue, RunningMean

_PART = "contribution/"
_CONTRIBUTION = Additive.reader(*(f"{_PART}{name}" for name in VECTORS))
_Merge = Callable[[ServerState, DiagonalSums], Step]


def private_exchange(
    privacy: Privacy,
    options: Mapping[str, ConfigValue],
    merge: _Merge,
    *,
    secure: bool,
) -> Exchange[Any]:
    """Return a round's exchange, for contributions with a norm of 1 at most.

    Parameters
    ----------
    privacy : Privacy
        The norm to which contributions are clipped, and the noise of the sum that the
        server sees.
    options : Mapping[str, …]
        The request's options for the clients' Fisher.
    merge : Callable[[ServerState, DiagonalSums], Step]
        Computes the step from the sums.
    secure : bool
        Whether clients have added the noise.
    """

    def step(state: ServerState, uploads: Uploads[Additive]) -> Step:
        (upload,) = uploads
        mean: Params = {
            key.removeprefix(_PART): value
            for key, value in upload.payload.tensors.items()
        }
        if not secure:
            mean = noised(mean, privacy, len(upload.members))
        return merge(state, private_sums(mean, state.params, privacy.clipping_norm))

    requested: dict[str, ConfigValue] = dict(options)
    requested |= {"job": "diagonal-sums", "clipping-norm": privacy.clipping_norm}
    unit = replace(privacy, clipping_norm=1.0)
    mean = Summation[Any](read=_CONTRIBUTION, privacy=unit, total=RunningMean())
    return Exchange(requested, _read, step, require_same_parameters=True, additive=mean)


def _read(record: ArrayRecord, like: Params) -> Additive:
    """Read a client's contribution, and clip it again."""
    own = _CONTRIBUTION(record, like)
    unit = clipped(own.tensors, 1.0)
    return Additive(
        {part: {k: unit[f"{part}/{k}"] for k in v} for part, v in own.parts.items()}
    )
