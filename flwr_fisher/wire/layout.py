"""A curvature as named tensors, and which keys and shapes such tensors can have.

``curvature/diagonal/<parameter>``
    the entries, in the parameter's shape;
``curvature/kfac/<weight>/A`` and ``…/G``
    a layer's two factors, ``[groups, n, n]``; they cover the bias, too, if ``A`` has
    one row more than the weight has inputs;
``curvature/ekfac/<weight>/A``, ``…/G`` and ``…/S``
    the two bases, of the factors' shapes, and the moments ``[groups, m, n]``;
``curvature/dense/<parameter>,<parameter>…``
    a dense matrix over these parameters, flattened one after the other, ``[d, d]``.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

import torch
from torch import Tensor

from flwr_fisher.curvature import Curvature, Dense, Diagonal, EigenKronecker, Kronecker
from flwr_fisher.curvature.estimate.options import LARGEST_FACTOR
from flwr_fisher.errors import StructureError, WireError
from flwr_fisher.params import Params

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
    """Which part of a curvature a tensor is."""

    DIAGONAL = 1
    DENSE = 2
    FACTOR = 3  # of K-FAC
    BASIS = 4  # of E-KFAC
    MOMENTS = 5


# The tensors of a layer, by the letter that ends their keys.
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
    """Lay a curvature out as named tensors; nothing is copied.

    Raises
    ------
    StructureError
        If it is of a kind that has no layout (a lazy sum, say).
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
        yield f"{_DENSE}{_SEPARATOR.join(curvature.shapes)}", curvature.matrix
    else:
        raise StructureError(f"a {type(curvature).__name__} cannot be sent")


def check_keys(
    keys: Iterable[str], params: Params, structure: str | None = None
) -> None:
    """Raise :class:`WireError` unless a curvature can have these keys.

    A few bytes can stand for a large matrix, so call this before decoding any.

    Parameters
    ----------
    keys : Iterable[str]
        Each begins with ``curvature/``.
    params : Mapping[str, Tensor]
        The model's parameters.
    structure : "kfac" | "diagonal" | "ekfac" | "block" | "dense", optional
        What was requested. By default it may be any.
    """
    dense: set[str] = set()
    nbytes = 0
    for key in keys:
        part, names = parse_key(key, params)
        if structure is not None and part not in _STRUCTURES[structure]:
            raise WireError(f"structure '{structure}' was asked for", field=key)
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
        The shape that arrived, or was announced.
    params : Mapping[str, Tensor]
        The model's parameters.
    most : float, default 16384
        A factor's rows, at most. Of layers that have more, clients send an exact
        diagonal, and a few bytes could announce gigabytes.
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
            raise WireError(f"shape {shape}, and at most {most} rows", field=key)
        widths = [inputs] if bias_of(names[0], params) is None else [inputs, inputs + 1]
        sides = {"A": [(n, n) for n in widths], "G": [(outputs, outputs)]}
        sides["S"] = [(outputs, n) for n in widths]
        expected = {(groups, *side) for side in sides[key[-1]]}
    if shape not in expected:
        raise _misshapen(key, shape, " or ".join(map(str, sorted(expected))))


def _can_have(weight: torch.Size, groups: int) -> bool:
    """Return whether a weight's layer can have this number of groups."""
    if len(weight) < 3:  # linear: one, or attention's three projections in one
        packed = groups == 3 and len(weight) == 2 and weight[0] == 3 * weight[1]
        return packed or (len(weight) == 2 and groups == 1)
    if not 1 <= groups <= max(weight[0], 1) or weight[0] % groups:
        return False
    square = weight[1:].numel() ** 2
    return groups * square <= max(_MOST * (square + weight[0] ** 2), _SMALL)


def parse_key(key: str, params: Params) -> tuple[Part, list[str]]:
    """Return which part a tensor called `key` is, and the parameters in its name.

    Raises
    ------
    WireError
        If the layout has no such key, or the model no such parameter of floats.
    """
    part, names = _parse(key)
    for name in names:
        if name not in params:
            raise WireError(f"the model has no such parameter '{name}'", field=key)
        if not params[name].is_floating_point():
            reason = f"'{name}' has dtype {params[name].dtype}, and no curvature"
            raise WireError(reason, field=key)
    if len(set(names)) < len(names):
        raise WireError("names a parameter twice", field=key)
    return part, names


def _parse(key: str) -> tuple[Part, list[str]]:
    if key.startswith(_DIAGONAL):
        return Part.DIAGONAL, [key.removeprefix(_DIAGONAL)]
    if key.startswith(_DENSE):
        return Part.DENSE, key.removeprefix(_DENSE).split(_SEPARATOR)
    for kind, letters in LAYER_PARTS.items():
        if key.startswith(kind) and key[-2:-1] == "/" and key[-1] in letters:
            return letters[key[-1]], [key[len(kind) : -2]]
    raise WireError("unknown key", field=key)


def _misshapen(key: str, shape: Sequence[int], expected: str) -> WireError:
    return WireError(f"shape {tuple(shape)}, expected {expected}", field=key)


def bias_of(weight: str, params: Params) -> str | None:
    """Return the name of the bias that goes with a weight, if there is one."""
    bias = weight.removesuffix("weight") + "bias"
    fits = bias in params and params[bias].shape == params[weight].shape[:1]
    return bias if fits else None


def trace_name(block: Curvature) -> str:
    """Return what a policy calls the trace of a layer's curvature."""
    return f"curvature of {next(iter(block.shapes))}"
