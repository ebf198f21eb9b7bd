"""A client's upload of trained parameters and their Fisher."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from flwr.app import ArrayRecord, MetricRecord

from flwr_fisher.curvature import BlockDiagonal, Curvature, Deferred, Kronecker
from flwr_fisher.errors import ClientError, ConfigurationError, WireError
from flwr_fisher.log_lines import logger
from flwr_fisher.merge import LocalPosterior
from flwr_fisher.params import DeferredParams, Params, check_finite
from flwr_fisher.wire.arrays import (
    SLACK,
    arrays_to_tensors,
    check_count,
    check_layout,
    check_same_keys,
    check_size,
    description_text,
    read_description,
    read_with_model,
    tensors_to_arrays,
)
from flwr_fisher.wire.budget import PackingError, byte_limit, pack_upload
from flwr_fisher.wire.codec import LOSSLESS, Codec
from flwr_fisher.wire.container import FORMAT, from_container, to_container
from flwr_fisher.wire.layout import (
    PREFIX,
    block_of,
    check_keys,
    check_shape,
    curvature_to_tensors,
    join_blocks,
    keys_by_block,
    tensors_to_curvature,
    trace_name,
)
from flwr_fisher.wire.matrices import CheckedPart, check_part
from flwr_fisher.wire.quantise import decode_param
from flwr_fisher.wire.schema import Payload, displacements, drawn_back
from flwr_fisher.wire.size import fedavg_bytes, reply_bytes


@dataclass(frozen=True)
class FisherUpload(Payload):
    """A client's trained parameters and their Fisher.

    In a lossless upload, the parameters keep their keys, and the curvature's tensors
    have further keys under ``curvature/``. A strategy that does not know them can still
    read the record. In a packed upload, parameters and curvature are one array of
    bytes.

    A packed upload stays packed on the server, and each layer is unpacked when it is
    used: the parameters once at the door and once in the merge, as
    :class:`~flwr_fisher.params.DeferredParams`, and the curvature's blocks in the merge
    only, as :class:`~flwr_fisher.curvature.Deferred`.

    Parameters
    ----------
    params : Mapping[str, Tensor]
        Parameters and buffers.
    curvature : Curvature
        The curvature over the trained parameters.
    """

    params: Params
    curvature: Curvature

    def layout(self) -> tuple[str, ...]:
        """Return the curvature's blocks, which must be equal for all clients."""
        return tuple(
            f"{b.kind}{f' of {b.groups} groups' * (b.groups > 1)}: {list(b.shapes)}"
            for b in self.curvature.blocks()
        )

    def step_norms(self, like: Params) -> dict[str, float]:
        """Return the distance of the parameters from those sent out."""
        return displacements(self.params, like)

    def curvature_norms(self) -> dict[str, float]:
        """Return the curvature's trace, layer by layer."""
        return {trace_name(block): block.trace() for block in self.curvature.blocks()}

    def scaled(self, factors: Mapping[str, float], like: Params) -> Self:
        """Return it with a smaller step, and layers' curvatures scaled down."""
        blocks = [
            block.scaled(factors.get(trace_name(block), 1.0))
            for block in self.curvature.blocks()
        ]
        params = drawn_back(self.params, like, factors)
        return replace(self, params=params, curvature=BlockDiagonal(blocks))

    def posterior(self, num_examples: float) -> LocalPosterior:
        """Return it as a posterior, with the client's weight, for a merge."""
        return LocalPosterior(self.params, self.curvature, num_examples)

    def to_arrays(self, codec: Codec = LOSSLESS) -> ArrayRecord:
        """Return the one record that travels.

        If packing fails, the training is not lost: the upload is lossless if the
        codec's budget has room for that, and the log says why.

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
        ClientError
            If packing fails, and the budget has no room for a lossless upload. It names
            what cannot be packed.
        """
        parts = curvature_to_tensors(self.curvature)
        about = {FORMAT: description_text(codec.describe())}
        if codec == LOSSLESS:
            return tensors_to_arrays({**self.params, **parts, **about})
        check_finite({**self.params, **parts}, "the upload")
        try:
            # As many columns of each factor as the codec's budget has room for.
            entries = pack_upload(self.params, parts, codec, self.curvature.shapes)
            return to_container({**about, **entries})
        except ConfigurationError:
            raise
        except Exception as error:  # a codec may fail in any way
            named = isinstance(error, PackingError)
            reason = f"{error}" if named else f"{type(error).__name__}: {error}"
            return _sent_plain(self.params, parts, codec, reason)

    @classmethod
    def from_arrays(
        cls,
        record: ArrayRecord,
        like: Params,
        codec: Codec = LOSSLESS,
        *,
        structure: str | None = None,
    ) -> "FisherUpload":
        """Read and check a record, none of which is trusted.

        Parameters
        ----------
        record : ArrayRecord
            The received record.
        like : Mapping[str, Tensor]
            The parameters that the server sent. Keys, shapes and dtypes must be the
            same.
        codec : Codec, default lossless
            The one that was requested.
        structure : "kfac" | "diagonal" | "ekfac" | "block" | "dense", optional
            The requested structure. By default it may be any.

        Raises
        ------
        WireError
            If a key is missing, unexpected or unreadable, has another shape or dtype,
            or is not finite; it names the key. Also if the format or the codec is
            another one, or the record is larger than the codec's budget.
        """
        if record.keys() == like.keys():
            raise WireError(
                "missing: a client's reply has fisher_arrays(message, context, model, "
                "trainloader) in place of ArrayRecord(model.state_dict())",
                field=FORMAT,
            )
        plain = codec == LOSSLESS or _is_unpacked(record)
        read = _read_plain if plain else _read_packed
        return cls(*read(record, like, codec, structure))


