"""TCT's uploads for a server that sees only sums over clients.

``tct/sum``, ``tct/squares``, ``tct/count``, ``tct/format``
    in place of moments: the features' sum and sum of squares ``[p]`` in float64, the
    number of examples, and JSON with the replaced layer's name and the number of
    classes;
``tct/eigenvalues``
    in place of the largest eigenvalue: int64 ``[BINS]``, with a one in its bin. The sum
    is a histogram of the clients' eigenvalues, to an eighth of an octave.

Local weights need no other form: their mean is enough.
"""

import json
import math

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.errors import WireError
from flwr_fisher.params import Params
from flwr_fisher.tangent import FeatureMoments
from flwr_fisher.wire.arrays import bytes_of, description_text, text_from
from flwr_fisher.wire.tangent_upload import (
    COUNT,
    KEYS,
    LARGEST,
    LONGEST,
    TangentUpload,
    check_moments,
    read_tangent,
)

EIGENVALUES, _FORMAT = "eigenvalues", "format"
_PER_OCTAVE, _LOWEST = 8, -40  # bins, and the exponent of 2 of the lowest one
_MOST_CLIENTS = 2**16  # in one sum, for which its words have room
BINS = 1 - 2 * _LOWEST * _PER_OCTAVE


def moment_sums(
    moments: FeatureMoments, num_classes: int, head: str
) -> dict[str, Tensor]:
    """Return a client's contribution in place of its moments."""
    mean, n = moments.mean, moments.count
    return {
        "sum": n * mean,
        "squares": moments.m2 + n * mean.square(),
        COUNT: torch.tensor(n),
        _FORMAT: description_text({"head": head, "num-classes": num_classes}),
    }


def eigenvalue_bin(value: float) -> Tensor:
    """Return zeros with a one in the lowest bin that contains an eigenvalue.

    Examples
    --------
    >>> upper_edges(eigenvalue_bin(3.0))
    [3.08...]
    """
    place = math.ceil(_PER_OCTAVE * math.log2(value)) if value > 0 else -BINS
    counts = torch.zeros(BINS, dtype=torch.int64)
    counts[min(max(place - _LOWEST * _PER_OCTAVE, 0), BINS - 1)] = 1
    return counts


def upper_edges(counts: Tensor) -> list[float]:
    """Return the upper edge of each counted client's bin."""
    places = torch.arange(BINS).repeat_interleave(counts).tolist()
    return [2.0 ** (place / _PER_OCTAVE + _LOWEST) for place in places]


def read_moment_sums(
    num_features: int, record: ArrayRecord, like: Params
) -> TangentUpload:
    """Read and check the sums of at most `num_features` features.

    A variance is a difference of sums. If it is below their resolution, it counts as 0.

    Raises
    ------
    WireError
        As for moments.
    """
    expected = {
        "sum": (torch.float64, (None,)),
        "squares": (torch.float64, (None,)),
        COUNT: (torch.int64, ()),
        _FORMAT: (torch.uint8, (None,)),
    }
    read = read_tangent(record, expected, limit=16 * num_features + LONGEST)
    tensors = read.tensors
    if len(tensors["sum"]) != len(tensors["squares"]):
        reason = f"{len(tensors['squares'])} entries for {len(tensors['sum'])} features"
        raise WireError(reason, field=f"{KEYS}squares")
    head, num_classes = _about(tensors[_FORMAT])
    count = tensors[COUNT]
    mean = tensors["sum"] / count
    moments = {
        "mean": mean,
        "m2": (tensors["squares"] - count * mean.square()).clamp_min(0),
        COUNT: count,
        "num-classes": torch.tensor(num_classes),
        "head": bytes_of(head),
    }
    check_moments(num_features, moments, like)
    return TangentUpload(moments, read.digest)


def read_eigenvalues(record: ArrayRecord, like: Params) -> TangentUpload:
    """Read the histogram of the clients' largest eigenvalues.

    Raises
    ------
    WireError
        As for one eigenvalue; also if no client was counted, or more clients than the
        sum has. The result has an edge for each client.
    """
    expected = {EIGENVALUES: (torch.int64, (BINS,))}
    read = read_tangent(record, expected, limit=8 * BINS)
    counts = read.tensors[EIGENVALUES]
    odd = (counts < 0).any() or (counts > _MOST_CLIENTS).any()
    if odd or not 0 < counts.sum() <= _MOST_CLIENTS:
        raise WireError("not counts of clients", field=f"{KEYS}{EIGENVALUES}")
    edges = torch.tensor(upper_edges(counts), dtype=torch.float64)
    return TangentUpload({LARGEST: edges}, read.digest)


def _about(text: Tensor) -> tuple[str, int]:
    try:
        about = json.loads(text_from(text))
        return str(about["head"]), int(about["num-classes"])
    except (ValueError, KeyError, TypeError) as error:
        reason = f"is no description: {error}"
        raise WireError(reason, field=f"{KEYS}{_FORMAT}") from error
