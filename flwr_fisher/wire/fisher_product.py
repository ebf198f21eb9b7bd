"""What clients add so that a server can merge K-FAC Fishers that it does not see.

``product/<parameter>``
    the client's curvature times a vector: the way from the clients' mean to its model,
    or a direction of the server's conjugate gradients;
``curvature/kfac/<weight>/A`` and ``…/G``, ``curvature/diagonal/<parameter>``
    with the first of them, a layer's partial traces, or what is no layer's diagonal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.curvature import BlockDiagonal, Curvature, Kronecker
from flwr_fisher.errors import WireError
from flwr_fisher.params import Params
from flwr_fisher.wire.arrays import arrays_to_tensors, tensors_to_arrays
from flwr_fisher.wire.checks import check_layout, contribution_bytes
from flwr_fisher.wire.displacement import norm64
from flwr_fisher.wire.layout import (
    PREFIX,
    curvature_to_tensors,
    tensors_to_curvature,
    trace_name,
)
from flwr_fisher.wire.payload import Payload

PRODUCT = "product/"
_PRODUCT = PRODUCT.removesuffix("/")


@dataclass(frozen=True)
class FisherProduct(Payload):
    """A client's summand, in the mean over clients by their examples.

    Parameters
    ----------
    product : Mapping[str, Tensor]
        The curvature times a vector.
    traces : Curvature, optional
        See :func:`~flwr_fisher.merge.partial_traces`.
    """

    disagreement: ClassVar[tuple[str, str]] = (
        _PRODUCT,
        "covers other parameters than most clients' does",
    )

    product: Params
    traces: Curvature | None = None

    def layout(self) -> tuple[str, ...]:
        """Return the names, kinds and shapes of the parts, which clients must share."""
        return tuple(f"{k} {tuple(v.shape)}" for k, v in self.tensors().items())

    def to_arrays(self) -> ArrayRecord:
        """Return the one record that travels; it is lossless."""
        return tensors_to_arrays(self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """Return what is added up, by the keys under which it travels."""
        products = {f"{PRODUCT}{name}": value for name, value in self.product.items()}
        traces = {} if self.traces is None else curvature_to_tensors(self.traces)
        return products | traces

    def curvature_norms(self) -> dict[str, float]:
        """Return the products' norm, and each layer's trace."""
        own = {_PRODUCT: norm64(self.product.values())}
        for block in self._blocks():
            size = block.trace()  # of a layer: of two factors that have its trace each
            own[trace_name(block)] = size**0.5 if isinstance(block, Kronecker) else size
        return own

    def scaled(self, factors: Mapping[str, float], like: Params) -> "FisherProduct":
        """Return it with shorter products, and layers' traces scaled down."""
        shorter = factors.get(_PRODUCT, 1.0)
        product = {name: value * shorter for name, value in self.product.items()}
        if self.traces is None:
            return FisherProduct(product)
        blocks = [_lighter(b, factors.get(trace_name(b), 1.0)) for b in self._blocks()]
        return FisherProduct(product, BlockDiagonal(blocks))

    def _blocks(self) -> Sequence[Curvature]:
        return [] if self.traces is None else self.traces.blocks()

    @classmethod
    def with_traces(cls, record: ArrayRecord, like: Params) -> "FisherProduct":
        """Read and check a record that has traces, none of which is trusted.

        Raises
        ------
        WireError
            As :meth:`from_arrays`, or if a factor is not symmetric, or negative on its
            diagonal.
        """
        tensors = arrays_to_tensors(
            record, limit=contribution_bytes(like), most=4 * len(like)
        )
        parts = {k: v for k, v in tensors.items() if not k.startswith(PRODUCT)}
        for key in parts:
            if not key.startswith(PREFIX):
                raise WireError("unexpected key", field=key)
        traces = tensors_to_curvature(parts, like)
        product = _products(tensors, like, parts)
        for name in traces.shapes.keys() ^ product.keys():
            raise WireError("no product for each curvature", field=f"{PRODUCT}{name}")
        return cls(product, traces)

    @classmethod
    def from_arrays(cls, record: ArrayRecord, like: Params) -> "FisherProduct":
        """Read and check a record of products alone.

        Raises
        ------
        WireError
            Naming the key that is unexpected, unreadable, of another shape or dtype, or
            not finite.
        """
        tensors = arrays_to_tensors(
            record, limit=contribution_bytes(like), most=len(like)
        )
        return cls(_products(tensors, like, {}))


def _lighter(block: Curvature, factor: float) -> Curvature:
    """Return a layer's partial traces, or a diagonal, times a factor."""
    if not isinstance(block, Kronecker):
        return block.scaled(factor)
    factors = block.A * factor, block.G * factor
    return Kronecker(block.weight, block.weight_shape, *factors, block.bias)


def _products(
    tensors: Params, like: Params, others: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    received = {k: v for k, v in tensors.items() if k not in others}
    product = {}
    for name, param in like.items():
        key = f"{PRODUCT}{name}"
        if (value := received.pop(key, None)) is not None:
            check_layout(key, value, param.shape, param.dtype)
            product[name] = value
    for key in received:
        raise WireError("unexpected key", field=key)
    if not product:
        raise WireError("no product arrived", field=PRODUCT)
    return product
