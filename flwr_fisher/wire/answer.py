"""A client's answer to a query: its name, and its trained and frozen parameters."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from flwr_fisher.errors import WireError
from flwr_fisher.wire.arrays import (
    arrays_to_tensors,
    bytes_of,
    tensors_to_arrays,
    text_from,
)
from flwr_fisher.wire.options import LIBRARY

ANY_JOB = "any-job"  # the key by which a client says that it does every job
_LARGEST_ID = 2**63
_MOST_PARTITIONS = 2**32
_MOST_FROZEN = 2**23  # characters, of all names and digests
# The key of a digest of all parameters that are frozen and not sent, beside an upload.
# A secure sum sends it unmasked, because of the key's ending.
_FROZEN, _DIGITS, _BYTES = "frozen/digest", 32, 1000
_LORA_A = re.compile(r"\blora_(embedding_)?A\b")  # PEFT's first factors
_SHOWN = 3  # names of parameters in a text


@dataclass(frozen=True)
class Answer:
    """A reply to a query; an entry that is missing or of another type is None.

    Parameters
    ----------
    of_library : bool
        Whether the ClientApp is of this library.
    partition : int | None
        The client's partition.
    trained : frozenset[str] | None
        The names of the parameters that it trains.
    frozen : frozenset[str] | None
        The names of those that it does not train, each with a digest of its values.
    any_job : bool
        Whether it can do every job, not only a training.
    """

    of_library: bool
    partition: int | None
    trained: frozenset[str] | None
    frozen: frozenset[str] | None = None
    any_job: bool = False

    def frozen_beside(self, sent: Iterable[str]) -> frozenset[str] | None:
        """Return the frozen parameters that the server does not send to clients."""
        if self.frozen is None:
            return None
        names = set(sent)
        return frozenset(f for f in self.frozen if frozen_name(f) not in names)

    @classmethod
    def of(cls, message: Message) -> Self:
        """Return the answer in a reply, which may hold anything."""
        content = message.content if message.has_content() else RecordDict()
        metrics = content.metric_records.values()
        configs = content.config_records.values()
        partition = next(
            (r["partition-id"] for r in metrics if "partition-id" in r), None
        )
        if not (isinstance(partition, int) and 0 <= partition < _LARGEST_ID):
            partition = None
        frozen = _texts(configs, "frozen")
        if sum(map(len, frozen or ())) > _MOST_FROZEN:
            frozen = None
        return cls(
            any(LIBRARY in record for record in configs),
            partition,
            _texts(configs, "trained"),
            frozen,
            any(record.get(ANY_JOB) is True for record in configs),
        )


def client_name(number: int) -> str:
    """Return what texts call a client, by its number: its partition, or its node's id.

    Flower draws ids of nodes from 64 bits, and partitions are counted.

    Examples
    --------
    >>> client_name(3), client_name(6094201937443016153)
    ('partition 3', 'node 6094201937443016153')
    """
    return f"{'partition' if number < _MOST_PARTITIONS else 'node'} {number}"


def frozen_name(described: str) -> str:
    """Return the name in a frozen parameter's name with its digest."""
    return described.rpartition(" ")[0]


# the digest of frozen parameters, beside an upload


def with_frozen(record: ArrayRecord, digest: str) -> ArrayRecord:
    """Return an upload's arrays, with a digest of the frozen parameters not sent."""
    frozen = tensors_to_arrays({_FROZEN: bytes_of(digest[:_DIGITS])})
    return ArrayRecord({**record, **frozen})


def split_frozen(record: ArrayRecord) -> tuple[ArrayRecord, str]:
    """Return an upload's arrays, and the digest beside them or ``""``.

    Raises
    ------
    WireError
        If it is not a digest.
    """
    if _FROZEN not in record:
        return record, ""
    only = ArrayRecord({_FROZEN: record[_FROZEN]})
    tensor = arrays_to_tensors(only, limit=_BYTES)[_FROZEN]
    try:
        digest = text_from(tensor)
        int(digest, 16)
    except (TypeError, ValueError) as error:
        raise WireError("no digest of frozen parameters", field=_FROZEN) from error
    return ArrayRecord({k: v for k, v in record.items() if k != _FROZEN}), digest


# the trained parameters


def adapter_warning(trained: Iterable[str]) -> str:
    """Return a warning if both factors of adapters are trained, or else "".

    Examples
    --------
    >>> adapter_warning(["q.lora_B.default.weight", "head.weight"])
    ''
    >>> adapter_warning(["q.lora_A.weight", "q.lora_B.weight"])
    "Clients train both factors of adapters, 'q.lora_A.weight' and its lora_B. ..."
    """
    names = set(trained)
    both = {
        name
        for name in names
        if _LORA_A.search(name) and _LORA_A.sub(r"lora_\1B", name) in names
    }
    if not both:
        return ""
    return (
        f"Clients train both factors of adapters, {some(both)} and its lora_B. The "
        "merge of each factor is not the merge of their product. Freeze each lora_A, "
        "the same on every client, and double the rank"
    )


def some(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are, as text.

    Examples
    --------
    >>> some("edcba")
    "'a', 'b', 'c' and 2 more"
    """
    first = sorted(names)
    more = f" and {len(first) - _SHOWN} more" if len(first) > _SHOWN else ""
    return ", ".join(f"'{name}'" for name in first[:_SHOWN]) + more


def _texts(configs: Iterable[ConfigRecord], key: str) -> frozenset[str] | None:
    """Return the first list of texts of this name, or None."""
    lists = (record.get(key) for record in configs)
    texts = next((each for each in lists if isinstance(each, list)), None)
    return None if texts is None else frozenset(map(str, texts))
