"""Who is left out of an exchange, and why; told once, however many there are."""

from flwr_fisher.log_lines import logger
from flwr_fisher.printable import printable

_NAMES, _LINES, _REASON = 5, 20, 800


class Rejections:
    """Clients with the reasons why they are left out, in the order of their rejection.

    The first client with a reason is told at once, all others with the same reason by
    :meth:`summarise`: a thousand clients with one mistake are two lines in the log.
    """

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self._nodes: dict[str, str] = {}
        self._new: dict[tuple[str, str], list[str]] = {}  # who is not told of yet

    def __len__(self) -> int:
        return len(self.reasons)

    def add(
        self, client: str, reason: object, *, stage: str, node: int | None = None
    ) -> None:
        """Note, and tell the log, why a client is left out.

        Parameters
        ----------
        client : str
            Its name.
        reason : object
            What the log is to say; it may come from outside.
        stage : str
            What the log's line begins with, as Flower's do.
        node : int, optional
            Its node's id.
        """
        text = printable(reason, _REASON)
        first = text not in self.reasons.values()
        self.reasons[client] = text
        if node is not None:
            self._nodes[client] = f"node {node}: "
        if first:
            sender = self._nodes.get(client, "")
            logger.warning("%s: left out %s: %s%s", stage, client, sender, text)
        else:
            self._new.setdefault((stage, text), []).append(client)

    def summarise(self) -> None:
        """Tell the log who was left out for reasons that it knows already."""
        for (stage, reason), clients in self._new.items():
            logger.warning("%s: left out %s, too: %s", stage, listed(clients), reason)
        self._new.clear()

    def lines(self) -> list[str]:
        """Return a line for each reason, with the clients' names, for an error."""
        groups: dict[str, list[str]] = {}
        for client, reason in self.reasons.items():
            groups.setdefault(reason, []).append(client)
        lines = []
        for reason, clients in groups.items():
            sender = self._nodes.get(clients[0], "") if len(clients) == 1 else ""
            lines.append(f"{listed(clients)}: {sender}{reason}")
        more = len(lines) - _LINES
        return lines[:_LINES] + [f"… and {more} more reasons"] * (more > 0)


def listed(names: list[str]) -> str:
    """Return some of many names in words, partition-2 before partition-10.

    Examples
    --------
    >>> listed(["a", "b"]), listed([f"partition-{i}" for i in range(7)])[-20:]
    ('a, b', 'rtition-4 and 2 more')
    """
    names = sorted(names, key=lambda name: (len(name), name))
    more = len(names) - _NAMES
    return ", ".join(names[:_NAMES]) + (f" and {more} more" if more > 0 else "")
