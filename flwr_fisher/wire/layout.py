"""The layout of a curvature as named tensors: their keys and shapes.

A block's tensor has the key ``curvature/<structure>/<parameter>``, and ``/<letter>`` at
the end if the structure's blocks have several tensors. So a diagonal is sent as
``curvature/diagonal/<parameter>``, in the parameter's shape, and K-FAC's factors as
``curvature/kfac/<weight>/A`` and ``…/G``, each ``[groups, n, n]``. A matrix includes a
layer's bias if it has one more row than the weight has inputs. This file knows no
structure by name: :data:`~flwr_fisher.curvature.structures.STRUCTURES` says which
tensors a block has.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.curvature import BlockDiagonal, Curvature, Diagonal
from flwr_fisher.curvature.estimate.options import LARGEST_FACTOR
from flwr_fisher.curvature.operators.factors import SymmetricFactor
from flwr_fisher.curvature.structures import STRUCTURES, Form, Structure, structure_of
from flwr_fisher.errors import FlwrFisherError, StructureError, WireError
from flwr_fisher.params import Params, bias_of, curvature_dtype, widened
from flwr_fisher.wire.arrays import (
    Layout,
    announced_shape,
    check_count,
    check_second_moment,
)

PREFIX = "curvature/"
FORMAT = f"{PREFIX}format"  # the description of the others; no curvature
# A few bytes can announce large factors of many groups, and the server does not know
# how many groups a layer has. So all groups' factors together may have at most `_MOST`
# times the entries that they would have with one group, or `_SMALL` entries.
_MOST, _SMALL = 16, 1 << 20
_KEYS = 4  # per parameter in a record, at most: its own, and a block's

# Matrices may arrive packed; all else is tensors to check.
Parts = Mapping[str, Tensor | SymmetricFactor]


@dataclass(frozen=True)
class Key:
    """What a curvature's key says: the structure, the parameter and the letter."""

    structure: Structure
    name: str
    letter: str

    def __str__(self) -> str:
        letter = f"/{self.letter}" if self.letter else ""
        return f"{PREFIX}{self.structure.name}/{self.name}{letter}"

    @property
    def form(self) -> Form:
        """The form of the tensor."""
        return self.structure.tensors[self.letter]

    @property
    def is_diagonal(self) -> bool:
        """Whether it is of the diagonal, which every structure has for the rest."""
        return self.structure.block is Diagonal

    @staticmethod
    def parse(key: str, params: Params) -> "Key":
        """Return what a key that arrived says.

        Raises
        ------
        WireError
            If the layout has no such key, or the model has no such floating-point
            parameter.
        """
        if (parsed := _split(key)) is None:
            raise WireError("unknown key", field=key)
        if (name := parsed.name) not in params:
            raise WireError(f"the model has no such parameter '{name}'", field=key)
        if not params[name].is_floating_point():
            reason = f"'{name}' has dtype {params[name].dtype}, so it has no curvature"
            raise WireError(reason, field=key)
        return parsed


@lru_cache(maxsize=4096)  # all clients' are the same
def _split(key: str) -> Key | None:
    start, _, rest = key.removeprefix(PREFIX).partition("/")
    structure = STRUCTURES.get(start) if key.startswith(PREFIX) else None
    letter = ""
    if structure is not None and "" not in structure.tensors:
        rest, _, letter = rest.rpartition("/")
    if structure is None or letter not in structure.tensors:
        return None
    return Key(structure, rest, letter)


def diagonal_key(name: str) -> str:
    """Return the key of a parameter's diagonal."""
    return str(Key(structure_of(Diagonal({})), name, ""))


def curvature_to_tensors(curvature: Curvature) -> dict[str, Tensor]:
    """Return a curvature as named tensors in at least float32, without other copies.

    Raises
    ------
    StructureError
        If a block is of no structure (for example, a lazy sum).
    """
    tensors = {}
    for block in (each.made() for each in curvature.blocks()):
        structure, name = structure_of(block), next(iter(block.shapes))
        for letter, tensor in structure.parts(block).items():
            tensors[str(Key(structure, name, letter))] = widened(tensor)
    return tensors


# --- checks of keys and shapes, before anything is decoded


def curvature_layouts(record: ArrayRecord, params: Params) -> dict[str, Layout]:
    """Return dtypes and announced shapes of a record's curvature, after their check."""
    check_count(record, _KEYS * len(params) + 1)
    layouts: dict[str, Layout] = {}
    for key, array in record.items():
        if key.startswith(PREFIX) and key != FORMAT:
            shape = announced_shape(key, array)
            check_shape(key, shape, params)
            layouts[key] = curvature_dtype(params[Key.parse(key, params).name]), shape
    return layouts


