"""The state of a loader: it is kept while the library reads the loader."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch.utils.data import DataLoader

from flwr_fisher.randomness import GENERATORS, set_state_of, state_of

# Attributes of a loader, and of its parts, that are read with it.
_SAMPLERS = ("sampler", "batch_sampler")
_DATA = ("dataset", "datasets", "loader", "transform", "target_transform", "transforms")
_LISTS = ("datasets", "transforms")


@contextmanager
def loader_kept(loader: Iterable[Any]) -> Iterator[None]:
    """Restore a loader's :class:`LoaderState` after a ``with`` block that reads it.

    An iterator of persistent workers, which a user's own loop has begun, goes on
    afterwards: a new one would begin it anew. Where there was none, there is none
    afterwards: it draws a number when it is made, and not again.
    """
    state = LoaderState(loader)
    held = [(own, own.get("_iterator")) for own in state.parts]
    kept = [(own, it) for own, it in held if it is None or _is_begun(it)]
    for own, iterator in kept:
        if iterator is not None:
            own["_iterator"] = None
    try:
        yield
    finally:
        state.restore()
        for own, iterator in kept:
            if own.get("_iterator") is not iterator:
                own["_iterator"] = iterator


class LoaderState:
    """The state of a loader that reading changes: its generators and counters.

    The generators are those of the loader, of its samplers, and of its data sets and
    their transforms. The numbers are a sampler's, such as an epoch that it counts.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.parts, self._counting = _parts(loader)
        held = (value for own in self.parts for value in own.values())
        self._generators = [each for each in held if isinstance(each, GENERATORS)]
        self._states = list(map(state_of, self._generators))
        self._names = list(map(set, self._counting))
        self._numbers = list(map(_numbers, self._counting))

    def restore(self) -> None:
        """Give the loader the state that it had when this object was made."""
        self._put_back(self._states, self._numbers)
        for own, names in zip(self._counting, self._names, strict=True):
            for name in _numbers(own).keys() - names:
                del own[name]  # the class's own number holds again

    def changes(self) -> dict[str, Any]:
        """Return what has changed since then, to be saved for another process."""
        numbers = [
            {k: v for k, v in _numbers(own).items() if before.get(k) != v}
            for own, before in zip(self._counting, self._numbers, strict=True)
        ]
        return {"generators": list(map(state_of, self._generators)), "numbers": numbers}

    def apply(self, changes: Mapping[str, Any]) -> None:
        """Make the changes that :meth:`changes` returned for a loader of this kind.

        Raises
        ------
        ValueError
            If it was of another kind.
        """
        self._put_back(changes["generators"], changes["numbers"])

    def _put_back(
        self, states: Sequence[Any], numbers: Sequence[Mapping[str, Any]]
    ) -> None:
        pairs = list(zip(self._generators, states, strict=True))
        for own, values in zip(self._counting, numbers, strict=True):
            own.update(values)
        for generator, state in pairs:
            set_state_of(generator, state)


def _parts(loader: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the attributes of a loader and its parts, and of those that may count."""
    parts, counting = dict[int, Any](), list[Any]()
    waiting: list[tuple[str, Any]] = [("sampler", loader)]
    while waiting:
        kind, part = waiting.pop()
        own = getattr(part, "__dict__", None)
        if not isinstance(own, dict) or id(part) in parts:
            continue
        parts[id(part)] = own
        counting += [own] if kind in _SAMPLERS else []
        waiting += [(name, own.get(name)) for name in (*_SAMPLERS, *_DATA)]
        lists = [x for name in _LISTS if isinstance(x := own.get(name), (list, tuple))]
        waiting += [("dataset", each) for each in chain.from_iterable(lists)]
        inner = chain.from_iterable(map(_loaders_in, own.values()))
        waiting += [("loader", each) for each in inner]
    return [*parts.values()], counting


def _loaders_in(value: Any) -> list[Any]:
    """Return the loaders that an attribute holds: itself, or in a list or a dict."""
    some = value if isinstance(value, (list, tuple)) else [value]
    some = list(value.values()) if isinstance(value, dict) else some
    return [*some] if some and isinstance(some[0], DataLoader) else []


def _numbers(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object's numbers; none if it holds an iterator, which has gone on."""
    if any(isinstance(value, Iterator) for value in own.values()):
        return {}
    return {k: v for k, v in own.items() if isinstance(v, (int, float))}


def _is_begun(iterator: Any) -> bool:
    """Return whether a loader's workers have given some of their batches, not all."""
    names = "_num_yielded", "_tasks_outstanding"
    return all(getattr(iterator, name, 0) for name in names)
