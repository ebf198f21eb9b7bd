"""Whether clients train the same parameters, asked before they train."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

from flwr.app import ConfigRecord, RecordDict

from flwr_fisher.errors import ClientError
from flwr_fisher.params import Params
from flwr_fisher.server.collect import query
from flwr_fisher.server.mailbox import Mailbox, Reply
from flwr_fisher.wire import named_options

_SHOWN = 3  # names of parameters in an error


class Agreement:
    """Knows which parameters each node trains; asks each once."""

    def __init__(self) -> None:
        self._trained: dict[int, frozenset[str]] = {}
        self._asked: set[int] = set()

    def odd(
        self, mailbox: Mailbox, nodes: Sequence[int], like: Params, timeout: float
    ) -> dict[int, ClientError]:
        """Return the nodes that train other parameters than most, and how they differ.

        A node that does not tell is not among them: it may fail later, by itself.

        Parameters
        ----------
        mailbox : Mailbox
            Reaches them.
        nodes : Sequence[int]
            Those that are to train, in an order that is the same in every run.
        like : Mapping[str, Tensor]
            The parameters that they are sent; other names are not looked at.
        timeout : float
            Seconds to wait for answers, at most a minute.
        """
        new = [node for node in nodes if node not in self._asked]
        self._ask(mailbox, new, frozenset(like), timeout)
        sets = {node: self._trained[node] for node in nodes if node in self._trained}
        if len(set(sets.values())) < 2:
            return {}
        common = Counter(sets.values()).most_common(1)[0][0]
        return {
            node: ClientError(_difference(own, common))
            for node, own in sets.items()
            if own != common
        }

    def _ask(
        self,
        mailbox: Mailbox,
        nodes: Sequence[int],
        names: frozenset[str],
        timeout: float,
    ) -> None:
        if not nodes:
            return
        self._asked |= set(nodes)
        config = ConfigRecord({**named_options({"query": "trained"})})
        content = RecordDict({"config": config})
        take = partial(self._take, names)
        for reply in query(mailbox, nodes, content, timeout, take):
            take(reply)

    def _take(self, names: frozenset[str], reply: Reply) -> None:
        """Take which of these names a node trains, whenever the answer comes."""
        message = reply.message
        records = message.content.config_records if message.has_content() else {}
        for record in records.values():
            if isinstance(trained := record.get("trained"), list):
                self._trained[reply.node] = names.intersection(trained)


def _difference(own: frozenset[str], common: frozenset[str]) -> str:
    parts = []
    if extra := own - common:
        parts.append(f"it trains {_some(extra)}, which most freeze")
    if missing := common - own:
        parts.append(f"it freezes {_some(missing)}, which most train")
    return f"{'; '.join(parts)}: freeze the same parameters on every client"


def _some(names: Iterable[str]) -> str:
    first = sorted(names)
    more = f" and {len(first) - _SHOWN} more" if len(first) > _SHOWN else ""
    return ", ".join(f"'{name}'" for name in first[:_SHOWN]) + more
