"""A client's upload of trained parameters and their Fisher."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from flwr.app import ArrayRecord

from flwr_fisher.curvature import BlockDiagonal, Curvature, Deferred
from flwr_fisher.errors import WireError
from flwr_fisher.merge import LocalPosterior
from flwr_fisher.params import Params, bias_of, check_finite
from flwr_fisher.wire.arrays import (
    check_same_keys,
    description_text,
    read_arrays,
    tensors_to_arrays,
)
from flwr_fisher.wire.budget import byte_limit, pack_upload
from flwr_fisher.wire.codec import LOSSLESS, Codec, from_container, to_container
from flwr_fisher.wire.layout import (
    FORMAT,
    PREFIX,
    Key,
    block_of,
    curvature_layouts,
    curvature_to_tensors,
    join_blocks,
    keys_by_block,
    stand_in,
    tensors_to_curvature,
    trace_name,
)
from flwr_fisher.wire.matrices import CheckedPart, check_part
from flwr_fisher.wire.quantise import decode_param
from flwr_fisher.wire.schema import Payload, displacements, drawn_back


@dataclass(frozen=True)
class FisherUpload(Payload):
    """A client's trained parameters and their Fisher.

    In a lossless upload, the parameters keep their keys, and the curvature's tensors
    have further keys under ``curvature/``. A strategy that does not know them can still
    read the record. In a packed upload, parameters and curvature are one array of
    bytes.

    The server decodes a packed upload's parameters when it arrives. The curvature stays
    packed, and each block is unpacked in the merge, as a
    :class:`~flwr_fisher.curvature.Deferred`.

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
        blocks = self.curvature.blocks()
        lighter = [b.scaled(factors.get(trace_name(b), 1.0)) for b in blocks]
        params = drawn_back(self.params, like, factors)
        return replace(self, params=params, curvature=BlockDiagonal(lighter))

    def posterior(self, num_examples: float) -> LocalPosterior:
        """Return it as a posterior, with the client's weight, for a merge."""
        return LocalPosterior(self.params, self.curvature, num_examples)

    def to_arrays(self, codec: Codec = LOSSLESS) -> ArrayRecord:
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
        about = {FORMAT: description_text(codec.describe())}
        if codec == LOSSLESS:
            return tensors_to_arrays({**self.params, **parts, **about})
        check_finite({**self.params, **parts}, "the upload")
        # As many columns of each matrix as the codec's budget has room for.
        entries = pack_upload(self.params, parts, codec, self.curvature.shapes)
        return to_container({**about, **entries})

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
        structure : str, optional
            The name of the requested structure. By default it may be any.

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
        read = _read_plain if codec == LOSSLESS else _read_packed
        return cls(*read(record, like, codec, structure))


def _read_plain(
    record: ArrayRecord, like: Params, codec: Codec, structure: str | None
) -> tuple[Params, Curvature]:
    """Return the parameters and the curvature of a lossless upload."""
    layouts = curvature_layouts(record, like)
    layouts |= {key: (value.dtype, value.shape) for key, value in like.items()}
    _curvature_keys(record, like, structure)
    tensors = read_arrays(record, layouts | {FORMAT: (torch.uint8, (None,))})
    codec.check_description(tensors.pop(FORMAT, None), field=FORMAT)
    params = {key: tensors.pop(key) for key in like}
    return params, tensors_to_curvature(tensors, params)


def _read_packed(
    record: ArrayRecord, like: Params, codec: Codec, structure: str | None
) -> tuple[Params, Curvature]:
    """Return the parameters and the deferred curvature of a packed upload."""
    entries = from_container(record, limit=byte_limit(like, codec), count=len(like))
    codec.check_description(entries.get(FORMAT), field=FORMAT)
    curvature_keys = _curvature_keys(entries, like, structure)
    params = {k: decode_param(entries[k], v, field=k) for k, v in like.items()}
    checked = {key: check_part(entries[key], like, field=key) for key in curvature_keys}
    by_block = keys_by_block(checked, like)
    blocks = [_deferred({k: checked[k] for k in keys}, like) for keys in by_block]
    return params, join_blocks(blocks)


def _deferred(parts: Mapping[str, CheckedPart], like: Params) -> Deferred:
    """Return the deferred block of checked parts."""
    keys = {key: Key.parse(key, like) for key in parts}
    first = next(iter(keys.values()))
    sizes = tuple((keys[key].letter, part.shape) for key, part in parts.items())
    block = stand_in(first, like[first.name].shape, sizes, bias_of(first.name, like))
    traces = {keys[key].letter: part.traces for key, part in parts.items()}

    def make() -> Curvature:
        return block_of({key: part.make() for key, part in parts.items()}, like)

    return Deferred(block, make, first.structure.trace(traces))


def _curvature_keys(
    keys: Collection[str], like: Params, structure: str | None
) -> dict[str, None]:
    """Check all keys, and return those of the curvature."""
    curvature_keys = {k: None for k in keys if k.startswith(PREFIX) and k != FORMAT}
    check_same_keys(set(keys) - curvature_keys.keys() - {FORMAT}, like)
    for key in curvature_keys:
        parsed = Key.parse(key, like)
        if structure not in (None, parsed.structure.name) and not parsed.is_diagonal:
            raise WireError(f"the server requested structure '{structure}'", field=key)
    if not curvature_keys:
        raise WireError("has no curvature", field=PREFIX)
    return curvature_keys
