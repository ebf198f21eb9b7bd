"""What every kind of upload has in common."""

from abc import ABC, abstractmethod
from typing import ClassVar

from flwr.app import ArrayRecord

from flwr_fisher.wire.layout import PREFIX


class Payload(ABC):
    """What a client uploads: a frozen dataclass that turns into one ``ArrayRecord``.

    Attributes
    ----------
    disagreement : tuple[str, str]
        What the error says of an upload whose layout differs from most clients': the
        field, and the reason.
    """

    disagreement: ClassVar[tuple[str, str]] = (
        PREFIX,
        "covers other parameters than most clients' does",
    )

    @abstractmethod
    def layout(self) -> tuple[str, ...]:
        """Return what the uploads of all clients of a round must have in common."""

    @abstractmethod
    def to_arrays(self) -> ArrayRecord:
        """Return the one record that travels."""

    def check_weight(self, weight: float) -> None:  # noqa: B027
        """Raise :class:`WireError` if the upload says another weight than the metrics.

        Most uploads say none.
        """