def check_shape(key: str, shape: Sequence[int], params: Params) -> None:
    """Raise :class:`WireError` unless a tensor called `key` can have that shape.

    A factor has at most 16384 rows: for layers with more, clients send an exact
    diagonal. Without this limit, a few bytes could announce gigabytes.

    Parameters
    ----------
    key : str
        Begins with ``curvature/``.
    shape : Sequence[int]
        The shape of the received tensor, or its announced shape.
    params : Mapping[str, Tensor]
        The model's parameters.
    """
    parsed = Key.parse(key, params)
    shape, weight = tuple(shape), params[parsed.name].shape
    if parsed.form == Form.VECTOR:
        expected = {tuple(weight)}
    else:
        groups = shape[0] if len(shape) == 3 else 0
        if not _can_have(weight, groups):
            wanted = f"matrices of a weight of shape {(*weight,)}"
            raise WireError(f"shape {shape}, expected {wanted}", field=key)
        if max(shape[1:]) > LARGEST_FACTOR:
            reason = f"shape {shape}, but at most {LARGEST_FACTOR} rows"
            raise WireError(reason, field=key)
        inputs = weight[1:].numel()
        widths = {inputs, inputs + (bias_of(parsed.name, params) is not None)}
        outputs = weight[0] // groups
        rows = (parsed.structure.rows(parsed.letter, outputs, n) for n in widths)
        expected = {(groups, n, n) for n in rows}
    if shape not in expected:
        wanted = " or ".join(map(str, sorted(expected)))
        raise WireError(f"shape {shape}, expected {wanted}", field=key)


def _can_have(weight: torch.Size, groups: int) -> bool:
    """Return whether the layer of a weight can have this number of groups."""
    if len(weight) < 3:  # only convolutions have groups
        return len(weight) == 2 and groups == 1
    if not 1 <= groups <= max(weight[0], 1) or weight[0] % groups:
        return False
    square = weight[1:].numel() ** 2
    return groups * square <= max(_MOST * (square + weight[0] ** 2), _SMALL)


# --- from tensors to a curvature


def tensors_to_curvature(tensors: Parts, params: Params) -> BlockDiagonal:
    """Return the curvature of tensors that arrived, after all checks.

    Parameters
    ----------
    tensors : Mapping[str, Tensor | SymmetricFactor]
        Finite floating-point tensors under keys that begin with ``curvature/``, of the
        shapes and dtypes of :func:`curvature_layouts`.
    params : Mapping[str, Tensor]
        The parameters to which the curvature belongs.

    Returns
    -------
    BlockDiagonal
        A block for each layer, and a :class:`Diagonal` for each other parameter.

    Raises
    ------
    WireError
        It names the first key that is missing, is not symmetric, or is negative.
    """
    for key, part in tensors.items():
        if not isinstance(part, Tensor):
            continue
        if Key.parse(key, params).form == Form.MATRIX:
            check_second_moment(key, part)
        elif (part < 0).any():
            raise WireError("must not be negative", field=key)
    return checked_to_curvature(tensors, params)


def checked_to_curvature(tensors: Parts, params: Params) -> BlockDiagonal:
    """Return the curvature of tensors whose values need no check, such as a mean.

    In float64 the check would refuse what it allows for in float32: the rounding of the
    smallest floats.
    """
    by_block = keys_by_block(tensors, params)
    blocks = [block_of({k: tensors[k] for k in keys}, params) for keys in by_block]
    return join_blocks(blocks)


def keys_by_block(keys: Iterable[str], params: Params) -> list[list[str]]:
    """Return the keys of each block, in the order of the parameters, diagonals last.

    A merge pairs clients' blocks by their order, so this order must not depend on the
    upload.

    Raises
    ------
    WireError
        If a block's tensor is missing.
    """
    parsed = {key: Key.parse(key, params) for key in keys}
    return _by_block(frozenset(parsed.items()), tuple(params))


@lru_cache(maxsize=64)  # all clients' are the same
def _by_block(
    keys: frozenset[tuple[str, Key]], names: tuple[str, ...]
) -> list[list[str]]:
    positions = {name: position for position, name in enumerate(names)}
    blocks: dict[tuple[bool, int, str], list[str]] = {}
    for text, key in sorted(keys, key=operator.itemgetter(0)):
        block = (key.is_diagonal, positions[key.name], key.structure.name)
        blocks.setdefault(block, []).append(text)
    for block in blocks:
        structure, name = STRUCTURES[block[2]], names[block[1]]
        for letter in structure.tensors:
            if (wanted := str(Key(structure, name, letter))) not in blocks[block]:
                raise WireError("missing", field=wanted)
    return [blocks[block] for block in sorted(blocks)]


def block_of(parts: Parts, params: Params) -> Curvature:
    """Return the block of checked parts, given its keys.

    Raises
    ------
    WireError
        If the parts do not fit each other.
    """
    keys = {key: Key.parse(key, params) for key in parts}
    first = next(iter(keys.values()))
    letters = {keys[key].letter: part for key, part in parts.items()}
    shape, bias = params[first.name].shape, bias_of(first.name, params)
    return _made(first, shape, letters, bias)


@lru_cache(maxsize=4096)  # all clients' are the same
def stand_in(
    key: Key,
    shape: torch.Size,
    sizes: tuple[tuple[str, tuple[int, ...]], ...],
    bias: str | None,
) -> Curvature:
    """Return a block of parts with these sizes, by letter; they take no memory.

    `shape` is the parameter's, and `bias` its layer's.

    Raises
    ------
    WireError
        If the parts do not fit each other.
    """
    empty = partial(torch.empty, dtype=torch.float32, device="meta")
    return _made(key, shape, {k: empty(size) for k, size in sizes}, bias)


def _made(key: Key, shape: torch.Size, letters: Parts, bias: str | None) -> Curvature:
    try:
        return key.structure.block_of(key.name, shape, letters, bias)
    except StructureError as error:  # the parts do not fit each other
        raise WireError(str(error), field=str(key)) from error


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


def trace_name(block: Curvature) -> str:
    """Return a policy's name for the trace of a layer's curvature."""
    return f"curvature of {next(iter(block.shapes))}"
