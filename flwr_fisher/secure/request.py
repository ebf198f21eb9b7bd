"""What a server asks of a client in a secure sum, read, and the answers to it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

from flwr_fisher.client.limits import whole_number
from flwr_fisher.client.request import partition_of
from flwr_fisher.errors import ClientError
from flwr_fisher.secure.contribution import NUM_EXAMPLES, Contribution
from flwr_fisher.secure.fixed_point import Words
from flwr_fisher.secure.payload import (
    LAYOUT,
    SECURE,
    WORDS,
    SecureUpload,
    layout_text,
)
from flwr_fisher.wire import (
    arrays_to_tensors,
    join_groups,
    named_options,
    split_groups,
    tensors_to_arrays,
)

_GROUP = "secure"  # of the tensors that are for the mod alone


class SumRequest:
    """A request of a secure sum, read."""

    def __init__(
        self, message: Message, context: Context, options: Mapping[str, Any]
    ) -> None:
        self.message, self.context = message, context
        self.options, self.client = options, partition_of(context)
        self.index = whole_number(options, "secure-sum", 0)
        self.weighted_by = str(options.get("secure-weight", NUM_EXAMPLES))
        records = list(message.content.array_records.values())
        if len(records) != 1:
            raise ClientError(f"expected one ArrayRecord, got {len(records)}")
        self.params, self.groups = split_groups(arrays_to_tensors(records[0]))
        self.sent = self.groups.pop(_GROUP, {})

    def tensor(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return what the server sent."""
        value = self.sent.get(name)
        if value is None or value.dtype != dtype or tuple(value.shape) != shape:
            got = "nothing" if value is None else f"{value.dtype} {tuple(value.shape)}"
            raise ClientError(
                f"the server sent {got} for '{name}' of a secure sum, expected {dtype} "
                f"{shape}: install the same flwr-fisher on both sides"
            )
        return value

    def rows(self, name: str, count: int, width: int) -> list[bytes]:
        """Return a matrix of bytes that the server sent, row by row."""
        matrix = self.tensor(name, torch.uint8, count, width).numpy()
        return [row.tobytes() for row in matrix]

    def numbers(self, name: str) -> list[int]:
        """Return a list of clients that the server sent, each once."""
        value = self.sent.get(name)
        if value is None or value.dtype != torch.int64 or value.dim() != 1:
            raise ClientError(f"the server sent no list of clients as '{name}'")
        numbers = [number % 2**64 for number in value.tolist()]
        if len(set(numbers)) < len(numbers):
            raise ClientError(f"the server's list '{name}' has a client twice")
        return numbers

    def session(self) -> bytes:
        """Return the number under which this client keeps its secrets."""
        return self.tensor("session", torch.uint8, 8).numpy().tobytes()

    def bounds(self) -> tuple[float, float]:
        """Return the norm that is clipped to, and the noise's standard deviation."""
        if "bounds" not in self.sent:
            return math.inf, 0.0
        norm, deviation = self.tensor("bounds", torch.float64, 2).tolist()
        return norm, deviation

    def inner(self) -> Message:
        """Return the request as it would be without a secure sum."""
        arrays = tensors_to_arrays({**self.params, **join_groups(self.groups)})
        (own,) = named_options({"secure": None})
        (job,) = named_options({"job": None})
        content = RecordDict()
        for name, record in self.message.content.items():
            if isinstance(record, ConfigRecord):
                kept = {k: v for k, v in record.items() if not k.startswith(own)}
                kept[job] = str(self.options.get("secure-job", "train"))
                content[name] = ConfigRecord(kept)
            else:
                content[name] = arrays
        self.message.content = content
        return self.message

    def reply(self, tensors: dict[str, Tensor]) -> Message:
        """Return the answer; of the client's metrics it has none."""
        metrics = MetricRecord({NUM_EXAMPLES: 1, self.weighted_by: 1})
        arrays = SecureUpload(tensors).to_arrays()
        content = RecordDict({"arrays": arrays, "metrics": metrics})
        return Message(content, reply_to=self.message)

    def reply_words(self, words: Words, contribution: Contribution) -> Message:
        """Return masked words, and of which tensors they are."""
        own = {
            WORDS: torch.from_numpy(words),
            LAYOUT: layout_text(contribution.layout()),
        }
        return self.reply({**contribution.descriptions(), **own})

    def reply_rows(self, **parts: Sequence[bytes]) -> Message:
        """Return an answer of matrices of bytes, whose rows have one length."""
        named = {k.replace("_", "-"): _rows(rows) for k, rows in parts.items()}
        return self.reply({f"{SECURE}{k}": rows for k, rows in named.items()})


def _rows(rows: Sequence[bytes]) -> Tensor:
    data = np.frombuffer(bytearray(b"".join(rows)), np.uint8)
    return torch.from_numpy(data.reshape(len(rows), -1))
