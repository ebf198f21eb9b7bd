"""How a curvature is laid out as named tensors, and read back with every check.

``curvature/diagonal/<parameter>``
    the entries, in the parameter's shape;
``curvature/kfac/<weight>/A`` and ``…/G``
    a layer's two factors, ``[groups, n, n]``; the bias is part of it where ``A`` has
    one row more than the weight has inputs;
``curvature/ekfac/<weight>/A``, ``…/G`` and ``…/S``
    the two bases, shaped as the factors, and the moments ``[groups, m, n]``;
``curvature/dense/<parameter>,<parameter>…``
    a dense matrix over these parameters, flattened one after the other, ``[d, d]``.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor

from flwr_fisher.curvature import (
    Blocks,
    Curvature,
    Dense,
    Diagonal,
    EigenKronecker,
    Kronecker,
)
from flwr_fisher.errors import FlwrFisherError, StructureError, WireError
from flwr_fisher.params import Params

__all__ = [
    "PREFIX",
    "Part",
    "check_keys",
    "check_shape",
    "curvature_to_tensors",
    "parse_key",
    "tensors_to_curvature",
]

PREFIX = "curvature/"
_DIAGONAL, _DENSE = f"{PREFIX}diagonal/", f"{PREFIX}dense/"
_KFAC, _EKFAC = f"{PREFIX}kfac/", f"{PREFIX}ekfac/"
_JOIN = ","
# A few bytes announce large factors of many groups, and no server knows a layer's
# groups: factors may hold so many times the entries that they have with one group.
_MOST, _SMALL = 16, 1 << 20
_LARGEST = 2**31  # bytes of all dense matrices; `fisher` makes no more
_SYMMETRY = 1e-4  # relative to the largest entry; sums in another order differ by less


class Part(Enum):
    """What a tensor is to its curvature."""

    DIAGONAL = 1
    DENSE = 2
    FACTOR = 3  # of K-FAC
    BASIS = 4  # of E-KFAC
    MOMENTS = 5


_LAYERS = {
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
    return {k: v for part in _flat(curvature) for k, v in _tensors(part)}


def _flat(curvature: Curvature) -> Iterator[Curvature]:
    if not isinstance(curvature, Blocks):
        yield curvature
        return
    for child in curvature.children:
        yield from _flat(child)


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
        yield f"{_DENSE}{_JOIN.join(curvature.shapes)}", curvature.matrix
    else:
        raise StructureError(f"a {type(curvature).__name__} cannot be sent")


def tensors_to_curvature(tensors: Mapping[str, Tensor], params: Params) -> Curvature:
    """Read a curvature over some of `params` from the tensors that it was laid out as.

    Parameters
    ----------
    tensors : Mapping[str, Tensor]
        Finite floats under keys that begin with ``curvature/``.
    params : Mapping[str, Tensor]
        The parameters it belongs to.

    Returns
    -------
    Curvature
        A :class:`Diagonal` or :class:`Dense` where it is just that, else
        :class:`Blocks`.

    Raises
    ------
    WireError
        Naming the first key that is unknown, missing, misshapen, of another dtype than
        its parameter, not symmetric or negative on the diagonal.
    """
    diagonal: dict[str, Tensor] = {}
    parts: list[Curvature] = []
    for key, tensor in tensors.items():
        check_shape(key, tensor.shape, params)
        _check_values(key, tensor, params)
    # Clients' blocks are merged in pairs, so their order must not depend on arrival.
    places = {name: place for place, name in enumerate(params)}
    for key in sorted(tensors, key=lambda key: places[parse_key(key, params)[1][0]]):
        (part, names), tensor = parse_key(key, params), tensors[key]
        if part == Part.DIAGONAL:
            diagonal[names[0]] = tensor
        elif part == Part.DENSE:
            parts.append(Dense({name: params[name].shape for name in names}, tensor))
        elif key.endswith("/A"):
            parts.append(_layer(key.removesuffix("A"), names[0], tensors, params))
        elif (first := f"{key[:-1]}A") not in tensors:
            raise WireError("missing", field=first)
    if diagonal:
        parts.append(Diagonal(diagonal))
    if len(parts) == 1 and isinstance(parts[0], Dense | Diagonal):
        return parts[0]
    try:
        return Blocks(parts)
    except FlwrFisherError as error:  # a parameter in two blocks
        raise WireError(str(error), field=PREFIX) from error


def check_keys(
    keys: Iterable[str], params: Params, structure: str | None = None
) -> None:
    """Raise :class:`WireError` unless these keys may be a curvature's.

    A few bytes can stand for a large matrix, so this comes before any is decoded.

    Parameters
    ----------
    keys : Iterable[str]
        Each begins with ``curvature/``.
    params : Mapping[str, Tensor]
        The model's parameters.
    structure : "kfac" | "diagonal" | "ekfac" | "block" | "dense", optional
        What was asked for. By default it may be any.
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


