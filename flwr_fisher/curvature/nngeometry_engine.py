"""The same Fisher through nngeometry: an alternative engine, and an oracle for ours.

The only file that imports nngeometry.
"""

from collections.abc import Iterator

import torch
from nngeometry.metrics import FIM
from nngeometry.object.pspace import PMatDense, PMatDiag, PMatKFAC
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.curvature.base import Blocks, Curvature
from flwr_fisher.curvature.dense import Dense
from flwr_fisher.curvature.diagonal import Diagonal
from flwr_fisher.curvature.kronecker import Kronecker
from flwr_fisher.errors import DataError, StructureError
from flwr_fisher.params import trainable_names, unflatten

__all__ = ["nngeometry_fisher"]

_LAYERS = (nn.Linear, nn.Conv2d)


def nngeometry_fisher(
    model: nn.Module, batches: list[Tensor], structure: str
) -> Curvature:
    """Compute ``kfac``, ``diagonal`` or ``dense`` with nngeometry 0.4.

    Parameters
    ----------
    model : nn.Module
        In eval mode, with trained linear and 2-d convolution layers only.
    batches : list[Tensor]
        Inputs on the model's device.
    structure : "kfac" | "diagonal" | "dense"
        As in :func:`flwr_fisher.curvature.fisher`.

    Raises
    ------
    StructureError
        For a layer that nngeometry does not know, or is known to get wrong: grouped
        convolutions, and padding other than zeros given as numbers.
    """
    if not batches:
        raise DataError("the loader has no examples, so there is no Fisher to take")
    layers = dict(_layers(model))
    kind = {"kfac": PMatKFAC, "diagonal": PMatDiag, "dense": PMatDense}[structure]
    # It wants a DataLoader, whose sampler tells it the number of examples; with its own
    # generator the loader draws nothing from torch's.
    loader = DataLoader(
        TensorDataset(torch.cat(batches)),
        batch_size=len(batches[0]),
        generator=torch.Generator(),
    )
    matrix = FIM(model, loader, kind, "classif_logits", device=str(batches[0].device))
    if structure == "kfac":
        found = dict(matrix.data)
        return Blocks([_kronecker(n, x, *found[n]) for n, x in layers.items()])
    parameters = dict(model.named_parameters())
    shapes = {name: parameters[name].shape for name in trainable_names(model)}
    if structure == "diagonal":
        return Diagonal(unflatten(matrix.get_diag().detach(), shapes))
    return Dense(shapes, matrix.data.detach())


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


def _kronecker(
    name: str, layer: nn.Linear | nn.Conv2d, A: Tensor, G: Tensor
) -> Kronecker:
    prefix = f"{name}." if name else ""
    bias = f"{prefix}bias" if layer.bias is not None else None
    factors = (A.detach().unsqueeze(0), G.detach().unsqueeze(0))
    shape = torch.Size(layer.weight.shape)
    return Kronecker(f"{prefix}weight", shape, *factors, bias)
