"""What clients upload where the server may learn only sums over all clients.

``sums/num-examples``
    the client's number of examples n, float64;
``sums/params/<name>``
    n times each parameter and buffer; float32 (float64 for float64), or int64;
``sums/fisher/<parameter>``, ``sums/fisher-params/<parameter>``
    n times the Fisher's diagonal, and n times its product with the parameter.

Together they are three times as large as FedAvg's upload. Any protocol that hides the
summands may sum each of these arrays over the clients; ``sums/format`` is the same for
all clients. The ``MetricRecord`` is not hidden: its ``num-examples``, which Flower
requires in every reply, is sent as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.errors import WireError
from flwr_fisher.merge import DiagonalSums
from flwr_fisher.merge.sums import sum_dtype
from flwr_fisher.params import Params
from flwr_fisher.wire.arrays import arrays_to_tensors, tensors_to_arrays
from flwr_fisher.wire.checks import check_shape_and_dtype
from flwr_fisher.wire.codec import FORMAT_VERSION, description_text, read_description
from flwr_fisher.wire.displacement import displacements, drawn_back
from flwr_fisher.wire.payload import Payload

AGGREGATES = ("parts", "sums")

_PREFIX = "sums/"
_EXAMPLES, _FORMAT = f"{_PREFIX}num-examples", f"{_PREFIX}format"
_PARAMS, _FISHER = f"{_PREFIX}params/", f"{_PREFIX}fisher/"
_FISHER_PARAMS = f"{_PREFIX}fisher-params/"
_ROUNDING, _TINY = 1e-5, 1e-37  # of float32's products, and its smallest number
_SLACK = 4096  # bytes that one array's headers may take
_DESCRIPTION = {"version": FORMAT_VERSION, "form": "diagonal-sums"}


@dataclass(frozen=True)
class SumsUpload(Payload):
    """A client's summands.

    Parameters
    ----------
    sums : DiagonalSums
        What it adds to the sums over all clients.
    """

    sums: DiagonalSums

    def layout(self) -> tuple[str, ...]:
        """Return the parameters that have a Fisher, which clients must share."""
        return tuple(f"{_FISHER}{name}" for name in self.sums.fisher)

    def step_norms(self, like: Params) -> dict[str, float]:
        """Return how far the parameters are from those that were sent out."""
        return displacements(self.sums.mean(), like)

    def curvature_norms(self) -> dict[str, float]:
        """Return the Fisher's trace, tensor by tensor."""
        n = self.sums.num_examples
        return {
            f"{_FISHER}{name}": float(entry.double().sum()) / n
            for name, entry in self.sums.fisher.items()
        }

    def scaled(self, factors: Mapping[str, float], like: Params) -> Self:
        """Return it with parameters drawn back, and Fishers scaled down."""
        sums = self.sums
        params = drawn_back(sums.mean(), like, factors)
        n = sums.num_examples
        fisher = {
            name: entry * factors.get(f"{_FISHER}{name}", 1.0)
            for name, entry in sums.fisher.items()
        }
        products = {name: entry * params[name] for name, entry in fisher.items()}
        summed = {
            name: (n * value.double()).to(value.dtype) for name, value in params.items()
        }
        return replace(self, sums=DiagonalSums(n, summed, fisher, products))

    def reweighted(self, factor: float) -> Self:
        """Return the summands of a client with `factor` times as many examples."""
        sums = self.sums
        params, fisher, products = (
            {k: (v.double() * factor).to(v.dtype) for k, v in part.items()}
            for part in (sums.params, sums.fisher, sums.fisher_params)
        )
        n = factor * sums.num_examples
        return replace(self, sums=DiagonalSums(n, params, fisher, products))

    def to_arrays(self) -> ArrayRecord:
        """Return the one record that travels; it is lossless."""
        sums = self.sums
        n = torch.tensor(sums.num_examples, dtype=torch.float64)
        tensors = {_FORMAT: description_text(_DESCRIPTION), _EXAMPLES: n}
        tensors |= {f"{_PARAMS}{k}": v for k, v in sums.params.items()}
        tensors |= {f"{_FISHER}{k}": v for k, v in sums.fisher.items()}
        tensors |= {f"{_FISHER_PARAMS}{k}": v for k, v in sums.fisher_params.items()}
        return tensors_to_arrays(tensors)

    @classmethod
    def total(cls, record: ArrayRecord, like: Params) -> "SumsUpload":
        """Read the sum over clients, of which no product is a single client's.

        Raises
        ------
        WireError
            As for :meth:`from_arrays`.
        """
        return cls.from_arrays(record, like, of_one=False)

    @classmethod
    def from_arrays(
        cls, record: ArrayRecord, like: Params, *, of_one: bool = True
    ) -> "SumsUpload":
        """Read and check a record, none of which is trusted.

        Parameters
        ----------
        record : ArrayRecord
            What arrived.
        like : Mapping[str, Tensor]
            The parameters that were sent out: keys and shapes must be theirs.
        of_one : bool, default True
            Whether it is one client's, whose products must be products.

        Raises
        ------
        WireError
            Naming the key that is missing, unexpected, unreadable, of another shape or
            dtype, not finite, or of a sign that cannot be; or if the format is another.
        """
        # Sums of parameters, of the Fisher and of their products, in up to 8 bytes.
        limit = sum(3 * (8 * v.numel() + _SLACK) for v in like.values()) + 2 * _SLACK
        tensors = arrays_to_tensors(record, limit=limit, most=3 * len(like) + 2)
        _check_format(tensors.pop(_FORMAT, None))
        examples = _read_examples(tensors.pop(_EXAMPLES, None))
        params, fisher, products = (
            _take(prefix, tensors, like)
            for prefix in (_PARAMS, _FISHER, _FISHER_PARAMS)
        )
        for key in tensors:
            raise WireError("unexpected key", field=key)
        _check_complete(_PARAMS, params, like)
        if not fisher:
            raise WireError("no Fisher arrived", field=_FISHER)
        _check_complete(_FISHER_PARAMS, products, fisher)
        _check_complete(_FISHER, fisher, products)
        for name, entry in fisher.items() if of_one else ():
            own = params[name] / examples
            _check_fisher(name, entry, products[name], own)
            # Of a Fisher that floats can hardly hold, no product is precise.
            tiny = entry < torch.finfo(entry.dtype).tiny / torch.finfo(entry.dtype).eps
            products[name] = torch.where(tiny, entry * own, products[name])
        return cls(DiagonalSums(examples, params, fisher, products))

    def check_weight(self, weight: float) -> None:
        """Raise :class:`WireError` unless the metrics say the same weight."""
        if (n := self.sums.num_examples) != weight:
            reason = f"{n:g} examples, but the metrics say {weight:g}"
            raise WireError(reason, field=_EXAMPLES)


