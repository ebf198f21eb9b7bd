"""The uploads of TCT's second stage: moments, an eigenvalue, or local weights.

They are no :class:`~flwr_fisher.wire.Additive`, because their shapes are not the
model's. A digest in each names its features.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.errors import WireError
from flwr_fisher.params import Params
from flwr_fisher.wire.arrays import bytes_of, read_named, tensors_to_arrays, text_from
from flwr_fisher.wire.schema import (
    PARAMETERS,
    Payload,
    displacements,
    drawn_back,
    norm64,
)

KEYS = "tct/"  # the prefix of all keys but the network's
_DIGEST, _HEAD, COUNT = "digest", "head", "count"
LARGEST, _FEATURES, STEP = "largest-eigenvalue", "features", "step"
LONGEST = 1024  # bytes of a name
_MOST_CLASSES = 2**20


@dataclass(frozen=True)
class TangentUpload(Payload):
    """One client's tensors in TCT's second stage.

    Parameters
    ----------
    tensors : dict[str, Tensor]
        Tensors by name; they are sent under ``tct/<name>``.
    digest : str
        A digest of what defines the features. Clients whose digests differ have other
        features, so their tensors cannot be combined.
    """

    disagreement: ClassVar[tuple[str, str]] = (
        KEYS,
        "has other features (p, seed, head, network) than most clients'",
    )

    tensors: dict[str, Tensor]
    digest: str

    def layout(self) -> tuple[str, ...]:
        """Return the features and the tensors' shapes, equal for all clients."""
        facts = [f"features {self.digest}"]
        for name, value in self.tensors.items():
            shape = "x".join(map(str, value.shape))
            facts.append(f"{name}[{shape}]" if shape else name)
        if _HEAD in self.tensors:
            facts.append(f"head {text_from(self.tensors[_HEAD])!r}")
        if "num-classes" in self.tensors:
            facts.append(f"{int(self.tensors['num-classes'])} classes")
        return tuple(facts)

    def check_weight(self, weight: float) -> None:
        """Raise :class:`WireError` if it counts more examples than the metrics do."""
        if (count := int(self.tensors.get(COUNT, 0))) > weight:
            reason = f"{count} examples, but the metrics say {weight:g}"
            raise WireError(reason, field=f"{KEYS}{COUNT}")

    def step_norms(self, like: Params) -> dict[str, float]:
        """Return the features' root mean square, the eigenvalue or the step's norm."""
        tensors = self.tensors
        if "mean" in tensors:
            parts = [tensors["mean"], (tensors["m2"] / tensors[COUNT]).sqrt()]
            return {_FEATURES: norm64(parts) / len(tensors["mean"]) ** 0.5}
        weight = like[f"{KEYS}weight"]
        if LARGEST in tensors:
            # The mean trace of all clients' standardised features is p. An eigenvalue
            # up to twice that is plausible, and the learning rate for it is usable.
            return {LARGEST: max(float(tensors[LARGEST]), 2.0 * len(weight))}
        sent = {STEP: weight}
        return {STEP: displacements({STEP: tensors["weight"]}, sent)[PARAMETERS]}

    def scaled(self, factors: Mapping[str, float], like: Params) -> Self:
        """Return it with smaller features, a smaller eigenvalue, or a shorter step."""
        tensors = dict(self.tensors)
        if (factor := factors.get(_FEATURES)) is not None:
            tensors["mean"] = tensors["mean"] * factor
            tensors["m2"] = tensors["m2"] * factor**2
        if (factor := factors.get(LARGEST)) is not None:
            tensors[LARGEST] = tensors[LARGEST] * factor
        if (factor := factors.get(STEP)) is not None:
            sent = {STEP: like[f"{KEYS}weight"]}
            own = {STEP: tensors["weight"]}
            tensors["weight"] = drawn_back(own, sent, {PARAMETERS: factor})[STEP]
        return replace(self, tensors=tensors)

    def reweighted(self, factor: float) -> Self:
        """Return the moments of `factor` times as many examples."""
        if COUNT not in self.tensors:
            return self
        count = (self.tensors[COUNT] * factor).round().long().clamp_min(1)
        share = int(count) / int(self.tensors[COUNT])
        return replace(
            self,
            tensors=self.tensors | {COUNT: count, "m2": self.tensors["m2"] * share},
        )

    def to_arrays(self) -> ArrayRecord:
        """Return the one record that travels."""
        named = {**self.tensors, _DIGEST: bytes_of(self.digest)}
        return tensors_to_arrays({f"{KEYS}{k}": v for k, v in named.items()})


