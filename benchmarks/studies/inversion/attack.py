"""Inverting a class from what a server sees: a model, and perhaps a curvature."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from harness.size import sized
from torch import Tensor, nn

from studies.inversion.gan import LATENT

STEPS, IMAGES = sized(1000, 3), 100
IDENTITY = 100.0  # the weight of the class's loss, as in Zhang et al.; the curvature's

Statistics = dict[str, dict[str, Tensor]]  # by kind (A, G, diagonal, mean) and layer


@dataclass(frozen=True)
class Known:
    """What a server has seen.

    Parameters
    ----------
    model : nn.Module
        A trained network.
    curvature : Mapping[str, Mapping[str, Tensor]]
        What of a Fisher, by kind and layer, or the digit's mean inputs of a layer;
        nothing if it has none.
    """

    model: nn.Module
    curvature: Mapping[str, Mapping[str, Tensor]]


def invert(known: Known, G: nn.Module, D: nn.Module, digit: int) -> Tensor:
    r"""Return images that a server takes for the digit's.

    Latent codes descend on :math:`-D(G(z)) - \lambda \log p(\text{digit}
    \mid G(z))`, and with a curvature on the squared difference between it and the
    images' own, relative to its square: each is taken over its trace, so that the
    number of examples behind it does not matter.
    """
    known.model.eval().requires_grad_(False)
    codes = torch.randn(IMAGES, LATENT, requires_grad=True)
    optimizer = torch.optim.Adam([codes], lr=0.02)
    labels = torch.full((IMAGES,), digit)
    kinds = list(known.curvature)
    for _ in range(STEPS):
        images = G(codes)
        optimizer.zero_grad()
        prior = -D(images).mean()
        if not kinds:
            loss = F.cross_entropy(known.model(images), labels)
        else:
            loss, own = statistics(known.model, images, labels, kinds)
            loss = loss + difference(own, known.curvature)
        (prior + IDENTITY * loss).backward()
        optimizer.step()
    return G(codes).detach()


def statistics(
    model: nn.Module, images: Tensor, labels: Tensor, kinds: list[str]
) -> tuple[Tensor, Statistics]:
    """Return the loss of images, and what a Fisher of them is made of.

    The gradients are those of the label, which the attacker takes to be known.
    """
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_hook(_keep(name, inputs, outputs))
        for name, layer in layers_of(model).items()
    ]
    logits = model(images)
    for hook in hooks:
        hook.remove()
    losses = F.cross_entropy(logits, labels, reduction="sum")
    gradients = torch.autograd.grad(losses, list(outputs.values()), create_graph=True)
    found: Statistics = {kind: {} for kind in kinds}
    for (name, layer), gradient in zip(
        layers_of(model).items(), gradients, strict=True
    ):
        a, g = _rows(layer, inputs[name]), _columns(gradient)
        if "A" in found:
            found["A"][name] = torch.einsum("bpi,bpj->ij", a, a)
        if "mean" in found:
            found["mean"][name] = a.mean((0, 1))
        if "G" in found:
            found["G"][name] = torch.einsum("bpi,bpj->ij", g, g)
        if "diagonal" in found:
            own = torch.einsum("bpo,bpi->boi", g, a)
            found["diagonal"][name] = own.square().sum(0)
    return losses / len(images), found


def difference(own: Statistics, given: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
    """Return the mean over layers of the squared difference, relative to the given."""
    parts = [
        (_normalised(own[kind][name]) - _normalised(value)).square().sum()
        / _normalised(value).square().sum()
        for kind, layers in given.items()
        for name, value in layers.items()
    ]
    return torch.stack(parts).mean()


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that have a Kronecker form, by name."""
    kinds = (nn.Linear, nn.Conv2d)
    return {n: layer for n, layer in model.named_modules() if isinstance(layer, kinds)}


def _keep(
    name: str, inputs: dict[str, Tensor], outputs: dict[str, Tensor]
) -> Callable[..., None]:
    def hook(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        inputs[name], outputs[name] = args[0], output

    return hook


def _rows(layer: nn.Module, inputs: Tensor) -> Tensor:
    """Return inputs as ``[b, positions, in]``."""
    if isinstance(layer, nn.Conv2d):
        columns = F.unfold(
            inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride
        )
        return columns.mT
    return inputs.unsqueeze(1)


def _columns(gradient: Tensor) -> Tensor:
    return gradient.flatten(2).mT if gradient.dim() == 4 else gradient.unsqueeze(1)


def _normalised(value: Tensor) -> Tensor:
    square = value.dim() == 2 and value.shape[0] == value.shape[1]
    total = value.trace() if square else value.sum()
    return value / total.clamp_min(1e-30)
