"""Second moments of what layers are fed, which FedPM and RegMean++ ask clients for."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flwr_fisher.curvature import Kronecker


def layer_inputs(
    model: nn.Module, batches: Iterable[Any], layers: Iterable[str] | None = None
) -> dict[str, Kronecker]:
    r"""Return :math:`A = \frac1n \sum_x \sum_t a_t(x) a_t(x)^\top` of each layer.

    It is K-FAC's factor of the inputs, by one forward pass in eval mode. The layers are
    those of type ``Linear`` and ``Conv2d`` that are trained and called once a pass.

    Parameters
    ----------
    model : nn.Module
        Left as it was.
    batches : Iterable
        Batches ``(inputs, labels)``, or only ``inputs``.
    layers : Iterable[str], optional
        Their weights' names; by default all.

    Returns
    -------
    dict[str, Kronecker]
        By the weight's name, in the order of the calls: A, and the identity for G.
    """
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    sums: dict[str, tuple[nn.Module, Tensor]] = {}
    calls: list[str] = []
    count, passes, device = 0, 0, next(model.parameters()).device

    def note(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = _rows(module, inputs[0], with_bias=id(module.bias) in names)
        moment = rows.mT @ rows
        sums[name] = module, sums[name][1] + moment if name in sums else moment
        calls.append(name)

    wanted = None if layers is None else set(layers)
    handles = [
        module.register_forward_pre_hook(partial(note, names[id(module.weight)]))
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
        and id(module.weight) in names
        and (wanted is None or names[id(module.weight)] in wanted)
    ]
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                x = batch if isinstance(batch, Tensor) else batch[0]
                model(x.to(device))
                count, passes = count + len(x), passes + 1
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training
    once = {name: found for name, found in sums.items() if calls.count(name) == passes}
    return {
        name: _layer(name, names.get(id(module.bias)), module, moment / count)
        for name, (module, moment) in once.items()
    }


def _rows(module: nn.Module, x: Tensor, *, with_bias: bool) -> Tensor:
    """Return a layer's inputs as ``[groups, rows, n]``, with a 1 last for a bias."""
    if isinstance(module, nn.Conv2d):
        shape = module.kernel_size, module.dilation, module.padding, module.stride
        patches = F.unfold(x, *shape)  # [batch, channels * kernel, positions]
        parts = patches.unflatten(1, (module.groups, -1))
        rows = parts.permute(1, 0, 3, 2).flatten(1, 2)
    else:
        rows = x.flatten(0, -2).unsqueeze(0)
    return F.pad(rows, (0, 1), value=1.0) if with_bias else rows


def _layer(name: str, bias: str | None, module: nn.Module, A: Tensor) -> Kronecker:
    rows = len(module.weight) // len(A)
    G = torch.eye(rows).to(A).expand(len(A), rows, rows)
    return Kronecker(name, module.weight.shape, A, G, bias)
