"""What a client answers when a server asks who it is, and what it trains."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from flwr.app import ConfigRecord, Message, RecordDict

from flwr_fisher.errors import printable
from flwr_fisher.wire.options import LIBRARY

_LARGEST_ID = 2**63
_MOST_FROZEN = 2**23  # characters, of all names and digests


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
    frozen : frozenset[str] | None
        The names of those that it does not train, each with a digest of its values.
    problem : str
        What it says that cannot be.
    """

    of_library: bool
    partition: int | None
    trained: frozenset[str] | None
    frozen: frozenset[str] | None = None
    problem: str = ""

    def frozen_beside(self, sent: Iterable[str]) -> frozenset[str] | None:
        """Return what is frozen, without the parameters that are sent to clients."""
        if self.frozen is None:
            return None
        names = set(sent)
        return frozenset(f for f in self.frozen if frozen_name(f) not in names)

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
        frozen = _texts(configs, "frozen")
        if sum(map(len, frozen or ())) > _MOST_FROZEN:
            frozen = None
        return cls(
            any(LIBRARY in record for record in configs),
            partition,
            _texts(configs, "trained"),
            frozen,
            problem,
        )


def frozen_name(described: str) -> str:
    """Return the name of a frozen parameter that comes with its digest."""
    return described.rpartition(" ")[0]


def _texts(configs: Iterable[ConfigRecord], key: str) -> frozenset[str] | None:
    """Return the first list of this name; None if there is none."""
    lists = (record.get(key) for record in configs)
    texts = next((each for each in lists if isinstance(each, list)), None)
    return None if texts is None else frozenset(map(str, texts))
