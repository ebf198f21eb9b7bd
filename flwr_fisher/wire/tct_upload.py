"""The uploads of TCT's second stage: sums of features, an eigenvalue, local weights.

Each has a description ``tct/format`` of its features: a digest of all that defines
them, the replaced layer's name and the number of classes. Clients whose descriptions
differ have other features, so their tensors cannot be combined.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from flwr_fisher.errors import WireError
from flwr_fisher.params import Params
from flwr_fisher.tangent import FeatureSums
from flwr_fisher.wire.arrays import FORMAT_VERSION
from flwr_fisher.wire.schema import Payload, description, norm64, part

KEYS = "tct/"  # the prefix of all keys but the network's
_FORMAT, _FEATURES, _LARGEST = f"{KEYS}format", "features", f"{KEYS}largest-eigenvalue"
_MOST_CLASSES = 2**20
# A histogram of eigenvalues has 8 bins an octave, from 2**-40 to 2**40.
_PER_OCTAVE, _LOWEST = 8, -40
BINS = 1 - 2 * _LOWEST * _PER_OCTAVE
_MOST_CLIENTS = 2**16  # in one sum, for which its words have room


def about_features(digest: str, head: str, num_classes: int) -> dict[str, Any]:
    """Return the description of a client's features."""
    facts = {"digest": digest, "head": head, "classes": num_classes}
    return {"version": FORMAT_VERSION, **facts}


@dataclass(frozen=True)
class TangentUpload(Payload):
    """What all uploads of the second stage have.

    Parameters
    ----------
    about : dict[str, Any]
        As :func:`about_features` returns it.
    """

    disagreement = (
        KEYS,
        "has other features (p, seed, head, network) than most clients'",
    )

    about: dict[str, Any] = description(_FORMAT)


@dataclass(frozen=True)
class FeatureUpload(TangentUpload):
    """The sums over a client's examples from which features are standardised.

    Parameters
    ----------
    total, squares : Tensor
        ``[p]``, the sums of features and of their squares.
    count : Tensor
        The number of examples.
    """

    total: Tensor = part(f"{KEYS}sum", torch.float64, ("p",), summed=True)
    squares: Tensor = part(f"{KEYS}squares", torch.float64, ("p",), low=0, summed=True)
    count: Tensor = part(
        f"{KEYS}count", torch.float64, above=0, counts=True, summed=True
    )

    @classmethod
    def of(cls, about: dict[str, Any], sums: FeatureSums) -> Self:
        """Return the upload of a client's sums."""
        count = torch.tensor(sums.count, dtype=torch.float64)
        return cls(about, sums.total, sums.squares, count)

    @property
    def sums(self) -> FeatureSums:
        """The sums over the client's examples."""
        return FeatureSums(self.total, self.squares, float(self.count))

    def check(self, like: Params) -> None:
        """Raise :class:`WireError` unless the description has what the server needs."""
        digest, head, classes = map(self.about.get, ("digest", "head", "classes"))
        if not (isinstance(digest, str) and isinstance(head, str)):
            raise WireError("names no features or no head", field=_FORMAT)
        # The server allocates weights for so many classes.
        weight = like.get(f"{head}.weight".removeprefix("."))
        most = _MOST_CLASSES if weight is None else len(weight)
        if not isinstance(classes, int) or not 1 <= classes <= most:
            reason = f"{classes!r:.40} classes, expected 1 to {most}"
            raise WireError(reason, field=_FORMAT)

    def step_norms(self, like: Params) -> dict[str, float]:
        """Return the size of a feature, from the means and the mean squares."""
        means = [self.total / self.count, (self.squares / self.count).sqrt()]
        return {_FEATURES: norm64(means) / len(self.total) ** 0.5}

    def scaled(self, factors: Mapping[str, float], like: Params) -> Self:
        """Return it with smaller features."""
        factor = factors.get(_FEATURES, 1.0)
        total, squares = self.total * factor, self.squares * factor**2
        return replace(self, total=total, squares=squares)


@dataclass(frozen=True)
class EigenvalueUpload(TangentUpload):
    """The largest eigenvalue of a client's regression.

    Parameters
    ----------
    value : Tensor
        The eigenvalue.
    """

    value: Tensor = part(_LARGEST, torch.float64, limit="step", low=0)

    @property
    def eigenvalues(self) -> list[float]:
        """The eigenvalues of all clients of the upload."""
        return [float(self.value)]

    def step_norms(self, like: Params) -> dict[str, float]:
        """Return the eigenvalue, as far as it is above what is usual."""
        # The mean trace of all clients' standardised features is p. An eigenvalue up to
        # twice that is plausible, and the learning rate for it is usable.
        return {_LARGEST: max(float(self.value), 2.0 * len(like[f"{KEYS}weight"]))}


@dataclass(frozen=True)
class EigenvalueCounts(TangentUpload):
    """A histogram of clients' largest eigenvalues, where the server sees only sums.

    Parameters
    ----------
    counts : Tensor
        How many clients' eigenvalues are in each bin of an eighth of an octave.
    """

    counts: Tensor = part(f"{KEYS}eigenvalues", torch.int64, (BINS,), low=0)

    @classmethod
    def of(cls, about: dict[str, Any], value: float) -> Self:
        """Return the upload of one client, with a one in the eigenvalue's bin."""
        above_1 = math.ceil(_PER_OCTAVE * math.log2(value)) if value > 0 else -BINS
        counts = torch.zeros(BINS, dtype=torch.int64)
        counts[min(max(above_1 - _LOWEST * _PER_OCTAVE, 0), BINS - 1)] = 1
        return cls(about, counts)

    @property
    def eigenvalues(self) -> list[float]:
        """The upper edge of each client's bin.

        Examples
        --------
        >>> EigenvalueCounts.of({}, 3.0).eigenvalues
        [3.08...]
        """
        bins = torch.arange(BINS).repeat_interleave(self.counts).tolist()
        return [2.0 ** (number / _PER_OCTAVE + _LOWEST) for number in bins]

    def check(self, like: Params) -> None:
        """Raise :class:`WireError` for more clients than a sum can have, or none."""
        # Large counts could add up to a small sum, because int64 wraps around.
        few = self.counts.max() <= _MOST_CLIENTS
        if not (few and 0 < self.counts.sum() <= _MOST_CLIENTS):
            raise WireError("not counts of clients", field=f"{KEYS}eigenvalues")


@dataclass(frozen=True)
class WeightUpload(TangentUpload):
    """A client's weights of the regression after its local steps.

    Parameters
    ----------
    weight : Tensor
        ``[p, C]``, in the dtype of the server's.
    """

    weight: Tensor = part(f"{KEYS}weight", limit="model")