def read_moments(num_features: int, record: ArrayRecord, like: Params) -> TangentUpload:
    """Read moments of at most `num_features` features.

    They are ``mean`` and ``m2`` ``[p]`` in float64, ``count``, ``num-classes``, and
    ``head``, the name of the replaced layer.
    """
    expected = {
        "mean": (torch.float64, (None,)),
        "m2": (torch.float64, (None,)),
        COUNT: (torch.int64, ()),
        "num-classes": (torch.int64, ()),
        _HEAD: (torch.uint8, (None,)),
    }
    read = read_tangent(record, expected, limit=16 * num_features + LONGEST)
    check_moments(num_features, read.tensors, like)
    return read


def read_spectrum(record: ArrayRecord, like: Params) -> TangentUpload:
    """Read ``largest-eigenvalue``, one float64."""
    read = read_tangent(record, {LARGEST: (torch.float64, ())}, limit=8)
    if read.tensors[LARGEST] < 0:
        raise WireError("is negative", field=f"{KEYS}{LARGEST}")
    return read


def read_local_weight(record: ArrayRecord, like: Params) -> TangentUpload:
    """Read ``weight``, with shape and dtype of the ``tct/weight`` sent out."""
    sent = like[f"{KEYS}weight"]
    expected = {"weight": (sent.dtype, tuple(sent.shape))}
    return read_tangent(record, expected, limit=sent.nbytes)


def read_tangent(
    record: ArrayRecord,
    expected: Mapping[str, tuple[torch.dtype, tuple[int | None, ...]]],
    *,
    limit: int,
) -> TangentUpload:
    """Read a record.

    `expected` has each tensor's dtype and shape; None allows any length. `limit` is the
    number of bytes that the tensors may take.

    Raises
    ------
    WireError
        It names the key that is missing, unexpected or unreadable, has another shape or
        dtype, or is not finite.
    """
    layouts = {**expected, _DIGEST: (torch.uint8, (None,))}
    tensors = read_named(record, layouts, limit=limit + LONGEST, prefix=KEYS)
    return TangentUpload({k: tensors[k] for k in expected}, _text(tensors, _DIGEST))


def check_moments(num_features: int, tensors: dict[str, Tensor], like: Params) -> None:
    """Raise :class:`WireError` unless moments are plausible."""
    p = len(tensors["mean"])
    if not 1 <= p <= num_features:
        reason = f"{p} features, but the server requested {num_features}"
        raise WireError(reason, field=f"{KEYS}mean")
    if len(tensors["m2"]) != p:
        reason = f"{len(tensors['m2'])} entries for {p} features"
        raise WireError(reason, field=f"{KEYS}m2")
    if (tensors["m2"] < 0).any():
        raise WireError("a negative sum of squares", field=f"{KEYS}m2")
    for name in (COUNT, "num-classes"):
        if tensors[name] < 1:
            reason = f"must be positive, got {int(tensors[name])}"
            raise WireError(reason, field=f"{KEYS}{name}")
    # The server allocates weights for so many classes.
    head = like.get(f"{_text(tensors, _HEAD)}.weight".removeprefix("."))
    most = _MOST_CLASSES if head is None else len(head)
    if tensors["num-classes"] > most:
        reason = (
            f"{int(tensors['num-classes'])} classes, but at most {most} are allowed"
        )
        raise WireError(reason, field=f"{KEYS}num-classes")


def _text(tensors: dict[str, Tensor], name: str) -> str:
    try:
        return text_from(tensors[name])
    except ValueError as error:
        raise WireError(f"is no text: {error}", field=f"{KEYS}{name}") from error
