"""The additive payload: tensors of which the server needs only the clients' mean.

Each tensor belongs to a part, and is sent under ``<part>/<parameter>``:

``params``
    the client's model, under its own keys, as in any Flower client's reply;
``fisher``, ``fisher-params``
    a diagonal Fisher, and its product with the parameters;
``product``
    a curvature's product with a vector;
``gradient``, ``hvp``, ``direction``, ``control``, …
    vectors over the trained parameters;
``norms``
    shifts of batch norms' statistics, under the statistics' names
    (:mod:`flwr_fisher.merge.batch_norms`);
``curvature``
    K-FAC's partial traces under a Fisher's keys (:class:`LayerTraces`), which can be
    added up (:func:`~flwr_fisher.merge.partial_traces`); or its factors, of one common
    model (:class:`GradientUpload`, which has a ``loss`` beside its gradient, too).

The mean is taken by the server, or under masks (``flwr_fisher.secure``). Its weights
are in the replies' metrics.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.curvature import BlockDiagonal, Curvature, Kronecker
from flwr_fisher.errors import WireError
from flwr_fisher.params import Params, sum_dtype
from flwr_fisher.wire.arrays import (
    Layout,
    check_same_keys,
    read_arrays,
    tensors_to_arrays,
)
from flwr_fisher.wire.layout import (
    PREFIX,
    curvature_layouts,
    curvature_to_tensors,
    tensors_to_curvature,
    trace_name,
)
from flwr_fisher.wire.schema import Payload, displacements, drawn_back, norm64

PARAMS, FISHER, POINT = "params", "fisher", "fisher-params"
PRODUCT, NORMS = "product", "norms"
GRADIENT, LOSS = "gradient", "loss"
_CURVATURE = PREFIX.removesuffix("/")
SUMS = (PARAMS, FISHER, POINT)  # what FedFisher needs to merge diagonals
_OTHERS = {*SUMS, PRODUCT, _CURVATURE}  # all other parts are vectors


PRODUCT_STEP = f"step of the {PRODUCT}"  # to which it would lead by itself


@dataclass(frozen=True)
class Additive(Payload):
    """A client's tensors, or their mean over clients.

    Parameters
    ----------
    parts : Mapping[str, Mapping[str, Tensor]]
        Tensors, by the part's name and the parameter's name. A part may have any name.
        Its tensors have the parameters' shapes and dtypes; Fishers and products are in
        float32 or better.

    Examples
    --------
    >>> upload = Additive({"product": {"w": torch.ones(2)}})
    >>> list(upload.tensors), upload.part("product")
    (['product/w'], {'w': tensor([1., 1.])})
    """

    disagreement = ("arrays", "covers other parameters than most clients' does")

    parts: Mapping[str, Params]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by their keys in the record."""
        return {
            _key(part, name): value
            for part, tensors in self.parts.items()
            for name, value in tensors.items()
        }

    def part(self, name: str) -> Params:
        """Return a part's tensors by parameter; empty if there are none."""
        return self.parts.get(name, {})

    def layout(self) -> tuple[str, ...]:
        """Return keys and shapes, which must be equal for all clients."""
        return tuple(f"{k} {tuple(v.shape)}" for k, v in self.tensors.items())

    def to_arrays(self) -> ArrayRecord:
        """Return the one record that travels; it is lossless."""
        return tensors_to_arrays(self.tensors)

    def step_norms(self, like: Params) -> dict[str, float]:
        """Return the distance of the model from the one sent out, and norms."""
        moved = displacements(self.part(PARAMS), like)
        vectors = [name for name in self.parts if name not in _OTHERS]
        return {name: norm64(self.part(name).values()) for name in vectors} | moved

    def curvature_norms(self) -> dict[str, float]:
        """Return each layer's Fisher trace, and the norm of all products."""
        norms = {
            f"{FISHER}/{name}": float(value.double().sum())
            for name, value in self.part(FISHER).items()
        }
        if product := self.part(PRODUCT):  # with Fishers, which have no usual size
            norms[PRODUCT] = norm64(product.values())
        return norms

    def scaled(self, factors: Mapping[str, float], like: Params) -> "Additive":
        """Return it with a smaller step, shorter vectors, and scaled Fishers.

        Of two limits of a product, the lower one counts. If both did, a longer product
        would count for less.
        """
        parts: dict[str, Params] = {}
        of_product = (factors.get(name, 1.0) for name in (PRODUCT, PRODUCT_STEP))
        factors = {**factors, PRODUCT: min(of_product)}
        for part, tensors in self.parts.items():
            if part == PARAMS:
                parts[part] = dict(drawn_back(tensors, like, factors))
                continue
            of_each = f"{FISHER}/" if part in (FISHER, POINT) else None
            parts[part] = {
                k: v * factors.get(part if of_each is None else of_each + k, 1.0)
                for k, v in tensors.items()
            }
        if POINT in parts:
            parts[POINT] = products(parts[FISHER], parts[PARAMS])
        return Additive(parts)

    @classmethod
    def reader(cls, *parts: str, of_one: bool = True) -> "partial[Additive]":
        """Return a function that reads these parts from a record.

        If ``fisher-params`` is among the parts, a client must send it. In the record of
        one client (`of_one`), the reader replaces it by the product of the client's
        Fisher and parameters, so that they fit together. In the sum over several
        clients it cannot be computed: it is read, and the server cannot check it.
        """
        return partial(cls.from_arrays, parts=parts, of_one=of_one)

    @classmethod
    def from_arrays(
        cls,
        record: ArrayRecord,
        like: Params,
        *,
        parts: Sequence[str],
        of_one: bool = True,
    ) -> "Additive":
        """Read and check a record, none of which is trusted.

        Parameters
        ----------
        record : ArrayRecord
            The received record.
        like : Mapping[str, Tensor]
            The parameters that the server sent. Names and shapes must be the same.
        parts : Sequence[str]
            The parts that the record must have. All but ``params`` cover the same
            parameters.
        of_one : bool, default True
            Whether the record is one client's; see :meth:`reader`.

        Raises
        ------
        WireError
            It names the key that is missing, unexpected or unreadable, has another
            shape or dtype, is not finite, or has an impossible sign.
        """
        tensors = read_arrays(record, _layouts(parts, like))
        read = _split(tensors, parts, like)
        for name, value in read.get(FISHER, {}).items():
            if (value < 0).any():
                raise WireError("must not be negative", field=f"{FISHER}/{name}")
        if of_one and POINT in read:
            read[POINT] = products(read[FISHER], read[PARAMS])
        return cls(read)


