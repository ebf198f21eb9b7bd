"""FedFisher with diagonals where one client can change a sum only so much."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord
from flwr.app.typing import ConfigRecordValues

from flwr_fisher.errors import WireError
from flwr_fisher.merge import DiagonalSums, private_sums
from flwr_fisher.merge.private_sums import VECTORS
from flwr_fisher.params import Params, clipped
from flwr_fisher.server.exchange import Exchange, ServerState, Step, Summed, Uploads
from flwr_fisher.server.privacy import Privacy, noised
from flwr_fisher.server.running_sums import MeanSums
from flwr_fisher.wire import VectorUpload

_CONTRIBUTION = VectorUpload.reader(*VECTORS)
_Merge = Callable[[ServerState, DiagonalSums], Step]


def private_exchange(
    privacy: Privacy, options: Mapping[str, ConfigRecordValues], merge: _Merge
) -> Exchange[Any]:
    """Return a round's exchange, of contributions of norm 1 at most.

    Parameters
    ----------
    privacy : Privacy
        How far they are clipped, and with what noise the server sees their sum.
    options : Mapping[str, …]
        What says which Fisher clients take.
    merge : Callable[[ServerState, DiagonalSums], Step]
        What is done with the sums.
    """
    sums = MeanSums(VectorUpload.named, weighted=False)

    def step(state: ServerState, uploads: Uploads[Any]) -> Step:
        mean: Params = sums.mean(uploads)
        if not uploads[0].members:  # of a sum, clients have added the noise
            mean = noised(mean, privacy, len(uploads))
        return merge(state, private_sums(mean, state.params, privacy.clipping_norm))

    asked: dict[str, ConfigRecordValues] = dict(options)
    asked |= {"job": "diagonal-sums", "clipping-norm": privacy.clipping_norm}
    unit = replace(privacy, clipping_norm=1.0)
    summed = Summed[Any](weighted=True, read=_CONTRIBUTION, privacy=unit)
    return Exchange(
        asked, _read, step, require_same_parameters=True, summed=summed, fold=sums
    )


def _read(record: ArrayRecord, like: Params) -> VectorUpload:
    """Read a client's contribution, which is clipped once more.

    Raises
    ------
    WireError
        If it is none.
    """
    upload = _CONTRIBUTION(record, like)
    if not upload.named():
        raise WireError("no contribution arrived", field=VECTORS[0])
    short = clipped(upload.named(), 1.0)
    parts = {
        name: {key: short[f"{name}/{key}"] for key in vector}
        for name, vector in upload.vectors.items()
    }
    return VectorUpload(parts)
