"""The sums over examples of a model's layers, and of its other parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from flwr_fisher.curvature.batch import Inputs
from flwr_fisher.curvature.estimate.accumulators import (
    BlockAccumulator,
    EigenAccumulator,
    LayerAccumulator,
)
from flwr_fisher.curvature.estimate.forms import Forms
from flwr_fisher.curvature.estimate.jacobians import (
    DenseJacobian,
    DiagonalJacobian,
    JacobianAccumulator,
)
from flwr_fisher.curvature.estimate.layers import KroneckerLayer, SquaredGradients
from flwr_fisher.curvature.estimate.options import LARGEST_FACTOR
from flwr_fisher.curvature.model_checks import check_examples_are_independent
from flwr_fisher.curvature.operators.base import Curvature
from flwr_fisher.curvature.operators.kronecker import Kronecker
from flwr_fisher.curvature.operators.plain import BlockDiagonal, Diagonal
from flwr_fisher.curvature.structures import STRUCTURES, Form
from flwr_fisher.errors import StructureError
from flwr_fisher.params import trainable

_LARGEST = 2**31  # bytes of a dense matrix, or of all of a model's dense blocks


@dataclass(frozen=True)
class ModelSums:
    """The sums of some structures.

    Parameters
    ----------
    names : list[str]
        The trained parameters' names, in the model's order.
    accumulators : dict[str, dict[str, LayerAccumulator]]
        Of each layer with a Kronecker form, by structure.
    direct : dict[str, SquaredGradients]
        Of each norm, embedding and shared parameter.
    jacobians : dict[str, JacobianAccumulator]
        ``"others"``: of the diagonal of all other parameters; ``"dense"``.
    """

    names: list[str]
    accumulators: dict[str, dict[str, LayerAccumulator]]
    direct: dict[str, SquaredGradients]
    jacobians: dict[str, JacobianAccumulator]

    def mean(self, structure: str, count: int) -> Curvature:
        """Return a structure's mean over so many examples; its sums are used up."""
        if structure == "dense":
            return self.jacobians["dense"].mean(count)
        entries: dict[str, Tensor] = {}
        for squares in self.direct.values():
            entries |= squares.sums.mean(count)
        if "others" in self.jacobians:
            entries |= self.jacobians["others"].mean(count).diagonal()
        parts: list[Curvature] = []
        for each in self.accumulators.values():
            part = each[structure].mean(count)
            if isinstance(part, Diagonal):
                entries |= part.diagonal()
            else:
                parts.append(part)
        if entries:
            ordered = {name: entries[name] for name in self.names if name in entries}
            parts.append(Diagonal(ordered))
        return parts[0] if structure == "diagonal" else BlockDiagonal(parts)


def make_sums(
    model: nn.Module,
    inputs: Inputs,
    structures: Sequence[str],
    weight_sharing: str = "expand",
    kfac: Curvature | None = None,
    max_bytes: int | None = None,
) -> tuple[Forms, ModelSums]:
    """Return the form of each parameter, and empty sums for them.

    Parameters
    ----------
    model : nn.Module
        In eval mode.
    inputs : Inputs
        The first batch, which decides how each layer is computed.
    structures : Sequence[str]
        Some of :data:`STRUCTURES`.
    weight_sharing : str
        One of :data:`WEIGHT_SHARINGS`: what K-FAC does with several positions.
    kfac : Curvature | None
        The K-FAC of the same model; ``ekfac`` takes its eigenbasis. A layer that has
        none has its diagonal.
    max_bytes : int, optional
        As for :meth:`Forms.of`.

    Raises
    ------
    StructureError
        If a dense matrix would be too large, or an example's outputs are not its own.
    """
    check_examples_are_independent(model, "an example has no Fisher of its own")
    by_layer = [s for s in structures if s != "dense"]
    forms = Forms.of(model, inputs, max_bytes)
    if "block" in structures:
        _check_size([layer.matrices().numel() for layer in forms.layers.values()])
    blocks = kfac.blocks() if kfac is not None else []
    bases = {k.weight: k for k in blocks if isinstance(k, Kronecker)}
    kinds: dict[str, Callable[[KroneckerLayer], LayerAccumulator]] = {
        name: partial(structure.accumulator, weight_sharing=weight_sharing)
        for name, structure in STRUCTURES.items()
    }
    # Two more serve tests as oracles.
    kinds["ekfac"] = lambda layer: EigenAccumulator(layer, bases[layer.weight])
    kinds["block"] = BlockAccumulator
    with_factors = {
        "ekfac",
        *(n for n, s in STRUCTURES.items() if Form.MATRIX in s.tensors.values()),
    }

    def kind(structure: str, layer: KroneckerLayer) -> str:
        large = max(layer.matrices().shape[1:]) > LARGEST_FACTOR
        no_basis = structure == "ekfac" and layer.weight not in bases
        no_factors = large and structure in with_factors
        return "diagonal" if no_basis or no_factors else structure

    accumulators = {
        name: {s: kinds[kind(s, layer)](layer) for s in by_layer}
        for name, layer in forms.layers.items()
    }
    direct = {name: SquaredGradients(each) for name, each in forms.direct.items()}
    if not by_layer:  # a dense matrix is of per-example gradients alone
        accumulators, direct = {}, {}
    jacobians: dict[str, JacobianAccumulator] = {}
    if forms.others and by_layer:
        jacobians["others"] = DiagonalJacobian(model, forms.others)
    parameters = trainable(model)
    if "dense" in structures:
        _check_size([sum(p.numel() for p in parameters.values())])
        jacobians["dense"] = DenseJacobian(model, list(parameters))
    return forms, ModelSums(list(parameters), accumulators, direct, jacobians)


def _check_size(sizes: list[int]) -> None:
    needed = 4 * sum(size**2 for size in sizes)
    if needed > _LARGEST:
        raise StructureError(
            f"dense matrices over up to {max(sizes)} parameters need "
            f"{needed / 1e9:.1f} GB in all: use structure='kfac', 'ekfac' or "
            "'diagonal'"
        )
