"""How far clients came: their uploads' distance from where a round began."""

from collections.abc import Collection, Iterable, Sequence

from torch import Tensor

from flwr_fisher.params import Params, select, subtract, weighted_mean
from flwr_fisher.strategies.state import Upload
from flwr_fisher.wire import VectorUpload

__all__ = ["average", "double", "updates", "vectors", "weights_of", "with_averages"]


def weights_of(uploads: Sequence[Upload]) -> list[float]:
    """Return the clients' weights."""
    return [upload.num_examples for upload in uploads]


def vectors(uploads: Sequence[Upload], name: str) -> list[dict[str, Tensor]]:
    """Return each client's vector of that name."""
    return [_payload(upload).vectors[name] for upload in uploads]


def double(params: Params, names: Iterable[str]) -> dict[str, Tensor]:
    """Return some parameters in float64, where a step away and back changes no bit."""
    return {k: v.double() for k, v in select(params, names).items()}


def updates(
    start: Params, uploads: Sequence[Upload], names: Collection[str]
) -> list[dict[str, Tensor]]:
    r"""Return each client's :math:`\theta - \theta_i` over those names, in float64."""
    begun = double(start, names)
    return [subtract(begun, double(_payload(u).params, names)) for u in uploads]


def average(uploads: Sequence[Upload]) -> dict[str, Tensor]:
    """Return FedAvg's average of all that clients uploaded as parameters."""
    return weighted_mean([_payload(u).params for u in uploads], weights_of(uploads))


def with_averages(
    start: Params, stepped: Params, uploads: Sequence[Upload]
) -> dict[str, Tensor]:
    """Return what was stepped, in its own dtypes, and everything else averaged."""
    averaged = average(uploads)
    return {
        key: stepped[key].to(value.dtype) if key in stepped else averaged[key]
        for key, value in start.items()
    }


def _payload(upload: Upload) -> VectorUpload:
    assert isinstance(upload.payload, VectorUpload)
    return upload.payload