def products(fisher: Params, vector: Params) -> dict[str, Tensor]:
    """Return a diagonal Fisher times a vector, in the Fisher's dtypes."""
    return {k: (F.double() * vector[k].double()).to(F) for k, F in fisher.items()}


def _key(part: str, name: str) -> str:
    return name if part == PARAMS else f"{part}/{name}"


def _layouts(parts: Sequence[str], like: Params) -> dict[str, Layout]:
    """Return dtypes and shapes of all tensors that these parts can have, by key."""
    layouts: dict[str, Layout] = {}
    for part in parts:
        for name, value in like.items():
            wide = part in (FISHER, POINT, PRODUCT)  # or they would underflow
            dtype = sum_dtype(value.dtype) if wide else value.dtype
            if part == PARAMS or dtype.is_floating_point:
                layouts[_key(part, name)] = dtype, value.shape
    return layouts


def _split(
    tensors: Params, parts: Sequence[str], like: Params
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each part, in the model's order.

    Raises
    ------
    WireError
        For a missing tensor. Parts over trained parameters cover the same ones, and
        ``params`` all of the model.
    """
    split: dict[str, dict[str, Tensor]] = {
        part: {n: tensors[_key(part, n)] for n in like if _key(part, n) in tensors}
        for part in parts
    }
    over = [part for part in parts if part != PARAMS]
    trained = {name for part in over for name in split[part]}
    if over and not trained:
        raise WireError(f"no {over[0]} arrived", field=f"{over[0]}/")
    for part, names in split.items():
        expected = like.keys() if part == PARAMS else trained
        check_same_keys(names, expected, _key(part, ""))
    return split


# Partial traces


@dataclass(frozen=True)
class LayerTraces(Additive):
    """A client's partial traces, and a product of its curvature with a vector.

    Parameters
    ----------
    parts : Mapping[str, Mapping[str, Tensor]]
        The parts of both, by name; :meth:`of` makes them.
    traces : Curvature
        The partial traces as a curvature, from the part ``curvature``.
    """

    traces: Curvature

    @classmethod
    def of(cls, product: Params, traces: Curvature) -> "LayerTraces":
        """Return the upload of a product and traces over the same parameters."""
        return cls({PRODUCT: product, _CURVATURE: _named(traces)}, traces)

    def curvature_norms(self) -> dict[str, float]:
        """Return each layer's trace, and the product's norm."""
        norms = super().curvature_norms()
        for block in self.traces.blocks():
            # Of a layer, both factors have the same trace.
            power = 0.5 if isinstance(block, Kronecker) else 1.0
            norms[trace_name(block)] = block.trace() ** power
        return norms

    def scaled(self, factors: Mapping[str, float], like: Params) -> "LayerTraces":
        """Return it with scaled layers, and a shorter product."""
        product = Additive({PRODUCT: self.part(PRODUCT)}).scaled(factors, like)
        blocks = self.traces.blocks()
        lighter = [_lighter(b, factors.get(trace_name(b), 1.0)) for b in blocks]
        return self.of(product.part(PRODUCT), BlockDiagonal(lighter))

    @classmethod
    def read_traces(cls, record: ArrayRecord, like: Params) -> "LayerTraces":
        """Read and check a record, none of which is trusted.

        Raises
        ------
        WireError
            It names the key that is missing, unexpected or unreadable, has another
            shape or dtype, is not finite, or is negative although it must not be.
        """
        layouts = _layouts([PRODUCT], like) | curvature_layouts(record, like)
        tensors = read_arrays(record, layouts)
        product = _split(tensors, [PRODUCT], like)[PRODUCT]
        return cls.of(product, _curvature_over(product, PRODUCT, tensors, like))


def _named(curvature: Curvature) -> dict[str, Tensor]:
    """Return a curvature's tensors by their names in the part ``curvature``."""
    factors = curvature_to_tensors(curvature)
    return {key.removeprefix(PREFIX): value for key, value in factors.items()}


def _curvature_over(
    vector: Params, part: str, tensors: Params, like: Params
) -> Curvature:
    """Return the curvature among the tensors; check that it covers a part's vector."""
    factors = {k: v for k, v in tensors.items() if k.startswith(PREFIX)}
    curvature = tensors_to_curvature(factors, like)
    check_same_keys(vector.keys(), curvature.shapes.keys(), f"{part}/")
    return curvature


def _lighter(block: Curvature, factor: float, of_g: float | None = None) -> Curvature:
    """Return a layer's factors, or a diagonal, times a factor."""
    if not isinstance(block, Kronecker):
        return block.scaled(factor)
    factors = block.A * factor, block.G * (factor if of_g is None else of_g)
    return block.with_factors(*factors)


# Gradients with losses, and K-FAC's factors


@dataclass(frozen=True)
class GradientUpload(Additive):
    """A client's mean loss and its gradient, and perhaps its K-FAC at that model.

    K-FAC's factors are added up one by one: at one common model, the clients' mean of A
    and that of G are the pooled data's.

    Parameters
    ----------
    parts : Mapping[str, Mapping[str, Tensor]]
        The part ``gradient``, and ``curvature`` if there is one; :meth:`of` makes them.
    loss : Tensor
        The mean loss, float64.
    kfac : Curvature, optional
        The K-FAC.
    """

    loss: Tensor
    kfac: Curvature | None = None

    @classmethod
    def of(
        cls, gradient: Params, loss: Tensor, kfac: Curvature | None = None
    ) -> "GradientUpload":
        """Return the upload of a gradient, a loss and a K-FAC."""
        parts = {GRADIENT: gradient}
        if kfac is not None:
            parts[_CURVATURE] = _named(kfac)
        return cls(parts, loss, kfac)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by their keys in the record."""
        return {**super().tensors, LOSS: self.loss}

    def curvature_norms(self) -> dict[str, float]:
        """Return the loss, and the trace of each factor."""
        norms = {LOSS: abs(float(self.loss))}
        for block in () if self.kfac is None else self.kfac.blocks():
            name = trace_name(block)
            if isinstance(block, Kronecker):
                norms[f"{name} A"] = float(block.A_factor.trace().double().sum())
                norms[f"{name} G"] = float(block.G_factor.trace().double().sum())
            else:
                norms[name] = block.trace()
        return norms

    def scaled(self, factors: Mapping[str, float], like: Params) -> "GradientUpload":
        """Return it with a shorter gradient, a lower loss and smaller factors."""
        gradient = Additive({GRADIENT: self.part(GRADIENT)}).scaled(factors, like)
        loss, kfac = self.loss * factors.get(LOSS, 1.0), self.kfac
        if kfac is not None:
            blocks = []
            for block in kfac.blocks():
                name = trace_name(block)
                of_a = factors.get(f"{name} A", factors.get(name, 1.0))
                blocks.append(_lighter(block, of_a, factors.get(f"{name} G", 1.0)))
            kfac = BlockDiagonal(blocks)
        return self.of(gradient.part(GRADIENT), loss, kfac)

    @classmethod
    def read_step(
        cls, record: ArrayRecord, like: Params, *, with_kfac: bool
    ) -> "GradientUpload":
        """Read and check a record, none of which is trusted.

        Raises
        ------
        WireError
            It names the key that is missing, unexpected or unreadable, has another
            shape or dtype, is not finite, or is negative although it must not be.
        """
        layouts = _layouts([GRADIENT], like) | {LOSS: (torch.float64, ())}
        if with_kfac:
            layouts |= curvature_layouts(record, like)
        tensors = read_arrays(record, layouts)
        check_same_keys(tensors.keys() & {LOSS}, {LOSS})
        gradient = _split(tensors, [GRADIENT], like)[GRADIENT]
        kfac = _curvature_over(gradient, GRADIENT, tensors, like) if with_kfac else None
        return cls.of(gradient, tensors[LOSS], kfac)


# Sums


def exact_mean(uploads: Sequence[tuple[Additive, float]]) -> Additive:
    """Return the weighted mean of uploads of one layout, in float64.

    The rounding error of each addition is stored beside the sum (Knuth's two-sum). So
    the result is the same, bit for bit, in whatever order the uploads are.

    Examples
    --------
    >>> ones = torch.ones(1)
    >>> uploads = [Additive({"product": {"w": x * ones}}) for x in (1, 4)]
    >>> exact_mean(list(zip(uploads, (1.0, 2.0), strict=True))).part("product")
    {'w': tensor([3.], dtype=torch.float64)}
    """
    (first, _), total_weight = uploads[0], math.fsum(weight for _, weight in uploads)
    means: dict[str, dict[str, Tensor]] = {}
    for part, tensors in first.parts.items():
        means[part] = {}
        for name, value in tensors.items():
            total = torch.zeros(value.shape, dtype=torch.float64)
            lost = torch.zeros_like(total)
            for upload, weight in uploads:
                term = upload.parts[part][name].detach().cpu().double() * weight
                new = total + term
                virtual = new - total
                lost = lost + ((total - (new - virtual)) + (term - virtual))
                total = new
            means[part][name] = (total + lost) / total_weight
    return Additive(means)
