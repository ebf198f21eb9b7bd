"""How a curvature is laid out as named tensors, and read back with every check.

``curvature/diagonal/<parameter>``
    the entries, in the parameter's shape;
``curvature/kfac/<weight>/A`` and ``…/G``
    a layer's two factors, ``[groups, n, n]``; the bias is part of it where ``A`` has
    one row more than the weight has inputs;
``curvature/ekfac/<weight>/A``, ``…/G`` and ``…/S``
    the two bases, shaped as the factors, and the moments ``[groups, m, n]``;
``curvature/dense/<i>/<parameter>``
    the parameter's rows of the i-th dense block (there is one, where all is dense),
    ``[numel, d]``, columns in the keys' order.
"""

from collections.abc import Iterator, Mapping

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

__all__ = ["PREFIX", "curvature_to_tensors", "tensors_to_curvature"]

PREFIX = "curvature/"
_DIAGONAL, _DENSE = f"{PREFIX}diagonal/", f"{PREFIX}dense/"
_KFAC, _EKFAC = f"{PREFIX}kfac/", f"{PREFIX}ekfac/"
_FACTORS = {_KFAC: "AG", _EKFAC: "AGS"}
_SYMMETRY = 1e-4  # relative to the largest entry; sums in another order differ by less


def curvature_to_tensors(curvature: Curvature) -> dict[str, Tensor]:
    """Lay a curvature out as named tensors; nothing is copied.

    Raises
    ------
    StructureError
        If it is of a kind that has no layout (a lazy sum, say).
    """
    return {
        key: tensor
        for index, part in enumerate(_flat(curvature))
        for key, tensor in _tensors(part, index)
    }


def _flat(curvature: Curvature) -> Iterator[Curvature]:
    if not isinstance(curvature, Blocks):
        yield curvature
        return
    for child in curvature.children:
        yield from _flat(child)


def _tensors(curvature: Curvature, index: int) -> Iterator[tuple[str, Tensor]]:
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
        sizes = [shape.numel() for shape in curvature.shapes.values()]
        rows = torch.split(curvature.matrix, sizes)
        for name, part in zip(curvature.shapes, rows, strict=True):
            yield f"{_DENSE}{index}/{name}", part
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
    rows: dict[str, dict[str, Tensor]] = {}
    parts: list[Curvature] = []
    for key, tensor in tensors.items():
        if key.startswith(_DIAGONAL):
            name = _known(key, key.removeprefix(_DIAGONAL), tensor, params)
            if tensor.shape != params[name].shape:
                raise _misshapen(key, tensor, tuple(params[name].shape))
            if (tensor < 0).any():
                raise WireError("a diagonal must not be negative", field=key)
            diagonal[name] = tensor
        elif key.startswith(_DENSE):
            index, _, name = key.removeprefix(_DENSE).partition("/")
            _known(key, name, tensor, params)
            rows.setdefault(index, {})[name] = tensor
        elif (kind := _factor_kind(key)) and key.endswith("/A"):
            parts.append(_layer(kind, key, tensors, params))
        elif not (kind and f"{key[:-1]}A" in tensors):
            raise WireError("unknown key", field=key)
    parts += [_dense(index, block, params) for index, block in rows.items()]
    if diagonal:
        parts.append(Diagonal(diagonal))
    if len(parts) == 1 and isinstance(parts[0], Dense | Diagonal):
        return parts[0]
    try:
        return Blocks(parts)
    except FlwrFisherError as error:  # a parameter in two blocks
        raise WireError(str(error), field=PREFIX) from error


def _factor_kind(key: str) -> str | None:
    """Return the prefix of a factor's key, and None for any other key."""
    for kind, letters in _FACTORS.items():
        if key.startswith(kind) and key[-2:-1] == "/" and key[-1] in letters:
            return kind
    return None


def _known(key: str, name: str, tensor: Tensor, params: Params) -> str:
    if name not in params:
        raise WireError("the model has no such parameter", field=key)
    if tensor.dtype != (expected := params[name].dtype):
        raise WireError(f"dtype {tensor.dtype}, expected {expected}", field=key)
    return name


def _misshapen(key: str, tensor: Tensor, expected: object) -> WireError:
    return WireError(f"shape {tuple(tensor.shape)}, expected {expected}", field=key)


def _bias_name(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"


def _bias(weight: str, params: Params) -> str | None:
    """Return the name of the bias that goes with a weight, if there is one."""
    bias = _bias_name(weight)
    fits = bias in params and params[bias].shape == params[weight].shape[:1]
    return bias if fits else None


def _layer(
    kind: str, key: str, tensors: Mapping[str, Tensor], params: Params
) -> Kronecker | EigenKronecker:
    name = key.removeprefix(kind).removesuffix("/A")
    factors = []
    for letter in _FACTORS[kind]:
        if (field := f"{key[:-1]}{letter}") not in tensors:
            raise WireError("missing", field=field)
        factors.append(tensors[field])
        _known(field, name, tensors[field], params)
    A, G, shape = factors[0], factors[1], params[name].shape
    if len(shape) < 2 or A.dim() != 3 or shape[0] % max(A.shape[0], 1):
        raise _misshapen(key, A, f"factors of a weight of shape {tuple(shape)}")
    inputs = shape[1:].numel()
    bias = _bias(name, params) if A.shape[-1] > inputs else None
    if A.shape[-1] > inputs and bias is None:
        raise _misshapen(
            key, A, f"[groups, {inputs}, {inputs}]: there is no '{_bias_name(name)}'"
        )
    try:
        if kind == _KFAC:
            layer: Kronecker | EigenKronecker = Kronecker(name, shape, A, G, bias)
        else:
            layer = EigenKronecker(name, shape, A, G, factors[2], bias)
    except StructureError as error:
        raise WireError(str(error), field=key) from error
    if isinstance(layer, Kronecker):
        _check_symmetric(key, layer.A)
        _check_symmetric(f"{key[:-1]}G", layer.G)
    elif (layer.moments < 0).any():
        raise WireError("moments must not be negative", field=f"{key[:-1]}S")
    return layer


def _dense(index: str, rows: Mapping[str, Tensor], params: Params) -> Dense:
    shapes = {name: params[name].shape for name in rows}
    size = sum(shape.numel() for shape in shapes.values())
    for name, part in rows.items():
        if part.shape != (expected := (shapes[name].numel(), size)):
            raise _misshapen(f"{_DENSE}{index}/{name}", part, expected)
    matrix = torch.cat(list(rows.values()))
    _check_symmetric(f"{_DENSE}{index}", matrix)
    return Dense(shapes, matrix)


def _check_symmetric(key: str, matrix: Tensor) -> None:
    if (matrix.diagonal(dim1=-2, dim2=-1) < 0).any():
        raise WireError("negative on the diagonal", field=key)
    if (matrix - matrix.mT).abs().max() > _SYMMETRY * matrix.abs().max():
        raise WireError("not symmetric", field=key)
