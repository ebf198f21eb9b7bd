"""Codecs of uploads, and the container in which packed tensors travel.

A server requests a codec, and an upload says which it has. In Flower, each array of a
record takes about 450 bytes of overhead; in a safetensors file, each entry takes 80. So
a packed upload is one array: such a file. Its entry ``curvature/format`` names, in
JSON, the version and the codec of the others.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import ArrayLike, NDArray
from safetensors.numpy import load
from safetensors.torch import save

from flwr_fisher.errors import ConfigurationError, WireError, check_known, printable
from flwr_fisher.options import Options, option
from flwr_fisher.params import Params
from flwr_fisher.wire.arrays import (
    FORMAT_VERSION,
    bytes_in_one_array,
    check_count,
    check_size,
    read_arrays,
    read_description,
)
from flwr_fisher.wire.layout import FORMAT

_NAMES = ("auto", "fedavg", "lossless")
PACKED = "packed"
_ENTRY = 64  # bytes of JSON around an entry's name and three numbers
_DESCRIPTION = 256
_FRAME = 16  # the header's length, and padding
_LENGTH = 8  # bytes of the number that gives the header's length
_PARTS = 4  # entries per parameter, at most: its own, and a block's
_HEADER = 4096  # bytes per parameter: its own entry and a curvature's, with long names


class Codec(Options):
    """A codec: how a client packs its upload.

    Raises
    ------
    ConfigurationError
        If the name is unknown, the budget is out of range, or ``lossless`` has one.

    Examples
    --------
    >>> Codec(), Codec("fedavg", budget=0.75)
    (Codec(name='auto', budget=None), Codec(name='fedavg', budget=0.75))
    """

    name: str = option(
        default="auto",
        says="``fedavg`` packs an upload into FedAvg's bytes; ``lossless`` sends plain "
        "arrays. ``auto`` is ``fedavg``, or ``lossless`` for a model so small that the "
        "headers alone exceed the budget.",
        choices=_NAMES,
        kw_only=False,
    )
    budget: float | None = option(
        default=None,
        says="The size of a packed upload in multiples of FedAvg's upload, which is "
        "the same parameters in float32. Keys, scales and headers count. None: 1. "
        "``auto`` with a budget is ``fedavg`` with this budget.",
        low=1e-3,
        high=1e3,
        kw_only=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name == "lossless" and self.budget is not None:
            raise ConfigurationError(
                "codec 'lossless' takes no budget: leave budget out, or use 'fedavg'"
            )
        if self.name == "auto" and self.budget is not None:
            object.__setattr__(self, "name", "fedavg")
        if self.name == "fedavg" and self.budget is None:
            object.__setattr__(self, "budget", 1.0)

    @classmethod
    def of(cls, name: str, value: "str | Codec | None") -> "Codec":
        """Return the codec that an argument gives: an object, or a codec's name."""
        if isinstance(value, str):
            check_known(name, value, _NAMES)
            return cls(value)
        return super().of(name, value)

    def to_options(self) -> dict[str, str | int | float]:
        """Return the config that requests this codec."""
        budget = {"codec-budget": float(self.budget)} if self.budget else {}
        return {"codec": self.name, "codec-version": FORMAT_VERSION, **budget}

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "Codec":
        """Return the codec that a server requests, by default ``lossless``.

        Raises
        ------
        ConfigurationError
            If the server requests a format that this version does not write, or a
            number is out of range.
        """
        if "codec" not in options:
            return LOSSLESS
        if (version := options.get("codec-version")) != FORMAT_VERSION:
            raise ConfigurationError(
                f"the server asks for version {printable(version)} of the upload "
                f"format, but this client writes version {FORMAT_VERSION}: install "
                "the same version of flwr-fisher on both"
            )
        return cls(str(options["codec"]), budget=options.get("codec-budget"))

    def describe(self) -> dict[str, Any]:
        """Return the description of the codec that an upload carries."""
        return {"version": FORMAT_VERSION, "name": self.name, "budget": self.budget}

    def check_description(self, text: ArrayLike | None, *, field: str) -> None:
        """Raise :class:`WireError` unless an upload's description names this codec."""
        received = read_description(text, field)
        if received != (requested := self.describe()):
            other = {k: v for k, v in requested.items() if received.get(k) != v}
            raise WireError(f"the server requested another codec: {other}", field=field)


LOSSLESS = Codec("lossless")


# --- the container


def container_bytes(sizes: Mapping[str, int]) -> int:
    """Return an upper bound of a container's size, from its entries' sizes by key."""
    total = sum(sizes.values())
    digits = 3 * len(str(total + 1000))
    head = sum(_ENTRY + len(json.dumps(key)) + digits for key in sizes)
    size = _FRAME + _ENTRY + len(FORMAT) + digits + _DESCRIPTION + head + total
    return bytes_in_one_array(PACKED, size)


def to_container(entries: Params) -> ArrayRecord:
    """Return a record with one array that holds all entries.

    Parameters
    ----------
    entries : Mapping[str, Tensor]
        One-dimensional tensors of uint8. The entry ``curvature/format`` describes the
        others.
    """
    tensors = {k: v.cpu() for k, v in entries.items()}
    return ArrayRecord({PACKED: Array(np.frombuffer(save(tensors), np.uint8))})


def from_container(
    record: ArrayRecord, *, limit: int, count: int
) -> dict[str, NDArray[np.uint8]]:
    """Return the entries of an untrusted record.

    Raises
    ------
    WireError
        If it has more than `limit` bytes, is not a container, has other entries than
        bytes, or has a header that is too long for a model of `count` parameters.
    """
    if list(record) != [PACKED]:
        keys = ", ".join(map(repr, list(record)[:3]))[:120]
        reason = f"expected this key alone, got {keys}"
        if PACKED not in record:
            reason += ": the server wants a packed Fisher, as fisher_arrays(...) makes"
        raise WireError(reason, field=PACKED)
    check_size(record, limit)
    data = read_arrays(record, {PACKED: (torch.uint8, (None,))})[PACKED]
    # A parsed header takes far more memory than its bytes.
    length = int.from_bytes(data[:_LENGTH].numpy().tobytes(), "little")
    if length > _HEADER * (count + 1):
        raise WireError(f"a header of {length} bytes", field=PACKED)
    try:
        entries: dict[str, NDArray[np.uint8]] = load(data.numpy().tobytes())
    except Exception as error:  # untrusted bytes can raise anything
        raise WireError(f"not a container: {error}"[:200], field=PACKED) from error
    check_count(entries, _PARTS * count + 1, PACKED)
    for key, entry in entries.items():
        if entry.dtype != np.uint8 or entry.ndim != 1:
            raise WireError("not an array of bytes", field=key)
    return entries
