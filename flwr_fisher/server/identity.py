"""Who a client is, in every run: node ids differ."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

Order = tuple[int, int, str]


@dataclass(frozen=True)
class Identity:
    """A client by the name that its node is registered by, its partition, or its id.

    Parameters
    ----------
    node : int
        Its node's id, this time.
    registered : str
        The name that the SuperLink vouches for; empty if it has none.
    partition : int, optional
        What it says that it holds.
    """

    node: int
    registered: str = ""
    partition: int | None = None

    @property
    def name(self) -> str:
        """The same in every run, where one is known."""
        if self.registered:
            return self.registered
        if self.partition is not None:
            return f"partition-{self.partition}"
        return f"node-{self.node}"

    @property
    def order(self) -> Order:
        """A sort key that does not depend on node ids, where possible."""
        if self.registered:
            return (1, 0, self.registered)
        if self.partition is not None:
            return (0, self.partition, "")
        return (2, self.node, "")

    @property
    def number(self) -> int:
        """What the client itself is known by: its partition, or its node."""
        return self.node if self.partition is None else self.partition

    @property
    def names(self) -> set[str]:
        """All that it may have gone by: in another life more or less was known of it.

        Examples
        --------
        >>> sorted(Identity(7, "a", 3).names)
        ['a', 'node-7', 'partition-3']
        """
        own = () if self.partition is None else (f"partition-{self.partition}",)
        return {self.name, f"node-{self.node}", *own}

    def to_record(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return asdict(self)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> "Identity":
        """Read what :meth:`to_record` returned.

        Raises
        ------
        TypeError
            If it is none.
        """
        return cls(**record)
