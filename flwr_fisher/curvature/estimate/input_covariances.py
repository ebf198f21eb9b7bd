"""Second moments of the inputs of a model's layers: K-FAC's `A`."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flwr_fisher.curvature.batch import Inputs
from flwr_fisher.curvature.batches import batches_of
from flwr_fisher.curvature.estimate.accumulators import SecondMoment, side_by_side
from flwr_fisher.curvature.estimate.forms import explained_layers
from flwr_fisher.curvature.estimate.layers import KroneckerLayer, TransposedLinear
from flwr_fisher.curvature.estimate.taps import (
    UnlikeCallsError,
    layer_by_layer,
    tapped_once,
)
from flwr_fisher.curvature.model_checks import check_examples_are_independent
from flwr_fisher.curvature.models import device_of, evaluating
from flwr_fisher.curvature.operators.kronecker import Kronecker
from flwr_fisher.curvature.operators.layer import from_matrices, to_matrices
from flwr_fisher.errors import ConfigurationError, DataError, check_range
from flwr_fisher.params import Params

_BYTES = 1 << 26  # the default limit for one layer's unfolded inputs


@dataclass(frozen=True)
class InputCovariance:
    r"""The second moment of one layer's inputs, :math:`A = E[a a^\top]`, not centred.

    Parameters
    ----------
    weight : str
        The weight's name.
    bias : str | None
        The bias's name, if the layer has one and it is trained. Then every input ends
        with a 1.
    A : Tensor
        ``[groups, n, n]``, with ``n = in / groups * kernel (+ 1 with a bias)``. For a
        convolution the inputs are its patches, summed over positions.
    """

    weight: str
    bias: str | None
    A: Tensor

    def as_matrices(self, params: Params) -> Tensor:
        """Return the layer as ``[groups, out / groups, n]``, the bias last."""
        bias = None if self.bias is None else params[self.bias]
        return to_matrices(params[self.weight], bias, len(self.A))

    def as_params(self, matrices: Tensor, like: Params) -> dict[str, Tensor]:
        """Cut what :meth:`as_matrices` returns back, in the shapes of `like`."""
        return from_matrices(matrices, self.weight, like[self.weight].shape, self.bias)

    def as_kfac(self, like: Params) -> Kronecker:
        """Return the layer's K-FAC with the identity for G, as RegMean reads it."""
        rows = self.as_matrices(like).shape[1]
        G = torch.eye(rows).to(self.A).expand(len(self.A), rows, rows)
        shape = like[self.weight].shape
        return Kronecker(self.weight, shape, self.A, G, self.bias)


def input_covariances(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    layers: Collection[str] | None = None,
    device: torch.device | str | None = None,
    max_batch_bytes: int = _BYTES,
) -> dict[str, InputCovariance]:
    r"""Compute the second moments of the inputs of a model's layers.

    .. math:: A = \frac1n \sum_x \sum_t a_t(x) a_t(x)^\top

    This is the factor `A` of :func:`~flwr_fisher.curvature.fisher`'s ``kfac`` (Martens
    & Grosse 2015; for convolutions Grosse & Martens 2016), and all that FOOF (Benzing
    2022) needs. It takes one forward pass over the data. Only a few examples take a
    backward pass, which shows for which layers the inputs are enough.

    Parameters
    ----------
    model : nn.Module
        Used in eval mode, and left as it was.
    loader : Iterable
        Batches ``(inputs, labels)``, or only ``inputs``; labels are not used.
    layers : Collection[str] | None
        The layers to compute, by their weights' names; by default all that are trained.
    device : torch.device | str | None
        The model's device; by default that of its first trainable parameter.
    max_batch_bytes : int, default 64 MiB
        A limit for one layer's unfolded inputs; a larger batch is computed in parts.

    Returns
    -------
    dict[str, InputCovariance]
        The second moments by the weight's name, in float32, or float64 for a float64
        layer. As in ``kfac``, layers are left out whose gradients do not follow from
        the inputs of one call: for example, if a weight is used twice, or time is
        folded into the batch.

    Raises
    ------
    ConfigurationError
        If the model has no trainable parameter or is on another device,
        `max_batch_bytes` is below 1, or a layer of `layers` is not among those that
        would be returned.
    DataError
        If the loader yields no examples, or something else than batches.
    StructureError
        If examples are not independent of each other.

    Examples
    --------
    >>> model = torch.nn.Linear(2, 3)
    >>> found = input_covariances(model, [torch.tensor([[2.0, 0.0], [0.0, 0.0]])])
    >>> found["weight"].A
    tensor([[[2., 0., 1.],
             [0., 0., 0.],
             [1., 0., 1.]]])
    """
    check_range("max_batch_bytes", max_batch_bytes, 1)
    device = device_of(model, device)
    sums: _Sums | None = None
    with evaluating(model), layer_by_layer(model):
        for batch in batches_of(loader, model, device):
            sums = sums or _Sums(model, batch.inputs, layers, max_batch_bytes)
            with torch.no_grad():
                for part in batch.inputs.split(sums.chunk):
                    sums.add(part)
    if sums is None:
        raise DataError("the loader has no examples, so layers have no inputs")
    return sums.means()


class _Sums:
    """The sums over examples; a trial on the first examples chooses the layers."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        layers: Collection[str] | None,
        max_batch_bytes: int,
    ) -> None:
        check_examples_are_independent(model, "layers' inputs depend on the batch")
        self.model, self.count = model, 0
        # Not transposed layers: `matrices` does not support them.
        explained = explained_layers(model, inputs, TransposedLinear)
        found, taps, self.spread = explained
        self.layers = _chosen(found, layers)
        columns = {
            n: each.input_columns(taps[n].inputs[:1]) for n, each in self.layers.items()
        }
        self.totals = {
            name: SecondMoment(each.shape[1], each.shape[2], each)
            for name, each in columns.items()
        }
        largest = max((each.nbytes for each in columns.values()), default=1)
        self.chunk = max(1, max_batch_bytes // largest)

    def add(self, inputs: Inputs) -> None:
        """Take some examples."""
        try:
            _, taps = tapped_once(self.model, inputs, self.layers, spread=self.spread)
        except UnlikeCallsError as error:
            for name in error.layers:
                del self.layers[name], self.totals[name]
            return self.add(inputs)
        for name, tap in taps.items():
            columns = self.layers[name].input_columns(tap.inputs)
            self.totals[name].add(side_by_side(columns))
        self.count += len(inputs)

    def means(self) -> dict[str, InputCovariance]:
        """Return the means over examples; call it once."""
        return {
            layer.weight: InputCovariance(
                layer.weight, layer.bias, self.totals[name].mean(self.count)
            )
            for name, layer in self.layers.items()
        }


def _chosen(
    found: dict[str, KroneckerLayer], layers: Collection[str] | None
) -> dict[str, KroneckerLayer]:
    """Return the layers with these weights, or all."""
    if layers is None:
        return found
    weights = [layer.weight for layer in found.values()]
    if unknown := sorted(set(layers) - set(weights)):
        raise ConfigurationError(
            f"layers has {unknown}, but the trained layers that their inputs explain "
            f"are {weights}"
        )
    return {name: layer for name, layer in found.items() if layer.weight in layers}
