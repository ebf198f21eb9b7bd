"""What a structure is: its estimate, its wire form and its preconditioner.

A structure approximates the curvature of each layer by one kind of block, such as a
Kronecker product. Parameters of no layer have their exact diagonal in every structure.
A file of this folder defines one structure and registers it. Clients, merges and the
wire format know structures through this interface only.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from flwr_fisher.curvature.estimate.accumulators import LayerAccumulator
from flwr_fisher.curvature.estimate.layers import KroneckerLayer
from flwr_fisher.curvature.operators.base import Curvature, Matvec
from flwr_fisher.curvature.operators.factors import SymmetricFactor
from flwr_fisher.curvature.operators.lazy import WeightedSum
from flwr_fisher.errors import StructureError
from flwr_fisher.params import Params, Shapes

Parts = Mapping[str, Tensor | SymmetricFactor]  # a block's tensors by their letters
# Of a sum: weights and blocks. A block may be a stack of several; then their weights
# are a tensor.
Terms = Sequence[tuple[float | Tensor, Curvature]]


class Form(Enum):
    """The form of a block's tensor, from which follows how it travels."""

    VECTOR = "non-negative numbers, in the parameter's shape"
    MATRIX = "symmetric positive semi-definite matrices [groups, n, n]"


class Structure(ABC):
    """One way to approximate a layer's curvature.

    Attributes
    ----------
    name : str
        What strategies call it, and the beginning of its tensors' keys.
    block : type[Curvature]
        The class of its blocks.
    tensors : Mapping[str, Form]
        The form of each of a block's tensors, by a letter; ``""`` if there is one.
    has_positions : bool
        Whether it has a choice of what it does with several positions of a layer, as
        K-FAC has (``weight_sharing``, ``max_positions``).
    """

    name: ClassVar[str]
    block: ClassVar[type[Curvature]]
    tensors: ClassVar[Mapping[str, Form]]
    has_positions: ClassVar[bool] = False

    # --- the estimate

    @abstractmethod
    def accumulator(
        self, layer: KroneckerLayer, weight_sharing: str
    ) -> LayerAccumulator:
        """Return the empty sums, over examples, from which a layer's block is made."""

    # --- the wire form

    @abstractmethod
    def parts(self, block: Curvature) -> dict[str, Tensor]:
        """Return a block's tensors by their letters."""

    @abstractmethod
    def block_of(
        self, name: str, shape: torch.Size, parts: Parts, bias: str | None
    ) -> Curvature:
        """Return the block with these tensors.

        Parameters
        ----------
        name, shape : str, torch.Size
            The layer's weight, or the only parameter.
        parts : Mapping[str, Tensor | SymmetricFactor]
            The tensors by their letters. All have been checked.
        bias : str | None
            The layer's bias, if it has one. The block may be without it, which shows in
            the rows of its matrices.

        Raises
        ------
        StructureError
            If the tensors do not fit each other.
        """

    def rows(self, letter: str, outputs: int, inputs: int) -> int:
        """Return how many rows a matrix has, for a group's outputs and inputs.

        The inputs include the bias, if the block covers one.
        """
        raise AssertionError("only structures with matrices are asked")

    @abstractmethod
    def trace(self, traces: Mapping[str, Sequence[float]]) -> float:
        """Return a block's trace from the traces of its tensors.

        A matrix has one trace for each group; a vector has its sum.
        """

    # --- the preconditioner

    def preconditioner(
        self, terms: Terms, shapes: Shapes, ridge: float
    ) -> Matvec | None:
        r"""Return an approximate inverse of :math:`\sum_i w_i F_i + \lambda I`.

        Parameters
        ----------
        terms : Sequence[tuple[float | Tensor, Curvature]]
            The weights, and blocks of this structure of one layer. A block may be
            several clients', one stacked on the other; then the weight is a tensor, one
            for each.
        shapes : Mapping[str, torch.Size]
            The parameters that a block of one client covers.
        ridge : float
            :math:`\lambda > 0`.

        Returns
        -------
        Callable or None
            A function; None if these blocks have none but that of the sum's diagonal.
        """
        return None


STRUCTURES: dict[str, Structure] = {}
Registered = TypeVar("Registered", bound=type[Structure])


def register(structure: Registered) -> Registered:
    """Register a class of structures under its name; this is a decorator."""
    STRUCTURES[structure.name] = structure()
    return structure


def structure_of(block: Curvature) -> Structure:
    """Return the structure of a block.

    Raises
    ------
    StructureError
        If none has such blocks.
    """
    for structure in STRUCTURES.values():
        if type(block) is structure.block:
            return structure
    raise StructureError(
        f"a {type(block).__name__} is the block of no structure: use one of "
        f"{sorted(STRUCTURES)}"
    )


_LEAST = 1e-4  # ridge over the mean eigenvalue, for singular matrices


def preconditioner(curvature: WeightedSum, ridge: float) -> Matvec:
    """Return a function: an approximate inverse of ``curvature + ridge I``.

    It is the preconditioner of the structure that all terms have, or the inverse of the
    diagonal.

    Parameters
    ----------
    curvature : WeightedSum
        The curvature of one layer, with a mean eigenvalue of 1.
    ridge : float
        At least 0; here it counts as at least 1e-4.
    """
    ridge = max(ridge, _LEAST)
    terms = curvature.stacks()
    kinds = {type(term) for _, term in terms}
    for structure in STRUCTURES.values():
        inverse = kinds == {structure.block} and structure.preconditioner(
            terms, curvature.shapes, ridge
        )
        if inverse:
            return inverse
    return inverse_of_diagonal(curvature.diagonal(), ridge)


def inverse_of_diagonal(diagonal: Params, ridge: float) -> Matvec:
    """Return a function that divides by a diagonal plus the ridge."""
    return lambda vector: {k: v / (diagonal[k] + ridge) for k, v in vector.items()}
