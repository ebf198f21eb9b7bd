"""What TCT's clients upload once features are fixed: sums, a number, or weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.errors import WireError
from flwr_fisher.params import Params
from flwr_fisher.wire.arrays import arrays_to_tensors, tensors_to_arrays

__all__ = [
    "TCT",
    "TangentUpload",
    "bytes_of",
    "read_local_weight",
    "read_moments",
    "read_spectrum",
    "text_from",
]

TCT = "tct/"  # before the names of everything that is not the network's
_DIGEST, _HEAD = "digest", "head"
_SLACK = 4096  # bytes of headers an array
_LONGEST = 1024  # bytes of a name
_MOST_CLASSES = 2**20

Check = Callable[[dict[str, Tensor], Params], None]


@dataclass(frozen=True)
class TangentUpload:
    """Tensors about one client's features.

    Parameters
    ----------
    tensors : dict[str, Tensor]
        By name; they travel under ``tct/<name>``.
    digest : str
        Of what the features are: clients whose digests differ cannot work together.
    """

    disagrees = (TCT, "has other features (p, seed, head, network) than most clients'")

    tensors: dict[str, Tensor]
    digest: str

    def layout(self) -> tuple[str, ...]:
        """Return what clients must have in common."""
        facts = [f"features {self.digest}"]
        for name, value in self.tensors.items():
            shape = "x".join(map(str, value.shape))
            facts.append(f"{name}[{shape}]" if shape else name)
        if _HEAD in self.tensors:
            facts.append(f"head {text_from(self.tensors[_HEAD])!r}")
        if "num-classes" in self.tensors:
            facts.append(f"{int(self.tensors['num-classes'])} classes")
        return tuple(facts)

    def only(self, names: Params) -> "TangentUpload":
        """Return itself: there are no parameters among the tensors."""
        return self

    def to_arrays(self) -> ArrayRecord:
        """Return the one record that travels."""
        named = {**self.tensors, _DIGEST: bytes_of(self.digest)}
        return tensors_to_arrays({f"{TCT}{k}": v for k, v in named.items()})


def read_moments(num_features: int) -> "partial[TangentUpload]":
    """Return what reads features' moments, of at most that many features.

    They are ``mean`` and ``m2`` ``[p]`` in float64, ``count``, ``num-classes``, and
    ``head``, the name of the replaced layer.
    """
    f64, i64 = torch.float64, torch.int64
    p = None
    wanted = {
        "mean": (f64, (p,)),
        "m2": (f64, (p,)),
        "count": (i64, ()),
        "num-classes": (i64, ()),
        _HEAD: (torch.uint8, (p,)),
    }
    limit = 16 * num_features + _LONGEST
    check = partial(_check_moments, num_features)
    return partial(_read, wanted=wanted, limit=limit, check=check)


def read_spectrum() -> "partial[TangentUpload]":
    """Return what reads ``largest-eigenvalue``, one float64."""
    wanted = {"largest-eigenvalue": (torch.float64, ())}
    return partial(_read, wanted=wanted, limit=8, check=_check_spectrum)


def read_local_weight(record: ArrayRecord, like: Params) -> TangentUpload:
    """Read ``weight``, like the ``tct/weight`` that was sent out."""
    sent = like[f"{TCT}weight"]
    wanted = {"weight": (sent.dtype, tuple(sent.shape))}
    return _read(record, like, wanted=wanted, limit=sent.nbytes)


def bytes_of(text: str) -> Tensor:
    """Return a text as a tensor of its UTF-8 bytes.

    Examples
    --------
    >>> text_from(bytes_of("fc3"))
    'fc3'
    """
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def text_from(tensor: Tensor) -> str:
    """Return the text; a ``UnicodeDecodeError``, a ``ValueError``, if it is none."""
    return bytes(tensor.tolist()).decode()


def _read(
    record: ArrayRecord,
    like: Params,
    *,
    wanted: Mapping[str, tuple[torch.dtype, tuple[int | None, ...]]],
    limit: int,
    check: Check = lambda tensors, like: None,
) -> TangentUpload:
    """Read and check a record; a length that is None may be any.

    Raises
    ------
    WireError
        Naming the key that is missing, unexpected, unreadable, of another shape or
        dtype, not finite, or out of range.
    """
    room = limit + _LONGEST + _SLACK * (len(wanted) + 1)
    tensors = arrays_to_tensors(record, limit=room)
    expected = {**wanted, _DIGEST: (torch.uint8, (None,))}
    keys = {f"{TCT}{name}" for name in expected}
    if missing := keys - tensors.keys():
        raise WireError("missing", field=min(missing))
    if unknown := tensors.keys() - keys:
        raise WireError("unexpected key", field=min(unknown))
    found = {name: tensors[f"{TCT}{name}"] for name in expected}
    for name, (dtype, shape) in expected.items():
        _check_layout(name, found[name], dtype, shape)
    check(found, like)
    return TangentUpload({k: found[k] for k in wanted}, _text(found, _DIGEST))


def _check_layout(
    name: str, value: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> None:
    same = len(shape) == value.dim() and all(
        length in (None, got) for length, got in zip(shape, value.shape, strict=True)
    )
    if value.dtype != dtype or not same:
        wanted = tuple("any" if length is None else length for length in shape)
        reason = f"{value.dtype} of shape {tuple(value.shape)}, expected {dtype} "
        raise WireError(f"{reason}of shape {wanted}", field=f"{TCT}{name}")


def _check_moments(most: int, tensors: dict[str, Tensor], like: Params) -> None:
    p = len(tensors["mean"])
    if not 1 <= p <= most:
        reason = f"{p} features, and {most} were asked for"
        raise WireError(reason, field=f"{TCT}mean")
    if len(tensors["m2"]) != p:
        reason = f"{len(tensors['m2'])} entries for {p} features"
        raise WireError(reason, field=f"{TCT}m2")
    if (tensors["m2"] < 0).any():
        raise WireError("a negative sum of squares", field=f"{TCT}m2")
    for name in ("count", "num-classes"):
        if tensors[name] < 1:
            reason = f"must be positive, got {int(tensors[name])}"
            raise WireError(reason, field=f"{TCT}{name}")
    # The server makes weights for so many classes.
    head = like.get(f"{_text(tensors, _HEAD)}.weight".removeprefix("."))
    most = _MOST_CLASSES if head is None else len(head)
    if tensors["num-classes"] > most:
        reason = f"{int(tensors['num-classes'])} classes, and at most {most} can be"
        raise WireError(reason, field=f"{TCT}num-classes")


def _check_spectrum(tensors: dict[str, Tensor], like: Params) -> None:
    if tensors["largest-eigenvalue"] < 0:
        raise WireError("is negative", field=f"{TCT}largest-eigenvalue")


def _text(tensors: dict[str, Tensor], name: str) -> str:
    try:
        return text_from(tensors[name])
    except ValueError as error:
        raise WireError(f"is no text: {error}", field=f"{TCT}{name}") from error
