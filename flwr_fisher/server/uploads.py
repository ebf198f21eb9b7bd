"""What most steps make of a round's uploads."""

from typing import Any

from torch import Tensor

from flwr_fisher.params import weighted_mean
from flwr_fisher.server.exchange import Uploads
from flwr_fisher.wire import VectorUpload


def weights_of(uploads: Uploads[Any]) -> list[float]:
    """Return the clients' weights."""
    return [upload.num_examples for upload in uploads]


def mean_vector(uploads: Uploads[VectorUpload], name: str) -> dict[str, Tensor]:
    """Return the weighted mean of the clients' vectors of that name."""
    vectors = [upload.payload.vectors[name] for upload in uploads]
    return weighted_mean(vectors, weights_of(uploads))
