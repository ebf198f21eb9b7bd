"""The upload of a client that trained: its parameters and its Fisher there."""

from dataclasses import dataclass

from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.curvature import Curvature
from flwr_fisher.errors import WireError
from flwr_fisher.merge import LocalPosterior
from flwr_fisher.params import Params
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
from flwr_fisher.wire.layout import PREFIX, check_keys, curvature_to_tensors
from flwr_fisher.wire.payload import Payload
from flwr_fisher.wire.read_curvature import tensors_to_curvature


@dataclass(frozen=True)
class FisherUpload(Payload):
    """A client's trained parameters and its Fisher there.

    Sent losslessly, the parameters keep their keys, and the curvature's tensors are
    more keys under ``curvature/``: a strategy that does not know them can still read
    the record. Packed, parameters and curvature are one array of bytes.

    Parameters
    ----------
    params : dict[str, Tensor]
        Parameters and buffers.
    curvature : Curvature
        Over the trained parameters.
    """

    params: dict[str, Tensor]
    curvature: Curvature

    def layout(self) -> tuple[str, ...]:
        """Return the blocks of the curvature, which clients must share."""
        blocks = self.curvature.blocks()
        return tuple(f"{type(b).__name__}: {list(b.shapes)}" for b in blocks)

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
        read = _read_plain if codec.scheme == "lossless" else _read_packed
        tensors = read(record, like, codec, structure)
        extras = {k: v for k, v in tensors.items() if k.startswith(PREFIX)}
        params = {k: v for k, v in tensors.items() if k not in extras}
        _check_params(params, like)
        if not extras:
            raise WireError("no curvature arrived", field=PREFIX)
        ordered = {key: params[key] for key in like}
        return cls(ordered, tensors_to_curvature(extras, ordered))


def _read_plain(
    record: ArrayRecord, like: Params, codec: Codec, structure: str | None
) -> dict[str, Tensor]:
    tensors = arrays_to_tensors(record)
    text = tensors.pop(FORMAT, None)
    codec.check_description(parse_text(text, FORMAT), field=FORMAT)
    for key, tensor in tensors.items():
        if key.startswith(PREFIX) and not tensor.is_floating_point():
            raise WireError(f"dtype {tensor.dtype}, expected a float", field=key)
    check_keys((k for k in tensors if k.startswith(PREFIX)), like, structure)
    return tensors


def _read_packed(
    record: ArrayRecord, like: Params, codec: Codec, structure: str | None
) -> dict[str, Tensor]:
    entries, description = from_container(
        record, limit=byte_limit(like, codec), count=len(like)
    )
    codec.check_description(description, field=FORMAT)
    for key in entries:
        if not key.startswith(PREFIX) and key not in like:
            raise WireError("unexpected key", field=key)
    check_keys((k for k in entries if k.startswith(PREFIX)), like, structure)
    form = paper if codec.scheme == "paper" else packing
    return {
        key: form.unpack_part(entry, like, field=key)
        if key.startswith(PREFIX)
        else form.unpack_params(entry, like[key], field=key)
        for key, entry in entries.items()
    }


def _check_params(params: Params, like: Params) -> None:
    for key in like.keys() - params.keys():
        raise WireError("missing", field=key)
    for key, tensor in params.items():
        if key not in like:
            raise WireError("unexpected key", field=key)
        check_shape_and_dtype(key, tensor, like[key].shape, like[key].dtype)
