"""What clients upload where the server is to know nothing but sums over them.

``sums/num-examples``
    the client's number of examples n, float64;
``sums/params/<name>``
    n times each parameter and buffer; float32 (float64 for float64), or int64;
``sums/fisher/<parameter>``, ``sums/fisher-params/<parameter>``
    n times the Fisher's diagonal, and n times its product with the parameter.

These are three times FedAvg's bytes. Each array may be summed over clients by whatever
protocol hides the summands; ``sums/format`` is the same for all. What still travels in
the clear is the ``MetricRecord``, whose ``num-examples`` Flower's reply check requires.
"""

from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.errors import WireError
from flwr_fisher.merge import DiagonalSums, sum_dtype
from flwr_fisher.params import Params
from flwr_fisher.wire.arrays import arrays_to_tensors, tensors_to_arrays
from flwr_fisher.wire.codec import FORMAT_VERSION
from flwr_fisher.wire.container import parse_text, text_of

__all__ = ["AGGREGATES", "SumsUpload"]

AGGREGATES = ("parts", "sums")

_PREFIX = "sums/"
_EXAMPLES, _FORMAT = f"{_PREFIX}num-examples", f"{_PREFIX}format"
_PARAMS, _FISHER = f"{_PREFIX}params/", f"{_PREFIX}fisher/"
_FISHER_PARAMS = f"{_PREFIX}fisher-params/"
_DESCRIPTION = {"version": FORMAT_VERSION, "form": "diagonal-sums"}


@dataclass(frozen=True)
class SumsUpload:
    """A client's summands.

    Parameters
    ----------
    sums : DiagonalSums
        What it adds to the sums over all clients.
    """

    sums: DiagonalSums

    def layout(self) -> tuple[str, ...]:
        """Return the parameters with a Fisher, which clients must have in common."""
        return tuple(f"{_FISHER}{name}" for name in self.sums.fisher)

    def to_arrays(self) -> ArrayRecord:
        """Return the one record that travels; it is lossless."""
        sums = self.sums
        n = torch.tensor(sums.num_examples, dtype=torch.float64)
        tensors = {_FORMAT: text_of(_DESCRIPTION), _EXAMPLES: n}
        tensors |= {f"{_PARAMS}{k}": v for k, v in sums.params.items()}
        tensors |= {f"{_FISHER}{k}": v for k, v in sums.fisher.items()}
        tensors |= {f"{_FISHER_PARAMS}{k}": v for k, v in sums.fisher_params.items()}
        return tensors_to_arrays(tensors)

    @classmethod
    def from_arrays(cls, record: ArrayRecord, like: Params) -> "SumsUpload":
        """Read and check a record; every byte of it may be anybody's.

        Parameters
        ----------
        record : ArrayRecord
            What arrived.
        like : Mapping[str, Tensor]
            The parameters that were sent out: keys and shapes must be theirs.

        Raises
        ------
        WireError
            Naming the key that is missing, unexpected, unreadable, of another shape or
            dtype, not finite, or of a sign that cannot be; or if the format is another.
        """
        tensors = arrays_to_tensors(record)
        _check_format(parse_text(tensors.pop(_FORMAT, None), _FORMAT))
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
        for name, entry in fisher.items():
            _check_fisher(name, entry, products[name])
        return cls(DiagonalSums(examples, params, fisher, products))

    def check_weight(self, weight: float) -> None:
        """Raise :class:`WireError` unless the metrics tell the same weight."""
        if (n := self.sums.num_examples) != weight:
            reason = f"{n:g} examples, but the metrics say {weight:g}"
            raise WireError(reason, field=_EXAMPLES)


def _check_format(found: object) -> None:
    if not isinstance(found, dict) or "version" not in found:
        raise WireError("does not say which format it has", field=_FORMAT)
    if (version := found["version"]) != FORMAT_VERSION:
        reason = f"format version {version!r}, and this server reads"
        raise WireError(f"{reason} {FORMAT_VERSION}"[:200], field=_FORMAT)
    if found != _DESCRIPTION:
        reason = f"expected {_DESCRIPTION}, got {found!r}"
        raise WireError(reason[:200], field=_FORMAT)


def _read_examples(found: Tensor | None) -> float:
    if found is None:
        raise WireError("missing", field=_EXAMPLES)
    if found.dtype != torch.float64 or found.shape != ():
        reason = f"{found.dtype} of shape {tuple(found.shape)}, expected one float64"
        raise WireError(reason, field=_EXAMPLES)
    if not found > 0:
        raise WireError(f"must be positive, got {float(found):g}", field=_EXAMPLES)
    return float(found)


def _take(prefix: str, tensors: dict[str, Tensor], like: Params) -> dict[str, Tensor]:
    """Take what has the prefix out of `tensors`, in the model's order, and check it."""
    taken = {}
    for name, param in like.items():
        key = f"{prefix}{name}"
        if (tensor := tensors.pop(key, None)) is None:
            continue
        if prefix != _PARAMS and not param.is_floating_point():
            raise WireError("only floats have a Fisher", field=key)
        if tensor.shape != param.shape:
            reason = f"shape {tuple(tensor.shape)}, expected {tuple(param.shape)}"
            raise WireError(reason, field=key)
        if tensor.dtype != (expected := sum_dtype(param.dtype)):
            reason = f"dtype {tensor.dtype}, expected {expected}"
            raise WireError(reason, field=key)
        taken[name] = tensor
    return taken


def _check_complete(prefix: str, found: Params, expected: Params) -> None:
    for name in expected:
        if name not in found:
            raise WireError("missing", field=f"{prefix}{name}")


def _check_fisher(name: str, entry: Tensor, product: Tensor) -> None:
    if (entry < 0).any():
        raise WireError("must not be negative", field=f"{_FISHER}{name}")
    if product[entry == 0].any():
        reason = "must be zero where the Fisher is"
        raise WireError(reason, field=f"{_FISHER_PARAMS}{name}")