def _check_format(text: Tensor | None) -> None:
    if (description := read_description(text, _FORMAT)) != _DESCRIPTION:
        reason = f"expected {_DESCRIPTION}, got {description!r}"
        raise WireError(reason[:200], field=_FORMAT)


def _read_examples(tensor: Tensor | None) -> float:
    if tensor is None:
        raise WireError("missing", field=_EXAMPLES)
    if tensor.dtype != torch.float64 or tensor.shape != ():
        reason = f"{tensor.dtype} of shape {tuple(tensor.shape)}, expected one float64"
        raise WireError(reason, field=_EXAMPLES)
    if not tensor > 0:
        raise WireError(f"must be positive, got {float(tensor):g}", field=_EXAMPLES)
    return float(tensor)


def _take(prefix: str, tensors: dict[str, Tensor], like: Params) -> dict[str, Tensor]:
    """Remove from `tensors` those with the prefix; return them in the model's order."""
    taken = {}
    for name, param in like.items():
        key = f"{prefix}{name}"
        if (tensor := tensors.pop(key, None)) is None:
            continue
        if prefix != _PARAMS and not param.is_floating_point():
            raise WireError("only floats have a Fisher", field=key)
        check_shape_and_dtype(key, tensor, param.shape, sum_dtype(param.dtype))
        taken[name] = tensor
    return taken


def _check_complete(prefix: str, received: Params, expected: Params) -> None:
    for name in expected:
        if name not in received:
            raise WireError("missing", field=f"{prefix}{name}")


def _check_fisher(name: str, entry: Tensor, product: Tensor, param: Tensor) -> None:
    if (entry < 0).any():
        raise WireError("must not be negative", field=f"{_FISHER}{name}")
    if product[entry == 0].any():
        reason = "must be zero where the Fisher is"
        raise WireError(reason, field=f"{_FISHER_PARAMS}{name}")
    # Else a client could pull a parameter to a value that it does not have.
    expected = entry.double() * param.double()
    if ((product - expected).abs() > _ROUNDING * expected.abs() + _TINY).any():
        reason = "is not the product of the Fisher and the parameters"
        raise WireError(reason, field=f"{_FISHER_PARAMS}{name}")
