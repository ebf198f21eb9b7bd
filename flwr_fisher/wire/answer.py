"""What a client answers when a server asks who it is, and what it trains."""

from dataclasses import dataclass
from typing import Self

from flwr.app import Message, RecordDict

from flwr_fisher.errors import printable
from flwr_fisher.wire.options import LIBRARY

_LARGEST_ID = 2**63


@dataclass(frozen=True)
class Answer:
    """A reply to a query; what it does not say, or says in another type, is None.

    Parameters
    ----------
    of_library : bool
        Whether the ClientApp is of this library.
    partition : int | None
        Which partition the client holds.
    trained : frozenset[str] | None
        The names of the parameters that it trains.
    problem : str
        What it says that cannot be.
    """

    of_library: bool
    partition: int | None
    trained: frozenset[str] | None
    problem: str = ""

    @classmethod
    def of(cls, message: Message) -> Self:
        """Read a reply, whatever it holds."""
        content = message.content if message.has_content() else RecordDict()
        metrics = content.metric_records.values()
        configs = content.config_records.values()
        partition = next(
            (r["partition-id"] for r in metrics if "partition-id" in r), None
        )
        problem = ""
        if not (isinstance(partition, int) and 0 <= partition < _LARGEST_ID):
            if partition is not None:
                problem = f"claims partition {printable(repr(partition))}"
            partition = None
        lists = (record.get("trained") for record in configs)
        trained = next((names for names in lists if isinstance(names, list)), None)
        return cls(
            any(LIBRARY in record for record in configs),
            partition,
            None if trained is None else frozenset(map(str, trained)),
            problem,
        )
