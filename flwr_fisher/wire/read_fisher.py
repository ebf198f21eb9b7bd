"""Reading the upload of a client's parameters and Fisher, none of which is trusted."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TypeVar

from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.curvature import BlockDiagonal, Curvature, Deferred, Kronecker
from flwr_fisher.errors import WireError
from flwr_fisher.params import DeferredParams, Params
from flwr_fisher.wire import packing, paper
from flwr_fisher.wire.arrays import (
    announced_shape,
    arrays_to_tensors,
    check_count,
)
from flwr_fisher.wire.budget import byte_limit
from flwr_fisher.wire.checks import check_shape_and_dtype
from flwr_fisher.wire.codec import Codec
from flwr_fisher.wire.container import (
    FORMAT,
    from_container,
    parse_text,
)
from flwr_fisher.wire.layout import (
    PREFIX,
    check_keys,
    check_shape,
    parse_key,
)
from flwr_fisher.wire.read_curvature import assembled, tensors_to_curvature
from flwr_fisher.wire.size import Layout, layout_key, without_values
from flwr_fisher.wire.small_upload import check_all_parts, unpack_all_params

V = TypeVar("V")
# By the codec's scheme: what unpacks a parameter, and what checks a curvature's part.
_FORMS = {
    "packed": (packing.unpack_params, packing.check_part),
    "paper": (paper.unpack_params, paper.check_part),
}
# Bytes of the parameters of a model whose uploads are kept unpacked: to unpack many
# small ones again and again would take longer than all else that a merge does.
_SMALL = 1 << 18


def read_plain(
    record: ArrayRecord, like: Params, codec: Codec, structure: str | None
) -> tuple[Params, Curvature]:
    """Return the parameters and the curvature of a lossless upload.

    Raises
    ------
    WireError
        Naming the key that is wrong.
    """
    _check_announced(record, like, structure)
    tensors = arrays_to_tensors(record)  # of no other shapes than announced
    text = tensors.pop(FORMAT, None)
    codec.check_description(parse_text(text, FORMAT), field=FORMAT)
    params, extras = _apart(tensors)
    for key, tensor in extras.items():
        if not tensor.is_floating_point():
            raise WireError(f"dtype {tensor.dtype}, expected a float", field=key)
    _check_params(params, like)
    _check_any(extras)
    ordered = {key: params[key] for key in like}
    return ordered, tensors_to_curvature(extras, ordered)


def _check_announced(record: ArrayRecord, like: Params, structure: str | None) -> None:
    """Check keys, and the shapes that arrays are said to have, before any is read."""
    check_count(record, 4 * len(like) + 1)  # E-KFAC has three tensors a parameter
    params, extras = _apart(dict(record.items()))
    extras.pop(FORMAT, None)  # which is short, or refused
    _check_names(params, like)
    check_keys(extras, like, structure)
    for key, array in extras.items():
        check_shape(key, announced_shape(key, array), like)
    for key, array in params.items():
        if (shape := announced_shape(key, array)) != (expected := like[key].shape):
            reason = f"shape {tuple(shape)}, expected {tuple(expected)}"
            raise WireError(reason, field=key)


def read_packed(
    record: ArrayRecord, like: Params, codec: Codec, structure: str | None
) -> tuple[Params, Curvature]:
    """Return the parameters and the curvature of a packed upload, to be made later.

    Raises
    ------
    WireError
        Naming the key that is wrong.
    """
    entries, description = from_container(
        record, limit=byte_limit(like, codec), count=len(like)
    )
    codec.check_description(description, field=FORMAT)
    params, extras = _apart(entries)
    _check_names(params, like)
    check_keys(extras, like, structure)
    _check_any(extras)
    unpack_params, check_part = _FORMS[codec.scheme]

    def read_params(key: str) -> Tensor:
        return unpack_params(params[key], like[key], field=key)

    def read_part(key: str) -> packing.CheckedPart:
        return check_part(extras[key], like, field=key)

    if sum(value.nbytes for value in like.values()) > _SMALL:
        deferred = DeferredParams(like, read_params)
        checked = {key: read_part(key) for key in extras}
        _check_params(deferred, like)
        return deferred, _deferred(checked, read_part, like)
    if codec.scheme == "packed":
        kept = unpack_all_params(params, like)
        checked = check_all_parts(extras, like)
    else:
        kept = {key: read_params(key) for key in like}
        checked = {key: read_part(key) for key in extras}
    _check_params(kept, like)
    return kept, _deferred(checked, checked.__getitem__, like)


def _deferred(
    checked: Mapping[str, packing.CheckedPart],
    part: Callable[[str], packing.CheckedPart],
    like: Params,
) -> BlockDiagonal:
    """Return the curvature of checked parts, whose blocks are made when they are used.

    `checked` itself is not kept: `part` returns one of them then.
    """

    def block_of(keys: Iterable[str]) -> Curvature:
        return assembled({key: part(key).make() for key in keys}, like).blocks()[0]

    # Sorted, as the bits that fit may have brought them in any order.
    shapes = tuple((k, part.shape, part.dtype) for k, part in sorted(checked.items()))
    blocks = _blocks(shapes, layout_key(like))
    return BlockDiagonal(
        [
            Deferred(
                block,
                partial(block_of, keys),
                _trace(block, [checked[key].traces for key in keys]),
            )
            for block, keys in blocks
        ]
    )


def _trace(block: Curvature, traces: Sequence[Sequence[float]]) -> float:
    """Return a block's trace, from those of its parts."""
    if isinstance(block, Kronecker):
        A, G = traces
        return sum(a * g for a, g in zip(A, G, strict=True))
    return sum(map(sum, traces))


@lru_cache(maxsize=16)
def _blocks(parts: Layout, model: Layout) -> list[tuple[Curvature, tuple[str, ...]]]:
    """Return the blocks that parts of these shapes make, and each one's keys.

    The blocks have no values. Most uploads of a round have the same.
    """
    stand_ins, like = without_values(parts), without_values(model)
    owners: dict[str, list[str]] = {}
    for key in stand_ins:
        for name in parse_key(key, like)[1]:
            owners.setdefault(name, []).append(key)
    blocks = []
    for block in assembled(stand_ins, like).blocks():
        keys = (key for name in block.shapes for key in owners.get(name, ()))
        blocks.append((block, tuple(dict.fromkeys(keys))))
    return blocks


def _apart(tensors: Mapping[str, V]) -> tuple[dict[str, V], dict[str, V]]:
    """Return the parameters, and what is the curvature's."""
    extras = {k: v for k, v in tensors.items() if k.startswith(PREFIX)}
    return {k: v for k, v in tensors.items() if k not in extras}, extras


def _check_any(extras: Params) -> None:
    if not extras:
        raise WireError("no curvature arrived", field=PREFIX)


def _check_names(params: Mapping[str, object], like: Params) -> None:
    for key in like.keys() - params.keys():
        raise WireError("missing", field=key)
    for key in params.keys() - like.keys():
        raise WireError("unexpected key", field=key)


def _check_params(params: Params, like: Params) -> None:
    for key, tensor in params.items():
        check_shape_and_dtype(key, tensor, like[key].shape, like[key].dtype)
