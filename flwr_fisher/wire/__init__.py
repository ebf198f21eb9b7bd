"""The payloads between clients and server, and every check of what arrives."""

from flwr_fisher.wire.additive import Additive, exact_mean
from flwr_fisher.wire.arrays import (
    arrays_bytes,
    arrays_to_tensors,
    fedavg_bytes,
    serialized_bytes,
    tensors_to_arrays,
)
from flwr_fisher.wire.budget import resolve
from flwr_fisher.wire.codec import LOSSLESS, Codec
from flwr_fisher.wire.fisher_upload import FisherUpload
from flwr_fisher.wire.head_upload import (
    HeadLossUpload,
    HeadUpload,
    LossUpload,
    NoHead,
    read_head,
)
from flwr_fisher.wire.layout import (
    PREFIX,
    checked_to_curvature,
    curvature_to_tensors,
    tensors_to_curvature,
)
from flwr_fisher.wire.options import (
    NUM_EXAMPLES,
    REGRESSION,
    ConfigValue,
    join_groups,
    named_options,
    split_groups,
)
from flwr_fisher.wire.schema import Payload, description, part

__all__ = [
    "LOSSLESS",
    "NUM_EXAMPLES",
    "PREFIX",
    "REGRESSION",
    "Additive",
    "Codec",
    "ConfigValue",
    "FisherUpload",
    "HeadLossUpload",
    "HeadUpload",
    "LossUpload",
    "NoHead",
    "Payload",
    "arrays_bytes",
    "arrays_to_tensors",
    "checked_to_curvature",
    "curvature_to_tensors",
    "description",
    "exact_mean",
    "fedavg_bytes",
    "join_groups",
    "named_options",
    "part",
    "read_head",
    "resolve",
    "serialized_bytes",
    "split_groups",
    "tensors_to_arrays",
    "tensors_to_curvature",
]
