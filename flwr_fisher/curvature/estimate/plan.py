"""The plan of a Fisher: the form of each parameter's curvature, from a first batch."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from flwr_fisher.curvature.batch import read
from flwr_fisher.curvature.estimate.layers import Positions
from flwr_fisher.curvature.estimate.memory import examples_at_once
from flwr_fisher.curvature.estimate.model_sums import make_sums
from flwr_fisher.curvature.estimate.options import STRUCTURES
from flwr_fisher.curvature.models import device_of, evaluating
from flwr_fisher.errors import check_known, check_range


@dataclass(frozen=True)
class LayerPlan:
    """The form of the curvature of one layer's or some parameters.

    Parameters
    ----------
    parameters : tuple[str, ...]
        The parameters' names.
    form : str
        The form, in words.
    nbytes : int
        The bytes of the curvature in memory, and in an upload without a codec.
    slow : bool
        Whether it needs per-example gradients, which take another pass for each of an
        example's backward passes.
    """

    parameters: tuple[str, ...]
    form: str
    nbytes: int
    slow: bool = False


@dataclass(frozen=True)
class FisherPlan:
    """The plan that :func:`fisher_plan` returns; printed, it is a table.

    Parameters
    ----------
    layers : list[LayerPlan]
        A row for each form in each layer.
    examples_at_once : int
        How many examples of a batch are run together, as memory allows.
    """

    layers: list[LayerPlan]
    examples_at_once: int

    def __str__(self) -> str:
        rows = [
            (", ".join(each.parameters), each.form, f"{each.nbytes / 1e3:,.1f} kB")
            for each in self.layers
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        lines = [f"{a:{widths[0]}}  {b:{widths[1]}}  {c:>10}" for a, b, c in rows]
        total = sum(each.nbytes for each in self.layers) / 1e3
        last = f"{total:,.1f} kB in all; {self.examples_at_once} examples at once"
        return "\n".join([*lines, last])


def fisher_plan(
    model: nn.Module,
    inputs: Any,
    *,
    structure: str = "kfac",
    max_batch_bytes: int | None = None,
) -> FisherPlan:
    """Return what :func:`~flwr_fisher.curvature.fisher` will compute for each layer.

    A trial on a few examples shows which parameters have which form. So you can call it
    before anything is trained.

    Parameters
    ----------
    model : nn.Module
        Used in eval mode, and left as it was.
    inputs : Any
        A batch of the form that the loader yields, on the model's device.
    structure : str, default "kfac"
        As for ``fisher``.
    max_batch_bytes : int, optional
        As for ``fisher``.

    Raises
    ------
    UnknownNameError
        If the structure is not known.
    ConfigurationError
        If the model has no trainable parameter, or a number is out of range.
    StructureError
        If a dense matrix would be too large, or examples are not independent.

    Examples
    --------
    >>> import torch
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    >>> print(fisher_plan(model, torch.randn(8, 3)))
    0.weight, 0.bias  Kronecker: A 4x4, G 4x4      0.1 kB
    2.weight, 2.bias  Kronecker: A 5x5, G 2x2      0.1 kB
    1.weight, 1.bias  diagonal                     0.0 kB
    0.3 kB in all; 8 examples at once
    """
    check_known("structure", structure, STRUCTURES)
    if max_batch_bytes is not None:
        check_range("max_batch_bytes", max_batch_bytes, 1)
    device = device_of(model, None)
    inputs = read(inputs, model).to(device).inputs
    # E-KFAC has K-FAC's factors as its basis.
    basis = structure == "ekfac"
    kind = "kfac" if basis else structure
    with evaluating(model):
        forms, sums = make_sums(model, inputs, [kind])
        chunk = examples_at_once(
            model, forms, sums, Positions(None, 0), len(inputs), max_batch_bytes
        )
    layers = []
    for each in sums.accumulators.values():
        found, layer = each[kind], each[kind].layer
        names = tuple(layer.shapes())
        form, nbytes = found.form, found.nbytes
        if basis:  # and a moment for each entry of the weight and bias
            form += ", as a basis"
            nbytes += layer.matrices().numel() * layer.dtype.itemsize
        # Sums may be wider than the curvature.
        nbytes = nbytes * layer.kernel.element_size() // layer.dtype.itemsize
        layers.append(LayerPlan(names, form, nbytes))
    for direct in sums.direct.values():
        size = sum(parameter.nbytes for parameter in direct.layer.parameters())
        layers.append(LayerPlan(tuple(direct.layer.names), "diagonal", size))
    for name, jacobian in sums.jacobians.items():
        numel = sum(p.numel() for p in jacobian.params.values())
        entries = numel**2 if name == "dense" else numel
        size = entries * next(iter(jacobian.params.values())).element_size()
        form = "dense" if name == "dense" else "diagonal"
        form += ", by each example's gradient"
        layers.append(LayerPlan(tuple(jacobian.params), form, size, slow=True))
    return FisherPlan(layers, min(chunk, len(inputs)))
