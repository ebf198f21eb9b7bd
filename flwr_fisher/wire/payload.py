"""The base class of all payloads."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Self

from flwr.app import ArrayRecord

from flwr_fisher.params import Params


class Payload(ABC):
    """A client's upload: a frozen dataclass that is sent as one ``ArrayRecord``.

    Attributes
    ----------
    disagreement : tuple[str, str]
        The error for an upload whose layout differs from most clients': the field, and
        the reason.
    """

    disagreement: ClassVar[tuple[str, str]] = (
        "curvature/",
        "covers other parameters than most clients' does",
    )

    @abstractmethod
    def layout(self) -> tuple[str, ...]:
        """Return what must be equal in all uploads of a round."""

    @abstractmethod
    def to_arrays(self) -> ArrayRecord:
        """Return the one record that travels."""

    def check_weight(self, weight: float) -> None:  # noqa: B027
        """Raise :class:`WireError` if the upload's weight contradicts the metrics.

        Most uploads have no weight of their own.
        """

    # A policy limits clients by the numbers that follow. It does not limit an upload
    # that returns none.

    def step_norms(self, like: Params) -> dict[str, float]:
        """Return by part how far the upload would move the model, in float64.

        They are distances from `like`, which the server sent, and norms of vectors. A
        client's should not be much longer than most clients'.
        """
        return {}

    def curvature_norms(self) -> dict[str, float]:
        """Return each part's weight relative to other clients', in float64.

        They are traces of curvatures, layer by layer, and at least 0. They are not yet
        multiplied by the number of examples.
        """
        return {}

    def scaled(self, factors: Mapping[str, float], like: Params) -> Self:
        """Return the upload with some parts scaled down.

        Parameters
        ----------
        factors : Mapping[str, float]
            Factors of at most 1, by the keys of :meth:`step_norms` and
            :meth:`curvature_norms`.
        like : Mapping[str, Tensor]
            The parameters that the server sent.
        """
        return self

    def reweighted(self, factor: float) -> Self:
        """Return the upload of a client with `factor` times as many examples.

        Only an upload that has its client's weight in its numbers changes.
        """
        return self