def check_shape(key: str, shape: Sequence[int], params: Params) -> None:
    """Raise :class:`WireError` unless a tensor called `key` can have that shape.

    Parameters
    ----------
    key : str
        Begins with ``curvature/``.
    shape : Sequence[int]
        The shape that arrived, or was announced.
    params : Mapping[str, Tensor]
        The model's parameters.
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
        widths = [inputs] if _bias(names[0], params) is None else [inputs, inputs + 1]
        sides = {"A": [(n, n) for n in widths], "G": [(outputs, outputs)]}
        sides["S"] = [(outputs, n) for n in widths]
        expected = {(groups, *side) for side in sides[key[-1]]}
    if shape not in expected:
        raise _misshapen(key, shape, " or ".join(map(str, sorted(expected))))


def _can_have(weight: torch.Size, groups: int) -> bool:
    """Return whether a weight's layer can have so many groups."""
    if len(weight) < 3:  # only convolutions have more than one
        return len(weight) == 2 and groups == 1
    if not 1 <= groups <= max(weight[0], 1) or weight[0] % groups:
        return False
    square = weight[1:].numel() ** 2
    return groups * square <= max(_MOST * (square + weight[0] ** 2), _SMALL)


def parse_key(key: str, params: Params) -> tuple[Part, list[str]]:
    """Return what a tensor called `key` is, and the parameters that it names.

    Raises
    ------
    WireError
        If that is not a key of this layout, or there is no such parameter of floats.
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
        return Part.DENSE, key.removeprefix(_DENSE).split(_JOIN)
    for kind, letters in _LAYERS.items():
        if key.startswith(kind) and key[-2:-1] == "/" and key[-1] in letters:
            return letters[key[-1]], [key[len(kind) : -2]]
    raise WireError("unknown key", field=key)


def _misshapen(key: str, shape: Sequence[int], expected: str) -> WireError:
    return WireError(f"shape {tuple(shape)}, expected {expected}", field=key)


def _check_values(key: str, tensor: Tensor, params: Params) -> None:
    part, names = parse_key(key, params)
    if tensor.dtype != (expected := params[names[0]].dtype):
        raise WireError(f"dtype {tensor.dtype}, expected {expected}", field=key)
    if part in (Part.DIAGONAL, Part.MOMENTS):
        if (tensor < 0).any():
            raise WireError("must not be negative", field=key)
    elif part != Part.BASIS:
        _check_symmetric(key, tensor)


def _check_symmetric(key: str, matrix: Tensor) -> None:
    if not matrix.numel():
        return
    if (matrix.diagonal(dim1=-2, dim2=-1) < 0).any():
        raise WireError("negative on the diagonal", field=key)
    if (matrix - matrix.mT).abs().max() > _SYMMETRY * matrix.abs().max():
        raise WireError("not symmetric", field=key)


def _bias(weight: str, params: Params) -> str | None:
    """Return the name of the bias that goes with a weight, if there is one."""
    bias = weight.removesuffix("weight") + "bias"
    fits = bias in params and params[bias].shape == params[weight].shape[:1]
    return bias if fits else None


def _layer(
    key: str, name: str, tensors: Mapping[str, Tensor], params: Params
) -> Kronecker | EigenKronecker:
    letters = next(_LAYERS[kind] for kind in _LAYERS if key.startswith(kind))
    for letter in letters:
        if f"{key}{letter}" not in tensors:
            raise WireError("missing", field=f"{key}{letter}")
    A, G, *moments = (tensors[f"{key}{letter}"] for letter in letters)
    shape = params[name].shape
    bias = _bias(name, params) if A.shape[-1] > shape[1:].numel() else None
    try:
        if moments:
            return EigenKronecker(name, shape, A, G, moments[0], bias)
        return Kronecker(name, shape, A, G, bias)
    except StructureError as error:  # its parts do not fit each other
        raise WireError(str(error), field=f"{key}A") from error
