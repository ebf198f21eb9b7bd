"""What travels between clients and server, and every check on what arrived."""

from flwr_fisher.wire.arrays import arrays_to_tensors, tensors_to_arrays
from flwr_fisher.wire.budget import resolve, smallest_budget
from flwr_fisher.wire.codec import CODECS, Codec, get_codec
from flwr_fisher.wire.groups import SERVER, VectorUpload, server_vectors
from flwr_fisher.wire.layout import PREFIX, curvature_to_tensors, tensors_to_curvature
from flwr_fisher.wire.payload import FisherUpload
from flwr_fisher.wire.products import ProductUpload
from flwr_fisher.wire.roster import Roster
from flwr_fisher.wire.size import fedavg_bytes, serialized_bytes
from flwr_fisher.wire.sums import AGGREGATES, SumsUpload

__all__ = [
    "AGGREGATES",
    "CODECS",
    "PREFIX",
    "SERVER",
    "Codec",
    "FisherUpload",
    "ProductUpload",
    "Roster",
    "SumsUpload",
    "VectorUpload",
    "arrays_to_tensors",
    "curvature_to_tensors",
    "fedavg_bytes",
    "get_codec",
    "resolve",
    "serialized_bytes",
    "server_vectors",
    "smallest_budget",
    "tensors_to_arrays",
    "tensors_to_curvature",
]
