"""What travels in the stages of a secure sum: bytes and masked words, by name.

``secure/session``, ``secure/keys``
    the client's own number for the sum, 8 bytes; its public keys, a row each;
``secure/sealed-shares``, ``secure/commitments``
    a row for each neighbour: sealed shares, and digests of them;
``secure/words``, ``secure/layout``
    masked residues, uint32 or uint64, of all tensors one after another, and which those
    are: JSON, equal for all clients;
``secure/shares``
    a row for each neighbour: what opens the sum.

Bytes under keys of the contribution's own that end in ``format`` or ``digest`` are sent
as they are: they describe it, and are equal for all clients.
"""

import json
import math
from dataclasses import dataclass
from typing import ClassVar, NoReturn

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.errors import WireError
from flwr_fisher.params import Params
from flwr_fisher.secure.fixed_point import Words
from flwr_fisher.wire.arrays import arrays_to_tensors, tensors_to_arrays
from flwr_fisher.wire.checks import contribution_bytes
from flwr_fisher.wire.payload import Payload

SECURE = "secure/"
WORDS, LAYOUT = f"{SECURE}words", f"{SECURE}layout"
SHARES = f"{SECURE}shares"
_SUMMED = f"{SECURE}summed"  # of an upload whose words were added up: type and number

Layout = list[tuple[str, str, tuple[int, ...]]]
"""Key, dtype and shape of each tensor of a contribution."""

_DESCRIPTION = 4096  # bytes
_TEXT = 2**20  # bytes of all that is said of a contribution
_FIXED = 2**24  # bytes of keys and shares, of some thousands of neighbours
_WORD = {torch.uint32, torch.uint64}


@dataclass(frozen=True)
class SecureUpload(Payload):
    """One stage's reply.

    Parameters
    ----------
    tensors : dict[str, Tensor]
        Bytes, and words.
    """

    disagreement: ClassVar[tuple[str, str]] = (
        SECURE.removesuffix("/"),
        "has other arrays than most clients' have",
    )

    tensors: dict[str, Tensor]

    def layout(self) -> tuple[str, ...]:
        """Return what clients must share: shapes, and texts about its contribution."""
        return tuple(
            f"{name} {_content(name, value)}"
            for name, value in sorted(self.tensors.items())
        )

    def part(self, name: str) -> Tensor:
        """Return one of the tensors.

        Raises
        ------
        WireError
            If it is not there.
        """
        if (value := self.tensors.get(name)) is None:
            raise WireError("missing", field=name)
        return value

    def without_words(self) -> "SecureUpload":
        """Return it without what was added up; its layout is still its own."""
        words = self.part(WORDS)
        kept = {k: v for k, v in self.tensors.items() if k != WORDS}
        return SecureUpload({**kept, _SUMMED: _text(f"{words.dtype} {len(words)}")})

    def texts(self) -> dict[str, Tensor]:
        """Return what is said of the contribution in keys of its own."""
        return {k: v for k, v in self.tensors.items() if not k.startswith(SECURE)}

    def to_arrays(self) -> ArrayRecord:
        """Return the one record that travels."""
        return tensors_to_arrays(self.tensors)

    @classmethod
    def from_arrays(cls, record: ArrayRecord, like: Params) -> "SecureUpload":
        """Read and check a record: bytes and words, and no more than there can be.

        Raises
        ------
        WireError
            Naming the key that is none, unreadable or of another dtype, or the largest
            array, if all together are much larger than the model's curvatures.
        """
        limit = _FIXED + 6 * contribution_bytes(like)
        tensors = arrays_to_tensors(record, limit=limit, most=len(like) + 4)
        said = 0
        for key, value in tensors.items():
            if key == WORDS and value.dtype in _WORD and value.dim() == 1:
                continue
            own = key.startswith(SECURE) or is_description(key, value)
            own = own and key != _SUMMED
            if value.dtype != torch.uint8 or not own or key == WORDS:
                shape = tuple(value.shape)
                reason = f"{value.dtype} of shape {shape}, expected bytes or words"
                raise WireError(reason, field=key)
            said += value.numel() if _is_text(key) else 0
        if said > _TEXT:
            raise WireError(f"{said} bytes of description", field=LAYOUT)
        return cls(tensors)


class WordSums:
    """The masked words of all uploads of one layout, modulo 2**bits.

    Uploads whose layout is another than most clients' are left out when all have come:
    each layout has a sum of its own.
    """

    def __init__(self) -> None:
        self._totals: dict[tuple[str, ...], Words] = {}

    def __call__(self, payload: SecureUpload, weight: float) -> SecureUpload:
        """Add an upload's words; return the rest."""
        words: Words = payload.part(WORDS).numpy()
        rest = payload.without_words()
        total = self._totals.get(rest.layout())
        if total is None:
            self._totals[rest.layout()] = words.copy()
        else:
            np.add(total, words, out=total)
        return rest

    def mean(self, uploads: object) -> NoReturn:
        """Refuse: what is masked has none."""
        raise NotImplementedError

    def of(self, payload: SecureUpload) -> Words:
        """Return the sum over all uploads of one's layout."""
        return self._totals[payload.layout()]


def is_description(name: str, value: Tensor) -> bool:
    """Return whether bytes of a contribution describe it: they are sent as they are."""
    return name.endswith(("format", "digest")) and value.numel() <= _DESCRIPTION


def layout_text(layout: Layout) -> Tensor:
    """Return a layout as bytes."""
    return _text(json.dumps(layout, separators=(",", ":")))


def _text(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def read_layout(text: Tensor) -> Layout:
    """Undo :func:`layout_text`.

    Raises
    ------
    WireError
        If it is no layout.
    """
    try:
        rows = json.loads(text.numpy().tobytes())
        return [(str(k), str(d), tuple(int(n) for n in s)) for k, d, s in rows]
    except Exception as error:  # untrusted text
        raise WireError(f"no layout: {error}"[:200], field=LAYOUT) from error


def sizes_in(layout: Layout) -> list[int]:
    """Return how many entries each tensor has."""
    return [math.prod(shape) for _, _, shape in layout]


def _is_text(key: str) -> bool:
    return key in (LAYOUT, _SUMMED) or not key.startswith(SECURE)


def _content(name: str, value: Tensor) -> str:
    if _is_text(name):
        return value.numpy().tobytes().decode(errors="replace")
    # How many neighbours are left differs from one client to another.
    shape = "" if name == SHARES else str(tuple(value.shape))
    return f"{value.dtype} {shape}"
