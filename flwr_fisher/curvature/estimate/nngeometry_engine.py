"""The same Fisher through nngeometry: an alternative engine, and an oracle for ours.

The only file that imports nngeometry.
"""

from collections.abc import Iterator
from typing import Any

import torch
from nngeometry.metrics import FIM
from nngeometry.object.pspace import (
    PMatBlockDiag,
    PMatDense,
    PMatDiag,
    PMatEKFAC,
    PMatImplicit,
    PMatKFAC,
    PMatLowRank,
    PMatQuasiDiag,
)
from nngeometry.object.vector import PVector
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.curvature.operators.base import Curvature
from flwr_fisher.curvature.operators.block_diagonal import BlockDiagonal
from flwr_fisher.curvature.operators.dense import Dense
from flwr_fisher.curvature.operators.diagonal import Diagonal
from flwr_fisher.curvature.operators.eigen_kronecker import EigenKronecker
from flwr_fisher.curvature.operators.kronecker import Kronecker
from flwr_fisher.errors import DataError, StructureError
from flwr_fisher.params import Params, flatten, trainable_names, unflatten

__all__ = ["nngeometry_fisher"]

_LAYERS = (nn.Linear, nn.Conv2d)
_REPRESENTATIONS = {
    "kfac": PMatKFAC,
    "diagonal": PMatDiag,
    "ekfac": PMatEKFAC,
    "block": PMatBlockDiag,
    "dense": PMatDense,
    "lowrank": PMatLowRank,
    "quasidiag": PMatQuasiDiag,
    "implicit": PMatImplicit,
}


class _NNGeometryMatrix(Curvature):
    """Any of nngeometry's parameter-space matrices as a curvature.

    Parameters
    ----------
    matrix : PMatAbstract
        The matrix.
    shapes : dict[str, torch.Size]
        The parameters in its order: layer by layer, weight and then bias.
    factor : float
        What to multiply it with.
    """

    def __init__(
        self, matrix: Any, shapes: dict[str, torch.Size], factor: float = 1.0
    ) -> None:
        self.matrix, self.factor, self._shapes = matrix, factor, shapes

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The parameters' shapes."""
        return self._shapes

    def matvec(self, vector: Params) -> dict[str, Tensor]:
        """Return the product."""
        self.check(vector)
        flat = flatten({name: vector[name] for name in self._shapes})
        layers = self.matrix.generator.layer_collection
        product = self.matrix.mv(PVector(layers, vector_repr=flat)).to_torch()
        return unflatten(product.detach() * self.factor, self._shapes)

    def diagonal(self) -> dict[str, Tensor]:
        """Return the diagonal, of the dense matrix."""
        return unflatten(self.to_dense().diagonal().clone(), self._shapes)

    def scaled(self, factor: float) -> "_NNGeometryMatrix":
        """Return the matrix times a factor."""
        return _NNGeometryMatrix(self.matrix, self._shapes, self.factor * factor)

    def to_dense(self) -> Tensor:
        """Return the dense matrix."""
        if isinstance(self.matrix, PMatImplicit):
            like = next(self.matrix.generator.model.parameters())
            eye = torch.eye(self.numel(), dtype=like.dtype, device=like.device)
            columns = [self.matvec(unflatten(row, self._shapes)) for row in eye]
            return torch.stack([flatten(column) for column in columns])
        dense: Tensor = self.matrix.to_torch().detach() * self.factor
        return dense

    @property
    def nbytes(self) -> int:
        """Bytes of the dense matrix."""
        return 4 * self.numel() ** 2


def nngeometry_fisher(
    model: nn.Module, batches: list[Tensor], structure: str
) -> Curvature:
    """Compute any of nngeometry 0.4's representations.

    Parameters
    ----------
    model : nn.Module
        In eval mode, with trained linear and 2-d convolution layers only.
    batches : list[Tensor]
        Inputs on the model's device.
    structure : str
        As in :func:`flwr_fisher.curvature.fisher`, or
        ``lowrank``, ``quasidiag``, ``implicit``.

    Raises
    ------
    StructureError
        For a layer that nngeometry does not know, or is known to get wrong: grouped
        convolutions, and padding other than zeros given as numbers.
    """
    if not batches:
        raise DataError("the loader has no examples, so there is no Fisher to take")
    layers = dict(_layers(model))
    # It wants a DataLoader, whose sampler tells it the number of examples; with its own
    # generator the loader draws nothing from torch's.
    loader = DataLoader(
        TensorDataset(torch.cat(batches)),
        batch_size=len(batches[0]),
        generator=torch.Generator(),
    )
    kind, device = _REPRESENTATIONS[structure], str(batches[0].device)
    matrix = FIM(model, loader, kind, "classif_logits", device=device)
    if structure == "ekfac":
        matrix.update_diag(loader)
        return BlockDiagonal([_eigen(n, x, matrix.data) for n, x in layers.items()])
    if structure == "kfac":
        factors = dict(matrix.data)
        return BlockDiagonal([_kronecker(n, x, *factors[n]) for n, x in layers.items()])
    if structure == "block":
        blocks = dict(matrix.data)
        return BlockDiagonal([_dense(n, x, blocks[n]) for n, x in layers.items()])
    parameters = dict(model.named_parameters())
    shapes = {name: parameters[name].shape for name in trainable_names(model)}
    if structure == "diagonal":
        return Diagonal(unflatten(matrix.get_diag().detach(), shapes))
    if structure == "dense":
        return Dense(shapes, matrix.data.detach())
    return _NNGeometryMatrix(matrix, shapes)


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear | nn.Conv2d]]:
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        reason = None
        if type(module) not in _LAYERS:
            reason = f"{type(module).__name__} is not supported"
        elif not all(p.requires_grad for p in own):
            reason = "frozen parameters are not supported"
        elif isinstance(module, nn.Conv2d):
            if module.groups != 1:
                reason = "its result is wrong for grouped convolutions"
            elif module.padding_mode != "zeros" or isinstance(module.padding, str):
                reason = "only zero padding given as numbers is right"
        if reason:
            raise StructureError(f"layer '{name}' through nngeometry: {reason}")
        assert isinstance(module, _LAYERS)
        yield name, module


def _names(name: str, layer: nn.Linear | nn.Conv2d) -> tuple[str, str | None]:
    prefix = f"{name}." if name else ""
    return f"{prefix}weight", f"{prefix}bias" if layer.bias is not None else None


def _kronecker(
    name: str, layer: nn.Linear | nn.Conv2d, A: Tensor, G: Tensor
) -> Kronecker:
    weight, bias = _names(name, layer)
    factors = (A.detach().unsqueeze(0), G.detach().unsqueeze(0))
    return Kronecker(weight, layer.weight.shape, *factors, bias)


def _eigen(name: str, layer: nn.Linear | nn.Conv2d, data: Any) -> EigenKronecker:
    weight, bias = _names(name, layer)
    bases, moments = data
    A, G = (basis.detach().unsqueeze(0) for basis in bases[name])
    S = moments[name].detach().reshape(1, G.shape[1], A.shape[1])
    return EigenKronecker(weight, layer.weight.shape, A, G, S, bias)


def _dense(name: str, layer: nn.Linear | nn.Conv2d, matrix: Tensor) -> Dense:
    weight, bias = _names(name, layer)
    shapes = {weight: layer.weight.shape}
    if bias is not None and layer.bias is not None:
        shapes[bias] = layer.bias.shape
    return Dense(shapes, matrix.detach())
