"""The Fisher by nngeometry: an alternative engine, against which ours is tested.

No other file imports nngeometry.
"""

from collections.abc import Iterator

import torch
from nngeometry.metrics import FIM
from nngeometry.object import pspace
from nngeometry.object.vector import PVector
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.curvature.batch import Inputs
from flwr_fisher.curvature.estimate.layers import KroneckerLayer, layer_of
from flwr_fisher.curvature.operators.base import Curvature
from flwr_fisher.curvature.operators.kronecker import EigenKronecker, Kronecker
from flwr_fisher.curvature.operators.plain import BlockDiagonal, Dense, Diagonal
from flwr_fisher.errors import DataError, StructureError
from flwr_fisher.params import trainable, unflatten

_LAYERS = (nn.Linear, nn.Conv2d)
_REPRESENTATIONS = {
    "kfac": pspace.PMatKFAC,
    "diagonal": pspace.PMatDiag,
    "ekfac": pspace.PMatEKFAC,
    "block": pspace.PMatBlockDiag,
    "dense": pspace.PMatDense,
    "lowrank": pspace.PMatLowRank,
    "quasidiag": pspace.PMatQuasiDiag,
    "implicit": pspace.PMatImplicit,
}


def nngeometry_fisher(
    model: nn.Module, batches: list[Inputs], structure: str
) -> Curvature:
    """Compute a Fisher in one of nngeometry 0.4's representations.

    Parameters
    ----------
    model : nn.Module
        In eval mode, with trained linear and 2-d convolution layers only.
    batches : list[Inputs]
        On the model's device; one tensor each, by position.
    structure : str
        As in :func:`flwr_fisher.curvature.fisher`, or ``lowrank``, ``quasidiag`` or
        ``implicit``, as a dense matrix.

    Raises
    ------
    StructureError
        For a layer that nngeometry does not support, or for which its result is known
        to be wrong: grouped convolutions, and padding other than zeros given as
        numbers.
    """
    if not batches:
        raise DataError("the loader has no examples, so it has no Fisher")
    if any(len(each.args) != 1 or each.kwargs for each in batches):
        raise StructureError(
            "engine='nngeometry' takes models of one input only: leave engine out"
        )
    tensors = [each.args[0] for each in batches]
    layers = list(_layers(model))
    # It wants a DataLoader, whose sampler tells it the number of examples; with its own
    # generator the loader draws nothing from torch's.
    loader = DataLoader(
        TensorDataset(torch.cat(tensors)),
        batch_size=len(tensors[0]),
        generator=torch.Generator(),
    )
    kind, device = _REPRESENTATIONS[structure], str(tensors[0].device)
    matrix = FIM(model, loader, kind, "classif_logits", device=device)
    if structure == "ekfac":
        matrix.update_diag(loader)
        bases, moments = matrix.data
        return BlockDiagonal([_eigen(x, bases[n], moments[n]) for n, x in layers])
    if structure == "kfac":
        factors = dict(matrix.data)
        return BlockDiagonal([_kronecker(x, factors[n]) for n, x in layers])
    if structure == "block":
        blocks = dict(matrix.data)
        return BlockDiagonal([Dense(x.shapes(), blocks[n].detach()) for n, x in layers])
    shapes = {name: p.shape for name, p in trainable(model).items()}
    if structure == "diagonal":
        return Diagonal(unflatten(matrix.get_diag().detach(), shapes))
    if structure != "implicit":
        return Dense(shapes, matrix.to_torch().detach())
    # It knows products alone: one with each coordinate.
    eye = torch.eye(sum(s.numel() for s in shapes.values())).to(tensors[0])
    layers_of = matrix.generator.layer_collection
    rows = [matrix.mv(PVector(layers_of, vector_repr=v)).to_torch() for v in eye]
    return Dense(shapes, torch.stack(rows).detach())


def _layers(model: nn.Module) -> Iterator[tuple[str, KroneckerLayer]]:
    seen = set[nn.Parameter]()
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        reason = None
        if type(module) not in _LAYERS:
            reason = f"{type(module).__name__} is not supported"
        elif not all(p.requires_grad for p in own):
            reason = "frozen parameters are not supported"
        elif not seen.isdisjoint(own):
            reason = "tied parameters are not supported"
        elif isinstance(module, nn.Conv2d):
            if module.groups != 1:
                reason = "its result is wrong for grouped convolutions"
            elif module.padding_mode != "zeros" or isinstance(module.padding, str):
                reason = "only zero padding given as numbers is right"
        if reason:
            raise StructureError(
                f"layer '{name}' through nngeometry: {reason}. Leave engine out"
            )
        layer = layer_of(
            module,
            f"{name}.weight".lstrip("."),
            f"{name}.bias".lstrip(".") if len(own) > 1 else None,
        )
        assert isinstance(layer, KroneckerLayer)
        seen.update(own)
        yield name, layer


def _kronecker(layer: KroneckerLayer, factors: tuple[Tensor, Tensor]) -> Kronecker:
    A, G = (factor.detach().unsqueeze(0) for factor in factors)
    return Kronecker(layer.weight, layer.kernel.shape, A, G, layer.bias)


def _eigen(
    layer: KroneckerLayer, bases: tuple[Tensor, Tensor], moments: Tensor
) -> EigenKronecker:
    A, G = (basis.detach().unsqueeze(0) for basis in bases)
    S = moments.detach().reshape(1, G.shape[1], A.shape[1])
    return EigenKronecker(layer.weight, layer.kernel.shape, A, G, S, layer.bias)
