"""What the server knows of a round's secure sums, as tensors between its exchanges."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flwr_fisher.params import Params
from flwr_fisher.secure.aggregator import Aggregator, Sealed
from flwr_fisher.secure.keys import DIGEST, PUBLIC
from flwr_fisher.secure.participant import Pair
from flwr_fisher.secure.payload import SecureUpload
from flwr_fisher.server.exchange import ServerState, Uploads

GROUP = "secure"  # of a state's tensors, and of those that are sent to clients' mods
_WRAP = 2**64  # clients' numbers are unsigned, and tensors' integers are not


@dataclass(frozen=True)
class SecureState:
    """Who takes part in a round's secure sums, and how far the one under way is.

    Parameters
    ----------
    aggregator : Aggregator
        Keys, neighbours and sealed shares.
    sessions : Mapping[int, Tensor]
        By client: 8 bytes by which it knows these sums.
    signatures : Mapping[int, bytes]
        By client: under its public keys.
    present : Sequence[int]
        Who has replied to the last request.
    exponents : Sequence[int]
        Of the contributions' tensors, once they are known.
    words : Tensor
        The sum under masks, until it is opened.
    descriptions : Mapping[str, Tensor]
        What all clients say of their contributions: texts, by their keys.
    """

    aggregator: Aggregator
    sessions: Mapping[int, Tensor]
    signatures: Mapping[int, bytes]
    present: Sequence[int]
    exponents: Sequence[int] = ()
    words: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint32))
    descriptions: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, state: ServerState) -> "SecureState":
        """Read it from a run's state."""
        tensors = state.group(GROUP)
        record: dict[str, Any] = json.loads(tensors["record"].numpy().tobytes())
        numbers: list[int] = record["numbers"]
        around = [[numbers[i] for i in row] for row in record["neighbourhoods"]]
        public = _by_number(numbers, tensors["public"], PUBLIC)
        aggregator = Aggregator(
            dict(zip(numbers, record["names"], strict=True)),
            public,
            dict(zip(numbers, around, strict=True)),
            record["threshold"],
        )
        sealed = _read_sealed(aggregator, record["sharers"], tensors)
        return cls(
            replace(aggregator, sealed=sealed),
            dict(zip(numbers, tensors["sessions"], strict=True)),
            {
                number: row.numpy().tobytes()
                for number, row in zip(numbers, tensors["signatures"], strict=True)
            },
            record["present"],
            record["exponents"],
            tensors["words"],
            {
                name.removeprefix("descriptions/"): value
                for name, value in tensors.items()
                if name.startswith("descriptions/")
            },
        )

    def after(self, uploads: Uploads[SecureUpload], **changes: Any) -> "SecureState":
        """Return what is known after an exchange."""
        present = sorted(upload.number for upload in uploads)
        return replace(self, **{"present": present, **changes})

    def into(self, state: ServerState) -> ServerState:
        """Return a run's state with this in it."""
        groups = {**state.groups, GROUP: self._tensors()}
        return replace(state, groups=groups)

    def _tensors(self) -> dict[str, Tensor]:
        known = self.aggregator
        numbers = list(known.public)
        place = {number: index for index, number in enumerate(numbers)}
        record = {
            "numbers": numbers,
            "names": [known.names[n] for n in numbers],
            "neighbourhoods": [
                [place[other] for other in known.neighbourhoods[n]] for n in numbers
            ],
            "threshold": known.threshold,
            "sharers": list(known.sealed),
            "present": list(self.present),
            "exponents": list(self.exponents),
        }
        sealed = list(known.sealed.items())
        texts = [text for _, own in sealed for _, text in sorted(own.shares.items())]
        digests = [
            b"".join(a + b for a, b in pairs)
            for _, own in sealed
            for _, pairs in sorted(own.commitments.items())
        ]
        return {
            "record": _bytes(json.dumps(record).encode()),
            "public": rows_of([b"".join(known.public[n]) for n in numbers]),
            "sessions": torch.stack([self.sessions[n] for n in numbers]),
            "signatures": rows_of([self.signatures[n] for n in numbers]),
            "sealed": rows_of(texts),
            "commitments": rows_of(digests),
            "words": self.words,
            **{f"descriptions/{name}": v for name, v in self.descriptions.items()},
        }


def without(state: ServerState) -> ServerState:
    """Return a run's state as the strategy knows it."""
    others = {name: group for name, group in state.groups.items() if name != GROUP}
    return replace(state, groups=others)


def rows_of(rows: Sequence[bytes]) -> Tensor:
    """Return byte strings of one length as a matrix."""
    return _bytes(b"".join(rows)).reshape(len(rows), -1 if rows else 0)


def cut(row: Tensor, size: int) -> list[bytes]:
    """Return a row of a matrix of bytes in pieces."""
    data = row.numpy().tobytes()
    return [data[i : i + size] for i in range(0, len(data), size)]


def pairs_in(row: Tensor) -> list[Pair]:
    """Return a row of commitments, in pairs."""
    parts = cut(row, DIGEST)
    return list(zip(parts[::2], parts[1::2], strict=True))


def signed(numbers: Sequence[int]) -> Tensor:
    """Return clients' numbers as they travel."""
    wrapped = [n - _WRAP if n >= _WRAP // 2 else n for n in numbers]
    return torch.tensor(wrapped, dtype=torch.int64)


def _read_sealed(
    known: Aggregator, sharers: Sequence[int], tensors: Params
) -> dict[int, Sealed]:
    texts, digests = iter(tensors["sealed"]), iter(tensors["commitments"])
    sealed = {}
    for sharer in sharers:
        around = known.neighbourhoods[sharer]
        own = {n: next(texts).numpy().tobytes() for n in around if n != sharer}
        sealed[sharer] = Sealed(own, {n: pairs_in(next(digests)) for n in around})
    return sealed


def _by_number(
    numbers: Sequence[int], rows: Tensor, size: int
) -> dict[int, Sequence[bytes]]:
    return {n: cut(row, size) for n, row in zip(numbers, rows, strict=True)}


def _bytes(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
