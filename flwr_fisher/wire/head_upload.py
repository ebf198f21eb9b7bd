"""The uploads for a head in closed form: sums over a client's data, no parameters.

``head/gram``, ``head/cross``
    the second moments of the features (the upper triangle, row by row) and their
    products with the targets, ``[(f + 1) (f + 2) / 2]`` and ``[f + 1, C]`` in float64;
    features end in a 1;
``head/square``, ``head/count``
    the targets' sum of squares, and the number of examples, float64;
``head/format``
    JSON with the name of the head's weight, the same for all clients;
``head/none/format``
    JSON with the reason why a client's model has no such head, in place of all this;
``losses``, ``slopes``
    the losses of several models, float64, and those of a head's candidates
    differentiated by its weight and its bias, the last column: ``[k, C, f]`` or ``[k,
    C, f + 1]`` in float32.

The server adds them up, but they are no :class:`~flwr_fisher.wire.Additive`. Their
shapes depend on the head that they name, the moments must be positive semi-definite,
and the count must not exceed the metrics' number of examples.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.errors import WireError, printable
from flwr_fisher.params import Params
from flwr_fisher.tangent.frozen_head import HeadSums
from flwr_fisher.wire.arrays import (
    FORMAT_VERSION,
    check_same_shape,
    check_second_moment,
)
from flwr_fisher.wire.schema import Payload, description, norm64, part

_MOST_LOSSES = 16
_SLACK = 1e-3  # for the fixed-point numbers of a secure sum, relative


@dataclass(frozen=True)
class HeadUpload(Payload):
    """A client's sums for a head in closed form; :meth:`of` makes it.

    Parameters
    ----------
    about : dict[str, Any]
        The names of the head's weight ``[C, f]`` and of its bias or None, and the
        likelihood that says what targets are.
    gram, cross, square, count : Tensor
        The sums over the client's data.
    """

    disagreement = ("head/format", "has another head than most clients'")

    about: dict[str, Any] = description("head/format")
    gram: Tensor = part(
        "head/gram", torch.float64, ("t",), limit="curvature", summed=True
    )
    cross: Tensor = part(
        "head/cross", torch.float64, ("f", "C"), limit="curvature", summed=True
    )
    square: Tensor = part("head/square", torch.float64, low=0, summed=True)
    count: Tensor = part("head/count", torch.float64, above=0, counts=True, summed=True)

    @classmethod
    def of(cls, weight: str, bias: str | None, likelihood: str, sums: HeadSums) -> Self:
        """Return the upload of sums for the head with these parameters."""
        about = {"version": FORMAT_VERSION, "weight": weight, "bias": bias}
        numbers = torch.tensor([sums.square, sums.count], dtype=torch.float64)
        about["likelihood"] = likelihood
        rows, columns = torch.triu_indices(*sums.gram.shape)
        return cls(about, sums.gram[rows, columns], sums.cross, *numbers)

    @property
    def weight(self) -> str:
        """The name of the head's weight."""
        return str(self.about["weight"])

    @property
    def bias(self) -> str | None:
        """The name of the head's bias, if it has one."""
        return self.about["bias"]  # type: ignore[no-any-return]

    @property
    def likelihood(self) -> str:
        """What the targets are: the name of the client's likelihood."""
        return str(self.about.get("likelihood"))

    @property
    def sums(self) -> HeadSums:
        """The sums over the client's data."""
        size = len(self.cross)
        gram = self.gram.new_zeros(size, size)
        rows, columns = torch.triu_indices(size, size)
        gram[rows, columns] = self.gram
        gram = gram + gram.triu(1).mT
        return HeadSums(gram, self.cross, float(self.square), float(self.count))

    @classmethod
    def lengths(cls, like: Params) -> dict[str, int]:
        """Return the largest linear layer's numbers of features and classes."""
        shapes = [value.shape for value in like.values() if value.dim() == 2]
        most = 1 + max((features for _, features in shapes), default=0)
        classes = max((rows for rows, _ in shapes), default=0)
        return {"t": most * (most + 1) // 2, "f": most, "C": classes}

    def check(self, like: Params) -> None:
        """Raise :class:`WireError` unless the model has such a head."""
        weight, bias = self.about.get("weight"), self.about.get("bias")
        if not isinstance(weight, str) or weight not in like or like[weight].dim() != 2:
            reason = f"not the weight of a linear layer: {str(weight)!r:.80}"
            raise WireError(reason, field="head/format")
        classes, features = like[weight].shape
        named = isinstance(bias, str) and bias in like
        if bias is not None and not (named and like[bias].shape == (classes,)):
            reason = f"not the head's bias: {str(bias)!r:.80}"
            raise WireError(reason, field="head/format")
        size = features + 1
        check_same_shape("head/cross", self.cross.shape, (size, classes))
        check_same_shape("head/gram", self.gram.shape, (size * (size + 1) // 2,))
        if not self.gram[-1] > 0:
            raise WireError("no rows of features", field="head/gram")
        sums = self.sums
        check_second_moment("head/gram", sums.gram.unsqueeze(0))
        rows, counts = float(sums.gram[-1, -1]), sums.cross[-1]
        # Cauchy and Schwarz: no products of features and targets are larger.
        most = (sums.gram.diagonal() * sums.square).sqrt().unsqueeze(1)
        if (self.cross.abs() > (1 + _SLACK) * most + _SLACK * most.max()).any():
            raise WireError("is larger than its squares allow", field="head/cross")
        if self.likelihood == "categorical":
            if (counts < -_SLACK * rows).any() or counts.sum() > (1 + _SLACK) * rows:
                raise WireError("has other counts than rows", field="head/cross")
            self._check_square(rows)
        elif self.likelihood == "bernoulli":
            self._check_square(rows * classes)

    def _check_square(self, most: float) -> None:
        if not float(self.square) <= (1 + _SLACK) * most:
            raise WireError("is larger than targets allow", field="head/square")

    def scaled(self, factors: Mapping[str, float], like: Params) -> Self:
        """Return it with scaled sums; one factor for all keeps the solution."""
        factor = factors.get("head/gram", 1.0)
        shorter = min(factor, factors.get("head/cross", 1.0))
        gram, cross = self.gram * factor, self.cross * shorter
        return replace(self, gram=gram, cross=cross, square=self.square * shorter)


@dataclass(frozen=True)
class NoHead(Payload):
    """The reply of a client whose model has no head in closed form.

    Parameters
    ----------
    about : dict[str, Any]
        The reason, in words.
    nothing : Tensor
        A zero, so that a secure sum has something to sum.
    """

    disagreement = HeadUpload.disagreement

    about: dict[str, Any] = description("head/none/format")
    nothing: Tensor = part("head/zero", torch.float64, low=0, summed=True)

    @classmethod
    def of(cls, reason: str) -> Self:
        """Return the reply with this reason."""
        nothing = torch.zeros((), dtype=torch.float64)
        return cls({"version": FORMAT_VERSION, "reason": reason}, nothing)

    @property
    def reason(self) -> str:
        """The reason, as one short line."""
        return printable(self.about.get("reason"), 300)


def read_head(record: ArrayRecord, like: Params) -> HeadUpload | NoHead:
    """Read and check the sums for a head, or the reason why there are none.

    Raises
    ------
    WireError
        As :meth:`Payload.read` does.
    """
    return (NoHead if "head/none/format" in record else HeadUpload).read(record, like)


@dataclass(frozen=True)
class LossUpload(Payload):
    """A client's mean losses of several models.

    Parameters
    ----------
    losses : Tensor
        ``[k]``, each model's mean loss, float64.
    """

    losses: Tensor = part("losses", torch.float64, ("k",), limit="curvature")

    @classmethod
    def lengths(cls, like: Params) -> dict[str, int]:
        """Return the largest number of models that are compared."""
        return {"k": _MOST_LOSSES}


@dataclass(frozen=True)
class HeadLossUpload(LossUpload):
    """A client's mean losses of a head's candidates, and their slopes.

    A policy limits each candidate's by itself: those of the best one must not depend on
    how bad another is.

    Parameters
    ----------
    losses, slopes : Tensor
        As ``flwr_fisher.tangent.frozen_head.head_losses`` returns them, the slopes in
        float32.
    """

    losses: Tensor = part("losses", torch.float64, ("k",), limit="step", low=0)
    slopes: Tensor = part("slopes", torch.float32, ("k", "C", "f"), limit="step")

    @classmethod
    def lengths(cls, like: Params) -> dict[str, int]:
        """Return the largest number of candidates, and of a head's sizes."""
        return {**HeadUpload.lengths(like), **super().lengths(like)}

    def step_norms(self, like: Params) -> dict[str, float]:
        """Return each candidate's loss and the length of its slopes, by its number."""
        return {
            f"{name} {number}": norm64([value])
            for name in ("losses", "slopes")
            for number, value in enumerate(getattr(self, name))
        }

    def scaled(self, factors: Mapping[str, float], like: Params) -> Self:
        """Return the upload with each candidate's loss and slopes scaled down."""
        numbers = range(len(self.losses))
        by_loss, by_slope = (
            self.losses.new_tensor([factors.get(f"{name} {n}", 1.0) for n in numbers])
            for name in ("losses", "slopes")
        )
        slopes = self.slopes * by_slope.to(self.slopes).view(-1, 1, 1)
        return replace(self, losses=self.losses * by_loss, slopes=slopes)

    @classmethod
    def read_slopes(
        cls, shape: tuple[int, ...], record: ArrayRecord, like: Params
    ) -> Self:
        """Read and check losses of candidates whose slopes have this shape.

        Raises
        ------
        WireError
            As :meth:`Payload.read` does, or if a shape is another.
        """
        upload = cls.read(record, like)
        check_same_shape("slopes", upload.slopes.shape, shape)
        return upload
