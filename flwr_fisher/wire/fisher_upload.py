"""The upload of a client that trained: its parameters and its Fisher there."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from flwr.app import ArrayRecord

from flwr_fisher.curvature import BlockDiagonal, Curvature
from flwr_fisher.merge import LocalPosterior
from flwr_fisher.params import Params, check_finite
from flwr_fisher.wire import paper
from flwr_fisher.wire.arrays import (
    tensors_to_arrays,
)
from flwr_fisher.wire.budget import byte_limit, pack_upload
from flwr_fisher.wire.codec import CODECS, Codec
from flwr_fisher.wire.container import (
    FORMAT,
    text_of,
    to_container,
)
from flwr_fisher.wire.displacement import displacements, drawn_back
from flwr_fisher.wire.layout import (
    curvature_to_tensors,
    trace_name,
)
from flwr_fisher.wire.payload import Payload
from flwr_fisher.wire.read_fisher import read_packed, read_plain


@dataclass(frozen=True)
class FisherUpload(Payload):
    """A client's trained parameters and its Fisher there.

    Sent losslessly, the parameters keep their keys, and the curvature's tensors are
    more keys under ``curvature/``: a strategy that does not know them can still read
    the record. Packed, parameters and curvature are one array of bytes.

    What arrived packed stays so, and is unpacked layer by layer when it is used: then
    the parameters are :class:`~flwr_fisher.params.DeferredParams`, and the curvature's
    blocks are :class:`~flwr_fisher.curvature.Deferred`.

    Parameters
    ----------
    params : Mapping[str, Tensor]
        Parameters and buffers.
    curvature : Curvature
        Over the trained parameters.
    """

    params: Params
    curvature: Curvature

    def layout(self) -> tuple[str, ...]:
        """Return the blocks of the curvature, which clients must share."""
        blocks = self.curvature.blocks()
        return tuple(f"{block.kind}: {list(block.shapes)}" for block in blocks)

    def step_norms(self, like: Params) -> dict[str, float]:
        """Return how far the parameters are from those that were sent out."""
        return displacements(self.params, like)

    def curvature_norms(self) -> dict[str, float]:
        """Return the curvature's trace, layer by layer."""
        return {trace_name(block): block.trace() for block in self.curvature.blocks()}

    def scaled(self, factors: Mapping[str, float], like: Params) -> Self:
        """Return it with parameters drawn back, and layers' curvatures scaled down."""
        blocks = [
            block.scaled(factors.get(trace_name(block), 1.0))
            for block in self.curvature.blocks()
        ]
        params = drawn_back(self.params, like, factors)
        return replace(self, params=params, curvature=BlockDiagonal(blocks))

    def posterior(self, num_examples: float) -> LocalPosterior:
        """Return it as the merging functions take it, with the client's weight."""
        return LocalPosterior(self.params, self.curvature, num_examples)

    def to_arrays(self, codec: Codec = CODECS["lossless"]) -> ArrayRecord:
        """Return the one record that travels.

        Parameters
        ----------
        codec : Codec, default lossless
            As :func:`~flwr_fisher.wire.resolve` returns it.

        Raises
        ------
        ConfigurationError
            If the codec's budget is too small.
        ParamsError
            If a tensor holds NaN or infinity.
        """
        parts = curvature_to_tensors(self.curvature)
        if codec.scheme == "lossless":
            return tensors_to_arrays(
                {**self.params, **parts, FORMAT: text_of(codec.describe())}
            )
        check_finite({**self.params, **parts}, "the upload")
        if codec.scheme == "paper":
            limit = byte_limit(self.params, codec)
            entries = paper.pack_as_paper(self.params, parts, limit)
        else:
            entries = pack_upload(self.params, parts, codec, self.curvature.shapes)
        return to_container(entries, codec.describe())

    @classmethod
    def from_arrays(
        cls,
        record: ArrayRecord,
        like: Params,
        codec: Codec = CODECS["lossless"],
        *,
        structure: str | None = None,
    ) -> "FisherUpload":
        """Read and check a record, none of which is trusted.

        Parameters
        ----------
        record : ArrayRecord
            What arrived.
        like : Mapping[str, Tensor]
            The parameters that were sent out: keys, shapes and dtypes must be theirs.
        codec : Codec, default lossless
            The one that was requested.
        structure : "kfac" | "diagonal" | "ekfac" | "block" | "dense", optional
            The one that was requested. By default it may be any.

        Raises
        ------
        WireError
            Naming the key that is missing, unexpected, unreadable, of another shape or
            dtype, or not finite; or if the format or the codec is another one, or the
            record is larger than the codec's budget.
        """
        read = read_plain if codec.scheme == "lossless" else read_packed
        return cls(*read(record, like, codec, structure))