def _sent_plain(
    params: Params, parts: Params, codec: Codec, reason: str
) -> ArrayRecord:
    """Return the lossless record of an upload that could not be packed."""
    text = description_text(codec.describe(packed=False))
    record = tensors_to_arrays({**params, **parts, FORMAT: text})
    size, limit = reply_bytes(record, MetricRecord()), byte_limit(params, codec)
    if size > limit:
        raise ClientError(
            f"packing the upload failed: {reason}. Without packing it has {size} "
            f"bytes, and the server takes {limit}: use codec='lossless', or a codec "
            "with a budget of "
            f"{math.ceil(10 * size / fedavg_bytes(params) + 1) / 10}"
        )
    logger.warning("Sending the upload without packing, %s bytes: %s", size, reason)
    return record


def _is_unpacked(record: ArrayRecord) -> bool:
    """Return whether a record says that its client could not pack it."""
    if (text := record.get(FORMAT)) is None:
        return False
    try:
        about = arrays_to_tensors(ArrayRecord({FORMAT: text}), limit=SLACK)[FORMAT]
        return read_description(about, FORMAT).get("packed") is False
    except WireError:
        return False


def _read_plain(
    record: ArrayRecord, like: Params, codec: Codec, structure: str | None
) -> tuple[Params, Curvature]:
    """Return the parameters and the curvature of a lossless upload.

    If the server requested a packed one, it may be no larger than that one may be.
    """
    as_asked = codec == LOSSLESS
    limit = None if as_asked else byte_limit(like, codec)
    if limit is not None:
        check_size(record, limit)
    check_count(record, 4 * len(like) + 1)  # E-KFAC has three tensors a parameter
    curvature_keys = _curvature_keys(record, like, structure)

    def check(key: str, shape: torch.Size) -> None:
        if key in curvature_keys:
            check_shape(key, shape, like)

    params, parts = read_with_model(record, like, check)
    codec.check_description(parts.pop(FORMAT, None), field=FORMAT, packed=as_asked)
    if limit is not None and (size := reply_bytes(record, MetricRecord())) > limit:
        reason = f"{size} bytes arrived, but at most {limit} are allowed"
        raise WireError(reason, field=FORMAT)
    _check_has_curvature(curvature_keys)
    return params, tensors_to_curvature(parts, params)


def _read_packed(
    record: ArrayRecord, like: Params, codec: Codec, structure: str | None
) -> tuple[Params, Curvature]:
    """Return the parameters and the deferred curvature of a packed upload."""
    entries = from_container(record, limit=byte_limit(like, codec), count=len(like))
    codec.check_description(entries.get(FORMAT), field=FORMAT)
    curvature_keys = _curvature_keys(entries, like, structure)
    _check_has_curvature(curvature_keys)
    later = DeferredParams(
        like, lambda key: decode_param(entries[key], like[key], field=key)
    )
    for key, tensor in later.items():
        check_layout(key, tensor, like[key].shape, like[key].dtype)
    checked = {key: check_part(entries[key], like, field=key) for key in curvature_keys}
    blocks = [
        _deferred({key: checked[key] for key in keys}, later.layout)
        for keys in keys_by_block(checked, like)
    ]
    return later, join_blocks(blocks)


def _deferred(parts: Mapping[str, CheckedPart], like: Params) -> Deferred:
    """Return the deferred block of checked parts."""
    stand_ins = {key: part.stand_in() for key, part in parts.items()}
    block = block_of(stand_ins, like)

    def make() -> Curvature:
        return block_of({key: part.make() for key, part in parts.items()}, like)

    return Deferred(block, make, _trace(block, [p.traces for p in parts.values()]))


def _trace(block: Curvature, traces: Sequence[Sequence[float]]) -> float:
    """Return a block's trace from its parts' traces."""
    if isinstance(block, Kronecker):
        A, G = traces
        return sum(a * g for a, g in zip(A, G, strict=True))
    return sum(map(sum, traces))


def _curvature_keys(
    keys: Collection[str], like: Params, structure: str | None
) -> dict[str, None]:
    """Check all keys, and return those of the curvature."""
    curvature_keys = {k: None for k in keys if k.startswith(PREFIX) and k != FORMAT}
    check_same_keys(set(keys) - curvature_keys.keys() - {FORMAT}, like)
    check_keys(curvature_keys, like, structure)
    return curvature_keys


def _check_has_curvature(curvature_keys: Collection[str]) -> None:
    if not curvature_keys:
        raise WireError("has no curvature", field=PREFIX)
