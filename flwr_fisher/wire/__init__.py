"""What travels between clients and server, and every check on what arrived."""

from flwr_fisher.wire.layout import PREFIX, curvature_to_tensors, tensors_to_curvature
from flwr_fisher.wire.payload import (
    FisherUpload,
    arrays_to_tensors,
    tensors_to_arrays,
)
from flwr_fisher.wire.size import serialized_bytes

__all__ = [
    "PREFIX",
    "FisherUpload",
    "arrays_to_tensors",
    "curvature_to_tensors",
    "serialized_bytes",
    "tensors_to_arrays",
    "tensors_to_curvature",
]
