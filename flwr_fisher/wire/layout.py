"""The layout of a curvature as named tensors: their keys and shapes.

``curvature/diagonal/<parameter>``
    the entries, in the parameter's shape;
``curvature/kfac/<weight>/A`` and ``…/G``
    a layer's two factors, ``[groups, n, n]``; they include the bias if ``A`` has one
    more row than the weight has inputs;
``curvature/ekfac/<weight>/A``, ``…/G`` and ``…/S``
    the two bases, of the factors' shapes, and the moments ``[groups, m, n]``;
``curvature/dense/<parameter>,<parameter>…``
    a dense matrix over these parameters, flattened one after the other, ``[d, d]``; a
    comma in a name is ``%2C``, as in a URL.

Long: the writer of this layout, and the reader with all its checks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from flwr_fisher.curvature import (
    BlockDiagonal,
    Curvature,
    Dense,
    Diagonal,
    EigenKronecker,
    Kronecker,
)
from flwr_fisher.curvature.estimate.options import LARGEST_FACTOR
from flwr_fisher.curvature.operators.factors import SymmetricFactor
from flwr_fisher.errors import FlwrFisherError, StructureError, WireError
from flwr_fisher.params import Params, bias_of
from flwr_fisher.wire.arrays import check_second_moment

PREFIX = "curvature/"
_DIAGONAL, _DENSE = f"{PREFIX}diagonal/", f"{PREFIX}dense/"
_KFAC, _EKFAC = f"{PREFIX}kfac/", f"{PREFIX}ekfac/"
_SEPARATOR = ","  # between the parameters of a dense matrix
# A few bytes can announce large factors of many groups, and the server does not know
# how many groups a layer has. So all groups' factors together may have at most `_MOST`
# times the entries that they would have with one group, or `_SMALL` entries.
_MOST, _SMALL = 16, 1 << 20
_LARGEST = 2**31  # bytes of all dense matrices; `fisher` makes no more


class Part(Enum):
    """The part of a curvature that a tensor is."""

    DIAGONAL = 1
    DENSE = 2
    FACTOR = 3  # of K-FAC
    BASIS = 4  # of E-KFAC
    MOMENTS = 5


# a layer's tensors, by the last letter of their keys
LAYER_PARTS = {
    _KFAC: {"A": Part.FACTOR, "G": Part.FACTOR},
    _EKFAC: {"A": Part.BASIS, "G": Part.BASIS, "S": Part.MOMENTS},
}
_STRUCTURES = {
    "kfac": (Part.FACTOR, Part.DIAGONAL),
    "diagonal": (Part.DIAGONAL,),
    "ekfac": (Part.BASIS, Part.MOMENTS, Part.DIAGONAL),
    "block": (Part.DENSE, Part.DIAGONAL),
    "dense": (Part.DENSE,),
}


def curvature_to_tensors(curvature: Curvature) -> dict[str, Tensor]:
    """Return a curvature as named tensors, without copies.

    Raises
    ------
    StructureError
        If this kind of curvature has no layout (for example, a lazy sum).
    """
    return {k: v for b in curvature.blocks() for k, v in _tensors(b.made())}


def _tensors(curvature: Curvature) -> Iterator[tuple[str, Tensor]]:
    if isinstance(curvature, Diagonal):
        for name, entry in curvature.entries.items():
            yield f"{_DIAGONAL}{name}", entry
    elif isinstance(curvature, Kronecker):
        yield f"{_KFAC}{curvature.weight}/A", curvature.A
        yield f"{_KFAC}{curvature.weight}/G", curvature.G
    elif isinstance(curvature, EigenKronecker):
        yield f"{_EKFAC}{curvature.weight}/A", curvature.basis_A
        yield f"{_EKFAC}{curvature.weight}/G", curvature.basis_G
        yield f"{_EKFAC}{curvature.weight}/S", curvature.moments
    elif isinstance(curvature, Dense):
        yield (
            f"{_DENSE}{_SEPARATOR.join(map(quote, curvature.shapes))}",
            curvature.matrix,
        )
    else:
        raise StructureError(
            f"a {type(curvature).__name__} cannot be sent: use a Diagonal, Kronecker, "
            "EigenKronecker or Dense, or a BlockDiagonal of these"
        )


def check_keys(keys: Iterable[str], params: Params, structure: str | None) -> None:
    """Raise :class:`WireError` unless a curvature can have these keys.

    A few bytes can represent a large matrix, so call this before any decoding. The
    structure is the requested one, or None for any.
    """
    dense: set[str] = set()
    nbytes = 0
    for key in keys:
        part, names = parse_key(key, params)
        if structure is not None and part not in _STRUCTURES[structure]:
            raise WireError(f"the server requested structure '{structure}'", field=key)
        if part == Part.DENSE:
            if twice := dense.intersection(names):
                reason = f"parameters {sorted(twice)} are in more than one block"
                raise WireError(reason, field=key)
            dense.update(names)
            nbytes += 4 * sum(params[name].numel() for name in names) ** 2
        if nbytes > _LARGEST:
            raise WireError(f"dense matrices of {nbytes} bytes", field=key)


def check_shape(
    key: str, shape: Sequence[int], params: Params, most: float = LARGEST_FACTOR
) -> None:
    """Raise :class:`WireError` unless a tensor called `key` can have that shape.

    Parameters
    ----------
    key : str
        Begins with ``curvature/``.
    shape : Sequence[int]
        The shape of the received tensor, or its announced shape.
    params : Mapping[str, Tensor]
        The model's parameters.
    most : float, default 16384
        The largest number of a factor's rows. For layers with more rows, clients send
        an exact diagonal. Without this limit, a few bytes could announce gigabytes.
    """
    part, names = parse_key(key, params)
    shape, weight = tuple(shape), params[names[0]].shape
    if part == Part.DIAGONAL:
        expected = {tuple(weight)}
    elif part == Part.DENSE:
        size = sum(params[name].numel() for name in names)
        expected = {(size, size)}
    else:
        groups = shape[0] if len(shape) == 3 else 0
        if not _can_have(weight, groups):
            raise _misshapen(key, shape, f"factors of a weight of shape {(*weight,)}")
        outputs, inputs = weight[0] // groups, weight[1:].numel()
        if max(shape[1:]) > most:
            raise WireError(f"shape {shape}, but at most {most} rows", field=key)
        widths = [inputs] if bias_of(names[0], params) is None else [inputs, inputs + 1]
        sides = {"A": [(n, n) for n in widths], "G": [(outputs, outputs)]}
        sides["S"] = [(outputs, n) for n in widths]
        expected = {(groups, *side) for side in sides[key[-1]]}
    if shape not in expected:
        raise _misshapen(key, shape, " or ".join(map(str, sorted(expected))))


def _can_have(weight: torch.Size, groups: int) -> bool:
    """Return whether the layer of a weight can have this number of groups."""
    if len(weight) < 3:  # linear: 1, or 3 for attention's packed projection
        packed = groups == 3 and len(weight) == 2 and weight[0] == 3 * weight[1]
        return packed or (len(weight) == 2 and groups == 1)
    if not 1 <= groups <= max(weight[0], 1) or weight[0] % groups:
        return False
    square = weight[1:].numel() ** 2
    return groups * square <= max(_MOST * (square + weight[0] ** 2), _SMALL)


def parse_key(key: str, params: Params) -> tuple[Part, list[str]]:
    """Return a key's part, and the parameters that it names.

    Raises
    ------
    WireError
        If the layout has no such key, or the model has no such floating-point
        parameter.
    """
    part, names = _parse(key)
    for name in names:
        if name not in params:
            raise WireError(f"the model has no such parameter '{name}'", field=key)
        if not params[name].is_floating_point():
            reason = f"'{name}' has dtype {params[name].dtype}, so it has no curvature"
            raise WireError(reason, field=key)
    if len(set(names)) < len(names):
        raise WireError("names a parameter twice", field=key)
    return part, names


def _parse(key: str) -> tuple[Part, list[str]]:
    if key.startswith(_DIAGONAL):
        return Part.DIAGONAL, [key.removeprefix(_DIAGONAL)]
    if key.startswith(_DENSE):
        names = key.removeprefix(_DENSE).split(_SEPARATOR)
        return Part.DENSE, [*map(unquote, names)]
    for kind, letters in LAYER_PARTS.items():
        if key.startswith(kind) and key[-2:-1] == "/" and key[-1] in letters:
            return letters[key[-1]], [key[len(kind) : -2]]
    raise WireError("unknown key", field=key)


def _misshapen(key: str, shape: Sequence[int], expected: str) -> WireError:
    return WireError(f"shape {tuple(shape)}, expected {expected}", field=key)


# K-FAC's factors may arrive packed; all else is tensors to check.
Parts = Mapping[str, Tensor | SymmetricFactor]


def tensors_to_curvature(tensors: Parts, params: Params) -> Curvature:
    """Return the curvature of tensors that arrived, after all checks.

    Parameters
    ----------
    tensors : Mapping[str, Tensor | SymmetricFactor]
        Finite floating-point tensors under keys that begin with ``curvature/``.
    params : Mapping[str, Tensor]
        The parameters to which the curvature belongs.

    Returns
    -------
    Curvature
        A :class:`Diagonal` or :class:`Dense` if there is nothing else, otherwise a
        :class:`BlockDiagonal`.

    Raises
    ------
    WireError
        It names the first key that is unknown or missing, has a wrong shape or another
        dtype than its parameter, is not symmetric, or is negative on the diagonal.
    """
    for key, part in tensors.items():
        check_shape(key, part.shape, params)
        if isinstance(part, Tensor):
            _check_values(key, part, params)
    blocks = [
        block_of({key: tensors[key] for key in keys}, params)
        for keys in keys_by_block(tensors, params)
    ]
    entries = {
        k: v for b in blocks if isinstance(b, Diagonal) for k, v in b.entries.items()
    }
    blocks = [block for block in blocks if not isinstance(block, Diagonal)]
    if entries:
        blocks.append(Diagonal(entries))
    if len(blocks) == 1 and isinstance(blocks[0], Dense | Diagonal):
        return blocks[0]
    return join_blocks(blocks)


def keys_by_block(keys: Iterable[str], params: Params) -> list[list[str]]:
    """Return the keys of each block, in the order of the parameters, diagonals last.

    A merge pairs clients' blocks by their order, so this order must not depend on the
    upload.

    Raises
    ------
    WireError
        If a layer's part is missing.
    """
    places = {name: place for place, name in enumerate(params)}
    parsed = {key: parse_key(key, params) for key in keys}
    blocks: dict[str, list[str]] = {}
    diagonals: list[list[str]] = []
    for key in sorted(parsed, key=lambda key: (places[parsed[key][1][0]], key)):
        kind, _ = parsed[key]
        if kind == Part.DIAGONAL:
            diagonals.append([key])
        else:
            own = key if kind == Part.DENSE else key[:-1]
            blocks.setdefault(own, []).append(key)
    for own, parts in blocks.items():
        for letter in _letters(own):
            if f"{own}{letter}" not in parts:
                raise WireError("missing", field=f"{own}{letter}")
    return [*blocks.values(), *diagonals]


def _letters(block: str) -> Iterable[str]:
    fitting = (parts for kind, parts in LAYER_PARTS.items() if block.startswith(kind))
    return next(fitting, ())


def block_of(parts: Parts, params: Params) -> Curvature:
    """Return the block of checked parts, given its keys.

    Raises
    ------
    WireError
        If the parts do not fit each other.
    """
    plain = {key: part for key, part in parts.items() if isinstance(part, Tensor)}
    key = next(iter(parts))
    kind, names = parse_key(key, params)
    if kind == Part.DIAGONAL:
        return Diagonal({names[0]: plain[key]})
    if kind == Part.DENSE:
        return Dense({name: params[name].shape for name in names}, plain[key])
    A, G = parts[f"{key[:-1]}A"], parts[f"{key[:-1]}G"]
    name, shape = names[0], params[names[0]].shape
    bias = bias_of(name, params) if A.shape[-1] > shape[1:].numel() else None
    try:
        if kind == Part.FACTOR:
            return Kronecker(name, shape, A, G, bias)
        of_A, of_G, moments = (plain[f"{key[:-1]}{letter}"] for letter in "AGS")
        return EigenKronecker(name, shape, of_A, of_G, moments, bias)
    except StructureError as error:  # the parts do not fit each other
        raise WireError(str(error), field=f"{key[:-1]}A") from error


def join_blocks(blocks: Sequence[Curvature]) -> BlockDiagonal:
    """Return the curvature that consists of these blocks.

    Raises
    ------
    WireError
        If a parameter is in two of them.
    """
    try:
        return BlockDiagonal(blocks)
    except FlwrFisherError as error:
        raise WireError(str(error), field=PREFIX) from error


def _check_values(key: str, tensor: Tensor, params: Params) -> None:
    part, names = parse_key(key, params)
    if tensor.dtype != (expected := params[names[0]].dtype):
        raise WireError(f"dtype {tensor.dtype}, expected {expected}", field=key)
    if part in (Part.DIAGONAL, Part.MOMENTS):
        if (tensor < 0).any():
            raise WireError("must not be negative", field=key)
    elif part != Part.BASIS:
        check_second_moment(key, tensor)


def trace_name(block: Curvature) -> str:
    """Return a policy's name for the trace of a layer's curvature."""
    return f"curvature of {next(iter(block.shapes))}"
