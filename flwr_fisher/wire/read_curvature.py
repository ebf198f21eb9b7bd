"""A curvature from the named tensors that arrived, with a check of every value.

:mod:`flwr_fisher.wire.layout` says which keys and shapes the tensors have.
"""

from collections.abc import Mapping

from torch import Tensor

from flwr_fisher.curvature import (
    BlockDiagonal,
    Curvature,
    Dense,
    Diagonal,
    EigenKronecker,
    Kronecker,
)
from flwr_fisher.curvature.operators.factors import SymmetricFactor
from flwr_fisher.errors import FlwrFisherError, StructureError, WireError
from flwr_fisher.params import Params
from flwr_fisher.wire.checks import check_second_moment
from flwr_fisher.wire.layout import (
    LAYER_PARTS,
    PREFIX,
    Part,
    bias_of,
    check_shape,
    parse_key,
)

# Factors of K-FAC arrive packed as such; everything else is a tensor, to be checked.
Parts = Mapping[str, Tensor | SymmetricFactor]


def tensors_to_curvature(tensors: Parts, params: Params) -> Curvature:
    """Undo :func:`~flwr_fisher.wire.curvature_to_tensors`, with every check.

    Parameters
    ----------
    tensors : Mapping[str, Tensor | SymmetricFactor]
        Finite floats under keys that begin with ``curvature/``.
    params : Mapping[str, Tensor]
        The parameters it belongs to.

    Returns
    -------
    Curvature
        A :class:`Diagonal` or :class:`Dense` where it is just that, else
        :class:`BlockDiagonal`.

    Raises
    ------
    WireError
        Naming the first key that is unknown, missing, misshapen, of another dtype than
        its parameter, not symmetric or negative on the diagonal.
    """
    for key, part in tensors.items():
        check_shape(key, part.shape, params)
        if isinstance(part, Tensor):
            check_values(key, part, params)
    return assembled(tensors, params)


def assembled(tensors: Parts, params: Params) -> Curvature:
    """Return what :func:`tensors_to_curvature` does, of parts that were checked.

    Raises
    ------
    WireError
        If a part is missing, or one too many.
    """
    diagonal: dict[str, Tensor] = {}
    parts: list[Curvature] = []
    plain = {key: t for key, t in tensors.items() if isinstance(t, Tensor)}
    # A merge pairs clients' blocks by place, so the order of arrival must not count.
    places = {name: place for place, name in enumerate(params)}
    parsed = {key: parse_key(key, params) for key in tensors}
    for key in sorted(tensors, key=lambda key: places[parsed[key][1][0]]):
        kind, names = parsed[key]
        if kind == Part.DIAGONAL:
            diagonal[names[0]] = plain[key]
        elif kind == Part.DENSE:
            shapes = {name: params[name].shape for name in names}
            parts.append(Dense(shapes, plain[key]))
        elif key.endswith("/A"):
            layer = key.removesuffix("A")
            parts.append(_layer(layer, names[0], tensors, plain, params))
        elif (first := f"{key[:-1]}A") not in tensors:
            raise WireError("missing", field=first)
    if diagonal:
        parts.append(Diagonal(diagonal))
    if len(parts) == 1 and isinstance(parts[0], Dense | Diagonal):
        return parts[0]
    try:
        return BlockDiagonal(parts)
    except FlwrFisherError as error:  # a parameter in two blocks
        raise WireError(str(error), field=PREFIX) from error


def check_values(key: str, tensor: Tensor, params: Params) -> None:
    """Raise :class:`WireError` unless a tensor called `key` can have those values."""
    part, names = parse_key(key, params)
    if tensor.dtype != (expected := params[names[0]].dtype):
        raise WireError(f"dtype {tensor.dtype}, expected {expected}", field=key)
    if part in (Part.DIAGONAL, Part.MOMENTS):
        if (tensor < 0).any():
            raise WireError("must not be negative", field=key)
    elif part != Part.BASIS:
        check_second_moment(key, tensor)


def _layer(
    key: str, name: str, tensors: Parts, plain: Params, params: Params
) -> Kronecker | EigenKronecker:
    letters = next(LAYER_PARTS[kind] for kind in LAYER_PARTS if key.startswith(kind))
    for letter in letters:
        if f"{key}{letter}" not in tensors:
            raise WireError("missing", field=f"{key}{letter}")
    A, G = tensors[f"{key}A"], tensors[f"{key}G"]
    shape = params[name].shape
    bias = bias_of(name, params) if A.shape[-1] > shape[1:].numel() else None
    try:
        if "S" not in letters:
            return Kronecker(name, shape, A, G, bias)
        of_A, of_G, moments = (plain[f"{key}{letter}"] for letter in letters)
        return EigenKronecker(name, shape, of_A, of_G, moments, bias)
    except StructureError as error:  # its parts do not fit each other
        raise WireError(str(error), field=f"{key}A") from error
