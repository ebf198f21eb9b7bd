"""How a curvature is laid out as named tensors, and read back with every check.

``curvature/diagonal/<parameter>``
    the entries, in the parameter's shape;
``curvature/kfac/<weight>/A`` and ``…/G``
    a layer's two factors, ``[groups, n, n]``; the bias is part of it where ``A`` has
    one row more than the weight has inputs;
``curvature/dense/<parameter>``
    the parameter's rows of the matrix, ``[numel, d]``, columns in the keys' order.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from flwr_fisher.curvature import Blocks, Curvature, Dense, Diagonal, Kronecker
from flwr_fisher.errors import FlwrFisherError, StructureError, WireError
from flwr_fisher.params import Params

__all__ = ["PREFIX", "curvature_to_tensors", "tensors_to_curvature"]

PREFIX = "curvature/"
_DIAGONAL, _KFAC, _DENSE = f"{PREFIX}diagonal/", f"{PREFIX}kfac/", f"{PREFIX}dense/"
_SYMMETRY = 1e-4  # relative to the largest entry; sums in another order differ by less


def curvature_to_tensors(curvature: Curvature) -> dict[str, Tensor]:
    """Lay a curvature out as named tensors; nothing is copied.

    Raises
    ------
    StructureError
        If it is of a kind that has no layout (a lazy sum, say).
    """
    return dict(_tensors(curvature))


def _tensors(curvature: Curvature) -> Iterator[tuple[str, Tensor]]:
    if isinstance(curvature, Blocks):
        for child in curvature.children:
            yield from _tensors(child)
    elif isinstance(curvature, Diagonal):
        for name, entry in curvature.entries.items():
            yield f"{_DIAGONAL}{name}", entry
    elif isinstance(curvature, Kronecker):
        yield f"{_KFAC}{curvature.weight}/A", curvature.A
        yield f"{_KFAC}{curvature.weight}/G", curvature.G
    elif isinstance(curvature, Dense):
        sizes = [shape.numel() for shape in curvature.shapes.values()]
        rows = torch.split(curvature.matrix, sizes)
        for name, part in zip(curvature.shapes, rows, strict=True):
            yield f"{_DENSE}{name}", part
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
    rows: dict[str, Tensor] = {}
    layers: list[Curvature] = []
    for key, tensor in tensors.items():
        if key.startswith(_DIAGONAL):
            name = _known(key, key.removeprefix(_DIAGONAL), tensor, params)
            if tensor.shape != params[name].shape:
                raise _misshapen(key, tensor, tuple(params[name].shape))
            if (tensor < 0).any():
                raise WireError("a diagonal must not be negative", field=key)
            diagonal[name] = tensor
        elif key.startswith(_DENSE):
            rows[_known(key, key.removeprefix(_DENSE), tensor, params)] = tensor
        elif key.startswith(_KFAC) and key.endswith("/A"):
            layers.append(_kronecker(key, tensors, params))
        elif not (key.startswith(_KFAC) and _is_partner(key, tensors)):
            raise WireError("unknown key", field=key)
    if rows:
        layers.append(_dense(rows, params))
    if diagonal:
        layers.append(Diagonal(diagonal))
    try:
        return (
            layers[0] if len(layers) == 1 and not _is_layer(layers) else Blocks(layers)
        )
    except FlwrFisherError as error:  # a parameter in two blocks
        raise WireError(str(error), field=PREFIX) from error


def _is_partner(key: str, tensors: Mapping[str, Tensor]) -> bool:
    return key.endswith("/G") and f"{key[:-1]}A" in tensors


def _is_layer(parts: list[Curvature]) -> bool:
    return isinstance(parts[0], Kronecker)


def _known(key: str, name: str, tensor: Tensor, params: Params) -> str:
    if name not in params:
        raise WireError("the model has no such parameter", field=key)
    if tensor.dtype != (expected := params[name].dtype):
        raise WireError(f"dtype {tensor.dtype}, expected {expected}", field=key)
    return name


def _misshapen(key: str, tensor: Tensor, expected: object) -> WireError:
    return WireError(f"shape {tuple(tensor.shape)}, expected {expected}", field=key)


def _kronecker(key: str, tensors: Mapping[str, Tensor], params: Params) -> Kronecker:
    name = key.removeprefix(_KFAC).removesuffix("/A")
    partner = f"{key[:-1]}G"
    if partner not in tensors:
        raise WireError("missing", field=partner)
    A, G = tensors[key], tensors[partner]
    weight = _known(key, name, A, params)
    _known(partner, name, G, params)
    shape = params[weight].shape
    if len(shape) < 2 or A.dim() != 3 or shape[0] % max(A.shape[0], 1):
        raise _misshapen(key, A, f"factors of a weight of shape {tuple(shape)}")
    inputs = shape[1:].numel()
    bias = weight.removesuffix("weight") + "bias" if A.shape[-1] > inputs else None
    if bias is not None and (bias not in params or params[bias].shape != shape[:1]):
        raise _misshapen(key, A, f"[groups, {inputs}, {inputs}]: there is no '{bias}'")
    try:
        layer = Kronecker(weight, shape, A, G, bias)
    except StructureError as error:
        raise WireError(str(error), field=key) from error
    _check_symmetric(key, A)
    _check_symmetric(partner, G)
    return layer


def _dense(rows: Mapping[str, Tensor], params: Params) -> Dense:
    shapes = {name: params[name].shape for name in rows}
    size = sum(shape.numel() for shape in shapes.values())
    for name, part in rows.items():
        if part.shape != (expected := (shapes[name].numel(), size)):
            raise _misshapen(f"{_DENSE}{name}", part, expected)
    matrix = torch.cat(list(rows.values()))
    _check_symmetric(_DENSE, matrix)
    return Dense(shapes, matrix)


def _check_symmetric(key: str, matrix: Tensor) -> None:
    if (matrix.diagonal(dim1=-2, dim2=-1) < 0).any():
        raise WireError("negative on the diagonal", field=key)
    if (matrix - matrix.mT).abs().max() > _SYMMETRY * matrix.abs().max():
        raise WireError("not symmetric", field=key)
