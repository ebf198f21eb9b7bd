"""The upload of a client that trained: its parameters and its Fisher there."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.curvature import BlockDiagonal, Curvature, Deferred
from flwr_fisher.errors import WireError
from flwr_fisher.merge import LocalPosterior
from flwr_fisher.params import DeferredParams, Params
from flwr_fisher.wire import packing, paper
from flwr_fisher.wire.arrays import arrays_to_tensors, tensors_to_arrays
from flwr_fisher.wire.budget import byte_limit, pack_upload
from flwr_fisher.wire.checks import check_shape_and_dtype
from flwr_fisher.wire.codec import CODECS, Codec
from flwr_fisher.wire.container import (
    FORMAT,
    from_container,
    parse_text,
    text_of,
    to_container,
)
from flwr_fisher.wire.layout import (
    PREFIX,
    check_keys,
    curvature_to_tensors,
    parse_key,
)
from flwr_fisher.wire.payload import Payload
from flwr_fisher.wire.read_curvature import tensors_to_curvature

# By the codec's scheme: what unpacks a parameter, and a part of a curvature.
_FORMS = {
    "packed": (packing.unpack_params, packing.unpack_part),
    "paper": (paper.unpack_params, paper.unpack_part),
}


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
        """
        parts = curvature_to_tensors(self.curvature)
        if codec.scheme == "lossless":
            return tensors_to_arrays(
                {**self.params, **parts, FORMAT: text_of(codec.describe())}
            )
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
        if codec.scheme == "lossless":
            return _read_plain(record, like, codec, structure)
        return _read_packed(record, like, codec, structure)


def _read_plain(
    record: ArrayRecord, like: Params, codec: Codec, structure: str | None
) -> FisherUpload:
    tensors = arrays_to_tensors(record)
    text = tensors.pop(FORMAT, None)
    codec.check_description(parse_text(text, FORMAT), field=FORMAT)
    params, extras = _apart(tensors)
    for key, tensor in extras.items():
        if not tensor.is_floating_point():
            raise WireError(f"dtype {tensor.dtype}, expected a float", field=key)
    _check_names(params, like)
    check_keys(extras, like, structure)
    _check_params(params, like)
    _check_any(extras)
    ordered = {key: params[key] for key in like}
    return FisherUpload(ordered, tensors_to_curvature(extras, ordered))


def _read_packed(
    record: ArrayRecord, like: Params, codec: Codec, structure: str | None
) -> FisherUpload:
    entries, description = from_container(
        record, limit=byte_limit(like, codec), count=len(like)
    )
    codec.check_description(description, field=FORMAT)
    params, extras = _apart(entries)
    _check_names(params, like)
    check_keys(extras, like, structure)
    unpack_params, unpack_part = _FORMS[codec.scheme]

    def read_params(key: str) -> Tensor:
        return unpack_params(params[key], like[key], field=key)

    def read_blocks(keys: Iterable[str]) -> Sequence[Curvature]:
        parts = {key: unpack_part(extras[key], like, field=key) for key in keys}
        return tensors_to_curvature(parts, like).blocks()

    def read_block(keys: Iterable[str]) -> Curvature:
        return read_blocks(keys)[0]

    _check_any(extras)
    blocks = []
    for block in read_blocks(extras):
        own = block.shapes.keys()
        keys = [k for k in extras if not own.isdisjoint(parse_key(k, like)[1])]
        blocks.append(Deferred(block, partial(read_block, keys)))
    deferred = DeferredParams(like, read_params)
    _check_params(deferred, like)
    return FisherUpload(deferred, BlockDiagonal(blocks))


def _apart(tensors: Params) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters, and the curvature's tensors."""
    extras = {k: v for k, v in tensors.items() if k.startswith(PREFIX)}
    return {k: v for k, v in tensors.items() if k not in extras}, extras


def _check_any(extras: Params) -> None:
    if not extras:
        raise WireError("no curvature arrived", field=PREFIX)


def _check_names(params: Params, like: Params) -> None:
    for key in like.keys() - params.keys():
        raise WireError("missing", field=key)
    for key in params.keys() - like.keys():
        raise WireError("unexpected key", field=key)


def _check_params(params: Params, like: Params) -> None:
    for key, tensor in params.items():
        check_shape_and_dtype(key, tensor, like[key].shape, like[key].dtype)
