"""Trying something out, so that all that follows is as if it had not been tried."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flwr_fisher.randomness import seeded

_DEEP, _WIDE, _MOST = 8, 64, 10_000  # how far a loader is searched
_LEAVES = (type, ModuleType, Tensor, np.ndarray, str, bytes, int, float)
_Undo = Callable[[], object]


@contextmanager
def undisturbed(model: nn.Module, loader: object) -> Iterator[None]:
    """Leave random numbers, the model and what a loader consists of as they were.

    Generators are those of torch, NumPy and ``random``, and whichever the loader, its
    data set, sampler or transforms hold. A module's or a data set's attributes are
    bound again to what they were bound to: a file that was opened on first use is
    opened anew. What they point to may have changed; a model's buffers do not.

    Parameters
    ----------
    model : nn.Module
        Used meanwhile.
    loader : object
        Read from meanwhile.
    """
    undo = [_unbuffered(model), *(_unbound(module) for module in model.modules())]
    for part in _parts_of(loader):
        undo.append(_rewound(part))
        if hasattr(part, "__dict__") and not isinstance(part, FunctionType):
            undo.append(_unbound(part))
    try:
        with seeded(0):
            yield
    finally:
        for each in reversed(undo):
            each()


def _parts_of(loader: object) -> list[Any]:
    """Return what a loader consists of, as far as attributes and closures lead."""
    seen: dict[int, Any] = {}
    waiting: list[tuple[Any, int]] = [(loader, 0)]
    while waiting and len(seen) < _MOST:
        part, depth = waiting.pop()
        if part is None or id(part) in seen or isinstance(part, _LEAVES):
            continue
        seen[id(part)] = part
        if depth < _DEEP:
            waiting += ((each, depth + 1) for each in _within(part))
    return list(seen.values())


def _within(part: Any) -> list[Any]:
    if isinstance(part, dict):
        return list(islice(part.values(), _WIDE))
    if isinstance(part, (list, tuple)):
        return list(islice(part, _WIDE))
    if isinstance(part, partial):
        return [part.func, *part.args, *part.keywords.values()]
    if isinstance(part, MethodType):
        return [part.__self__]
    if isinstance(part, FunctionType):
        cells = part.__closure__ or ()
        return [*(_content(c) for c in cells), *(part.__defaults__ or ())]
    return list(islice(getattr(part, "__dict__", {}).values(), _WIDE))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is bound to it yet
        return None


def _rewound(part: Any) -> _Undo:
    """Return what puts a generator back; nothing, for what is none."""
    if isinstance(part, torch.Generator):
        return partial(part.set_state, part.get_state())
    if isinstance(part, np.random.Generator):
        bits = part.bit_generator
        return partial(setattr, bits, "state", bits.state)
    if isinstance(part, np.random.RandomState):
        return partial(part.set_state, part.get_state())
    if isinstance(part, random.Random) and not isinstance(part, random.SystemRandom):
        return partial(part.setstate, part.getstate())
    return lambda: None


def _unbound(part: Any) -> _Undo:
    """Return what binds an object's attributes to what they are bound to now."""
    own, before = part.__dict__, dict(part.__dict__)
    # A module's buffers and such are in dicts of their own.
    inner = [(v, dict(v)) for k, v in before.items() if k in ("_buffers", "_modules")]

    def bind() -> None:
        for entries, was in [(own, before), *inner]:
            if entries.keys() != was.keys() or any(
                entries[key] is not value for key, value in was.items()
            ):
                entries.clear()
                entries.update(was)

    return bind


def _unbuffered(model: nn.Module) -> _Undo:
    """Return what puts the values of a model's buffers back."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]

    @torch.no_grad()
    def copy() -> None:
        for buffer, value in before:
            buffer.copy_(value)

    return copy
