"""The payload of a secure sum's stages: named bytes and masked words.

``secure/session``, ``secure/keys``
    the client's number for the session, 8 bytes; its public keys, one a row;
``secure/sealed-shares``, ``secure/commitments``
    a row for each neighbour: sealed shares, and digests of them;
``secure/words``, ``secure/layout``
    masked residues, uint32 or uint64, of all tensors one after another; and their
    layout in JSON, equal for all clients;
``secure/shares``
    a row for each neighbour, with shares that open the sum.

A contribution's bytes under keys that end in ``format`` or ``digest`` are sent without
masks: they describe it, and are equal for all clients.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ArrayRecord, Message
from torch import Tensor

from flwr_fisher.client.request import arrays_of
from flwr_fisher.errors import ClientError, WireError
from flwr_fisher.params import Params, clipped
from flwr_fisher.secure.fixed_point import FixedPoint, Words, exponent_of
from flwr_fisher.server.privacy import exponent_for, with_noise
from flwr_fisher.wire import NUM_EXAMPLES, arrays_to_tensors, tensors_to_arrays
from flwr_fisher.wire.arrays import contribution_bytes
from flwr_fisher.wire.schema import Payload

SECURE = "secure/"
WORDS, LAYOUT = f"{SECURE}words", f"{SECURE}layout"
SHARES = f"{SECURE}shares"

Layout = list[tuple[str, str, tuple[int, ...]]]
"""Key, dtype and shape of each tensor of a contribution."""

_DESCRIPTION = 4096  # bytes
_FIXED = 2**24  # bytes of keys and shares, of some thousands of neighbours
_DIMENSIONS = 64  # of a tensor, at most
_WORD = {torch.uint32, torch.uint64}


@dataclass(frozen=True)
class SecureUpload(Payload):
    """A client's reply in one stage.

    Parameters
    ----------
    tensors : dict[str, Tensor]
        Bytes, and words.
    """

    disagreement = (SECURE[:-1], "has other arrays than most clients' have")

    tensors: dict[str, Tensor]

    def layout(self) -> tuple[str, ...]:
        """Return what must be equal for all clients: shapes, and descriptions."""
        every = sorted(self.tensors.items())
        return tuple(f"{name} {_content(name, value)}" for name, value in every)

    def part(self, name: str) -> Tensor:
        """Return a tensor by its name.

        Raises
        ------
        WireError
            If it is not there.
        """
        if (value := self.tensors.get(name)) is None:
            raise WireError("missing", field=name)
        return value

    def data(self, name: str) -> bytes:
        """Return the bytes of one of the protocol's tensors.

        Raises
        ------
        WireError
            If it is not there.
        """
        return bytes(self.part(f"{SECURE}{name}").numpy())

    def to_arrays(self) -> ArrayRecord:
        """Return the one record that travels."""
        return tensors_to_arrays(self.tensors)

    @classmethod
    def from_arrays(cls, record: ArrayRecord, like: Params) -> "SecureUpload":
        """Read and check a record of bytes and words, within their limits.

        Raises
        ------
        WireError
            If a key is not one of the protocol's, or an array is unreadable or has
            another dtype; it names the key. Also if all arrays together are much larger
            than the model's curvatures; it names the largest.
        """
        limit = _FIXED + 6 * contribution_bytes(like)
        tensors = arrays_to_tensors(record, limit=limit, most=len(like) + 4)
        for key, value in tensors.items():
            if key == WORDS and value.dtype in _WORD and value.dim() == 1:
                continue
            known = key.startswith(SECURE) or is_description(key, value)
            if value.dtype != torch.uint8 or not known or key == WORDS:
                shape = tuple(value.shape)
                reason = f"{value.dtype} of shape {shape}, expected bytes or words"
                raise WireError(reason, field=key)
        if (text := tensors.get(LAYOUT)) is not None:
            read_layout(text)
        return cls(tensors)

    @staticmethod
    def total(every: Sequence["SecureUpload"]) -> tuple[Words, dict[str, Tensor]]:
        """Return the sum of masked words modulo 2**bits, and what describes them.

        All have the same layout and descriptions.
        """
        first = every[0]
        total: Words = first.part(WORDS).numpy().copy()
        for other in every[1:]:
            np.add(total, other.part(WORDS).numpy(), out=total)
        texts = {k: v for k, v in first.tensors.items() if _is_text(k)}
        return total, texts | {LAYOUT: first.part(LAYOUT)}


def rows_of(rows: Sequence[bytes]) -> Tensor:
    """Return byte strings of one length as a matrix."""
    data = np.frombuffer(bytearray(b"".join(rows)), np.uint8)
    return torch.from_numpy(data).reshape(len(rows), -1 if rows else 0)


def bytes_in(rows: Tensor) -> list[bytes]:
    """Return the byte strings of a matrix of :func:`rows_of`."""
    return [row.tobytes() for row in rows.numpy()]


def is_description(name: str, value: Tensor) -> bool:
    """Return whether bytes describe a contribution, and are sent without masks."""
    return name.endswith(("format", "digest")) and value.numel() <= _DESCRIPTION


def read_layout(text: Tensor) -> Layout:
    """Read a contribution's layout.

    Raises
    ------
    WireError
        If it is not a layout.
    """
    try:
        rows = json.loads(text.numpy().tobytes())
        layout = [(str(k), str(d), tuple(int(n) for n in s)) for k, d, s in rows]
    except Exception as error:  # untrusted text
        raise WireError(f"not a layout: {error}"[:200], field=LAYOUT) from error
    for key, dtype, shape in layout:
        known = isinstance(getattr(torch, dtype, None), torch.dtype)
        if not known or len(shape) > _DIMENSIONS or min(shape, default=0) < 0:
            reason = f"not a layout: {dtype:.40} of shape {shape} for {key}"
            raise WireError(reason[:200], field=LAYOUT)
    return layout


def _is_text(key: str) -> bool:
    return key == LAYOUT or not key.startswith(SECURE)


def _content(name: str, value: Tensor) -> str:
    if _is_text(name):
        return value.numpy().tobytes().decode(errors="replace")
    # The number of remaining neighbours differs between clients.
    return f"{value.dtype} {'' if name == SHARES else tuple(value.shape)}"


@dataclass(frozen=True)
class Contribution:
    """A client's contribution: its reply's tensors; all but descriptions are summed.

    Parameters
    ----------
    tensors : dict[str, Tensor]
        The tensors of the reply. In place of the model's integers, such as the counters
        of batch norms, they are the steps from those that the server sent: so integers
        that no client changes are exact in the sum, as in a plain mean.
    weight : float, optional
        The tensors are multiplied by it, and it is summed, too. With None they are not
        multiplied.
    bound : int, optional
        An exponent that holds for every client, and so reveals nothing about this one.
    noise : float
        The noise's standard deviation, in multiples of the norm to which it is clipped.
    index : int, default -1
        The sum in which the client sent its exponents, or -1.
    """

    tensors: dict[str, Tensor]
    weight: float | None = None
    bound: int | None = None
    noise: float = 0.0
    index: int = -1

    @classmethod
    def of(cls, reply: Message, metric: str | None, sent: Params) -> "Contribution":
        """Return what a client's reply contributes to a sum, weighted by a metric.

        Raises
        ------
        ClientError
            If it has not one ``ArrayRecord``, or an array that cannot be summed, or no
            weight where one is needed.
        """
        tensors = arrays_to_tensors(arrays_of(reply))
        for name, value in tensors.items():
            if metric and name in sent and not value.is_floating_point():
                tensors[name] = value.long() - sent[name].long()
            elif value.dtype == torch.uint8 and not is_description(name, value):
                raise ClientError(
                    f"'{name}' is packed, and packed uploads cannot be summed: pass "
                    "codec='lossless' to the strategy"
                )
        if metric is None:
            return cls(tensors)
        records = reply.content.metric_records.values()
        metrics = {name: value for record in records for name, value in record.items()}
        weight = metrics.get(metric)
        if not isinstance(weight, int | float) or not weight > 0:
            raise ClientError(f"the reply's metrics need a positive number '{metric}'")
        return cls(tensors, float(weight))

    def bounded(self, sent: Params, norm: float, deviation: float) -> "Contribution":
        """Return the clipped update with noise, with weight 1.

        Parameters
        ----------
        sent : Mapping[str, Tensor]
            Floats that are subtracted from those with the same names. Integers stay as
            they were sent.
        norm : float
            The largest Euclidean norm of all tensors together.
        deviation : float
            The noise's standard deviation.

        Raises
        ------
        ParamsError
            If it is not finite.
        """
        floats = {
            name: value.double() - sent[name].double() if name in sent else value
            for name, value in self.tensors.items()
            if value.is_floating_point()
        }
        noised = with_noise(clipped(floats, norm), deviation)
        # Descriptions are sent as they are, and integers do not move.
        tensors = {
            name: value if value.dtype == torch.uint8 else torch.zeros_like(value)
            for name, value in self.tensors.items()
        }
        tensors |= {k: v.to(tensors[k].dtype) for k, v in noised.items()}
        return Contribution(tensors, 1.0, exponent_for(norm, deviation))

    def entries(self) -> dict[str, Tensor]:
        """Return what is summed, before it is multiplied by the weight."""
        entries = {k: v for k, v in self.tensors.items() if v.dtype != torch.uint8}
        if self.weight is not None:
            entries[NUM_EXAMPLES] = torch.ones((), dtype=torch.float64)
        return entries

    def weighted(self) -> dict[str, Tensor]:
        """Return what is summed, in float64."""
        factor = 1.0 if self.weight is None else self.weight
        return {name: value.double() * factor for name, value in self.entries().items()}

    def descriptions(self) -> dict[str, Tensor]:
        """Return the descriptions, which must be equal for all clients."""
        return {k: v for k, v in self.tensors.items() if v.dtype == torch.uint8}

    def layout(self) -> Layout:
        """Return keys, dtypes and shapes of the entries."""
        return [
            (name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
            for name, value in self.entries().items()
        ]

    def exponents(self) -> list[int]:
        """Return each entry's exponent."""
        return [
            exponent_of(name, value)
            if self.bound is None or name == NUM_EXAMPLES
            else self.bound
            for name, value in self.weighted().items()
        ]

    def words(self, fixed: FixedPoint, exponents: Sequence[int]) -> Words:
        """Return all entries as residues.

        Raises
        ------
        ClientError
            If an entry is too large for the sum. It names the tensor.
        """
        entries = zip(self.weighted().values(), exponents, strict=True)
        return np.concatenate([fixed.words(value, e) for value, e in entries])
