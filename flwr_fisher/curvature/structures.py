"""What each structure sums, and what becomes of the sums."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from flwr_fisher.curvature.base import Blocks, Curvature
from flwr_fisher.curvature.diagonal import Diagonal
from flwr_fisher.curvature.engine import Engine
from flwr_fisher.curvature.explain import explained_layers
from flwr_fisher.curvature.jacobians import (
    DenseJacobian,
    DiagonalJacobian,
    JacobianMoments,
)
from flwr_fisher.curvature.kronecker import Kronecker
from flwr_fisher.curvature.moments import (
    BlockMoments,
    DiagonalMoments,
    EigenMoments,
    KroneckerMoments,
    LayerMoments,
)
from flwr_fisher.curvature.taps import Tap, TappableLayer
from flwr_fisher.errors import StructureError
from flwr_fisher.params import trainable_names

__all__ = ["STRUCTURES", "Plan"]

STRUCTURES = ("kfac", "diagonal", "ekfac", "block", "dense")
_LARGEST = 2**31  # bytes of a dense matrix, or of all of a model's dense blocks
_FEW = 16  # examples to look at before the first batch
_SHARE = 1.1  # of a training step's memory, by estimate
_FEWEST = 8  # examples at once, unless a bound says otherwise


class Plan:
    """What to sum for the structures asked for, settled on the first batch.

    Parameters
    ----------
    model : nn.Module
        In eval mode.
    inputs : Tensor
        The first batch.
    structures : Sequence[str]
        Of :data:`STRUCTURES`.
    max_batch_bytes : int | None
        How much an engine may hold beyond the forward pass; by default so much that all
        is no more than about what a training step on the first batch takes.
    kfac : Curvature | None
        The K-FAC of the same model, whose eigenbasis ``ekfac`` takes.

    Raises
    ------
    StructureError
        If a dense matrix would be too large.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Tensor,
        structures: Sequence[str],
        max_batch_bytes: int | None,
        kfac: Curvature | None = None,
    ) -> None:
        self.structures = structures
        self.names = trainable_names(model)
        layered = [s for s in structures if s != "dense"]
        layers: dict[str, TappableLayer] = {}
        if layered:
            layers, taps = explained_layers(model, inputs[:_FEW])
        found = kfac.blocks() if kfac is not None else []
        if "block" in structures:
            self._check_size([x.matrices().numel() for x in layers.values()])
        bases = {k.weight: k for k in found if isinstance(k, Kronecker)}
        self.moments = {
            name: {s: _moments(s, layer, bases) for s in layered}
            for name, layer in layers.items()
        }
        taken = {p for layer in layers.values() for p in (layer.weight, layer.bias)}
        rest = [name for name in self.names if name not in taken]
        self.rest = DiagonalJacobian(model, rest) if layered and rest else None
        self.dense: DenseJacobian | None = None
        if "dense" in structures:
            self._check_size([sum(model.get_parameter(n).numel() for n in self.names)])
            self.dense = DenseJacobian(model, self.names)
        sizes = [_bytes(x, taps[n], self.moments[n]) for n, x in layers.items()]
        forward = sum(activations for activations, _ in sizes)
        beyond = sum(extra for _, extra in sizes)
        if max_batch_bytes is None:
            gradients = sum(model.get_parameter(n).nbytes for n in self.names)
            step = _SHARE * (len(inputs) * forward + gradients)
            sums = [m.nbytes for found in self.moments.values() for m in found.values()]
            chunk = max(_FEWEST, int((step - sum(sums)) / max(forward + beyond, 1)))
        else:
            chunk = max(1, max_batch_bytes // max(beyond, 1))
        moments = {name: list(found.values()) for name, found in self.moments.items()}
        jacobians: list[JacobianMoments] = [
            j for j in (self.rest, self.dense) if j is not None
        ]
        self.engine = Engine(model, moments, jacobians, chunk)

    def _check_size(self, sizes: list[int]) -> None:
        needed = 4 * sum(size**2 for size in sizes)
        if needed > _LARGEST:
            raise StructureError(
                f"a dense matrix over up to {max(sizes)} parameters needs "
                f"{needed / 1e9:.1f} GB in all: use structure='kfac', 'ekfac' or "
                "'diagonal'"
            )

    def results(self) -> dict[str, Curvature]:
        """Return each structure's mean over the examples taken."""
        return {structure: self._result(structure) for structure in self.structures}

    def _result(self, structure: str) -> Curvature:
        count = self.engine.count
        if structure == "dense":
            assert self.dense is not None
            return self.dense.mean(count)
        parts = [found[structure].mean(count) for found in self.moments.values()]
        if self.rest is not None:
            parts.append(self.rest.mean(count))
        if structure != "diagonal":
            return Blocks(parts)
        entries = {name: d for part in parts for name, d in part.diagonal().items()}
        return Diagonal({name: entries[name] for name in self.names})


def _moments(
    structure: str, layer: TappableLayer, bases: Mapping[str, Kronecker]
) -> LayerMoments:
    if structure == "ekfac":
        return EigenMoments(layer, bases[layer.weight])
    kinds: dict[str, Callable[[TappableLayer], LayerMoments]] = {
        "kfac": KroneckerMoments,
        "diagonal": DiagonalMoments,
        "block": BlockMoments,
    }
    return kinds[structure](layer)


def _bytes(
    layer: TappableLayer, tap: Tap, moments: Mapping[str, LayerMoments]
) -> tuple[int, int]:
    """Return what an example takes in a training step, and here beyond its forward.

    A step keeps each layer's input and output, and as much again in what lies between
    layers; here come its columns, its gradient and, summed over positions, the
    gradient of its weight.
    """
    columns = layer.input_columns(tap.inputs[:1])
    weight = layer.matrices()
    outputs = weight.shape[0] * weight.shape[1] * columns.shape[3]
    step = 2 * (tap.inputs[:1].numel() + outputs)
    paired = columns.shape[3] > 1 and any(m.pairs for m in moments.values())
    beyond = columns.numel() + outputs + paired * weight.numel()
    return step * columns.element_size(), beyond * columns.element_size()
