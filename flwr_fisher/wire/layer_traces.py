"""The upload of K-FAC's partial traces and a product, which are summed over clients.

Partial traces have a Fisher's keys (``curvature/kfac/<weight>/A``, …), and can be added
up (:func:`~flwr_fisher.merge.partial_traces`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from flwr.app import ArrayRecord

from flwr_fisher.curvature import BlockDiagonal, Curvature, Kronecker
from flwr_fisher.params import Params, norm
from flwr_fisher.wire.additive import PRODUCT, Additive, take_parts
from flwr_fisher.wire.arrays import (
    arrays_to_tensors,
    check_same_keys,
    contribution_bytes,
)
from flwr_fisher.wire.layout import (
    PREFIX,
    curvature_to_tensors,
    tensors_to_curvature,
    trace_name,
)

_LED = f"step of the {PRODUCT}"
# From a client's traces and product, the step to which they lead by themselves.
OwnStep = Callable[[Curvature, Params], Params]


@dataclass(frozen=True)
class LayerTraces(Additive):
    """A client's partial traces, and a product of its curvature with a vector.

    Parameters
    ----------
    parts : Mapping[str, Mapping[str, Tensor]]
        The parts of both, by name; :meth:`of` makes them.
    traces : Curvature
        The partial traces as a curvature, from the part ``curvature``.
    own_step : Callable[[Curvature, Params], Params], optional
        The merge's step by this client's traces and product alone. Pass it if a policy
        limits how far the product may lead.
    """

    traces: Curvature
    own_step: OwnStep | None = None

    @classmethod
    def of(cls, product: Params, traces: Curvature) -> "LayerTraces":
        """Return the upload of a product and traces over the same parameters."""
        own = curvature_to_tensors(traces)
        named = {key.removeprefix(PREFIX): value for key, value in own.items()}
        return cls({PRODUCT: product, PREFIX.removesuffix("/"): named}, traces)

    def step_norms(self, like: Params) -> dict[str, float]:
        """Return the length of the step to which the product would lead by itself."""
        if self.own_step is None:
            return {}
        return {_LED: float(norm(self.own_step(self.traces, self.part(PRODUCT))))}

    def curvature_norms(self) -> dict[str, float]:
        """Return each layer's trace, and the product's norm."""
        own = super().curvature_norms()
        for block in self.traces.blocks():
            size = block.trace()  # of a layer: both of its factors have the same trace
            own[trace_name(block)] = size**0.5 if isinstance(block, Kronecker) else size
        return own

    def scaled(self, factors: Mapping[str, float], like: Params) -> "LayerTraces":
        """Return it with scaled layers, and a shorter product."""
        factor = min(factors.get(PRODUCT, 1.0), factors.get(_LED, 1.0))
        product = {name: value * factor for name, value in self.part(PRODUCT).items()}
        blocks = self.traces.blocks()
        lighter = [_lighter(b, factors.get(trace_name(b), 1.0)) for b in blocks]
        scaled = self.of(product, BlockDiagonal(lighter))
        return replace(scaled, own_step=self.own_step)

    @classmethod
    def read_traces(
        cls, record: ArrayRecord, like: Params, *, own_step: OwnStep | None = None
    ) -> "LayerTraces":
        """Read and check a record, none of which is trusted.

        Raises
        ------
        WireError
            It names the key that is missing, unexpected or unreadable, has another
            shape or dtype, is not finite, or is negative although it must not be.
        """
        limit, most = contribution_bytes(like), 4 * len(like)
        tensors = arrays_to_tensors(record, limit=limit, most=most)
        own = {k: tensors.pop(k) for k in list(tensors) if k.startswith(PREFIX)}
        product = take_parts(tensors, like, [PRODUCT])[PRODUCT]
        traces = tensors_to_curvature(own, like)
        check_same_keys(product.keys(), traces.shapes.keys(), f"{PRODUCT}/")
        return replace(cls.of(product, traces), own_step=own_step)


def _lighter(block: Curvature, factor: float) -> Curvature:
    """Return a layer's partial traces, or a diagonal, times a factor."""
    if not isinstance(block, Kronecker):
        return block.scaled(factor)
    factors = block.A * factor, block.G * factor
    return Kronecker(block.weight, block.weight_shape, *factors, block.bias)
