"""Digests of functions and objects, which are the same in every process.

A client may reuse a training that was finished before a crash only if the same request
would run the same training. So it compares digests of all of the training's arguments.
A function's digest depends on its name, code, defaults and closure, and on the
constants and functions that it looks up. An object's digest depends on its class and on
what pickle would save. An object without a digest is an error. Modules of Python, torch
and this library count by name. Other globals that a function looks up, such as data,
count by type: they are assumed not to have changed.
"""

import copyreg
import json
import sys
from collections.abc import Iterator
from functools import cached_property, partial, reduce
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flwr_fisher.files import digest_of

_LIBRARIES = {"torch", "torchvision", "numpy", "flwr", "flwr_fisher"}
_LIBRARIES |= sys.stdlib_module_names
_INSTALLED = ("site-packages", "dist-packages")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
_SKIPPED = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__"}
_SKIPPED |= {"__firstlineno__", "__static_attributes__"}
_MOST, _MOST_BYTES, _SMALL = 100_000, 2**30, 2**20


class UndescribedError(Exception):
    """An object has no digest that is the same in a later process."""


def described(value: object, name: str) -> str:
    """Return a digest of an object or function, the same in every process.

    Parameters
    ----------
    value : object
        A function, a ``partial``, an object, or plain data. An object that has a method
        ``settings`` is described by its class and the mapping that this returns.
    name : str
        What it is called, for the error.

    Raises
    ------
    UndescribedError
        If it holds a lock, a file, a generator or something similar, or too much.

    Examples
    --------
    >>> def train(model, epochs): ...
    >>> one, same, other = (partial(train, epochs=n) for n in (30, 30, 1))
    >>> described(one, "train_fn") == described(same, "train_fn")
    True
    >>> described(one, "train_fn") == described(other, "train_fn")
    False
    """
    try:
        return digest_of(_Description().of(value))
    except Exception as error:  # an object's own methods may raise anything
        raise UndescribedError(
            f"{name} cannot be compared with one in a later process ({error}): give it "
            "a method settings() that returns what its result depends on, or use only "
            "plain values and functions in it"
        ) from error


class _Description:
    """Walks through a value; an object that it meets again counts by its number."""

    def __init__(self) -> None:
        # Objects are kept alive, so that no other one gets their id.
        self.seen: dict[int, tuple[int, object]] = {}
        self.count = self.num_bytes = 0

    def of(self, value: Any) -> list[Any]:
        self.count += 1
        if self.count > _MOST:
            raise ValueError(f"it has more than {_MOST} parts")
        if type(value) in _PLAIN:
            return [type(value).__name__, repr(value)]
        if _is_array(value):
            return self._array(value)
        if type(value) is tuple:  # may be one constant, or two that are equal
            return ["tuple", *map(self.of, value)]
        if id(value) in self.seen:
            return ["again", self.seen[id(value)][0]]
        self.seen[id(value)] = len(self.seen), value
        if type(value) is list:
            return ["list", *map(self.of, value)]
        if type(value) is dict:
            return ["dict", *([self.of(k), self.of(v)] for k, v in value.items())]
        if type(value) in (set, frozenset):  # in an order that depends on the process
            parts = [json.dumps(_Description().of(each)) for each in value]
            return [type(value).__name__, *sorted(parts)]
        if isinstance(value, ModuleType):
            return ["module", value.__name__]
        if isinstance(value, CodeType):
            return self._code(value)
        if isinstance(value, (FunctionType, type)) and _is_library(value):
            return ["named", value.__module__, value.__qualname__]
        if isinstance(value, FunctionType):
            return self._function(value)
        return self._class(value) if isinstance(value, type) else self._object(value)

    def looked_up(self, value: Any) -> list[Any]:
        """Describe the globals that a function or a class looks up."""
        if isinstance(value, (staticmethod, classmethod)):
            return [type(value).__name__, self.looked_up(value.__func__)]
        if isinstance(value, property):
            parts = (value.fget, value.fset, value.fdel)
            return ["property", *map(self.looked_up, parts)]
        if isinstance(value, cached_property):
            return ["property", self.looked_up(value.func)]
        if isinstance(value, (FunctionType, type)) and _is_installed(value):
            return ["named", value.__module__, value.__qualname__]
        kinds = (FunctionType, ModuleType, type, partial)
        if isinstance(value, kinds) or _is_small(value):
            return self.of(value)
        return ["some", type(value).__module__, type(value).__qualname__]

    def _array(self, value: Any) -> list[Any]:
        self.num_bytes += value.nbytes
        if self.num_bytes > _MOST_BYTES:
            raise ValueError(f"it holds more than {_MOST_BYTES} bytes")
        if isinstance(value, np.ndarray):
            content = digest_of(value.tobytes().hex())
            return ["array", str(value.dtype), list(value.shape), content]
        return ["tensor", value.requires_grad, digest_of("", {"": value})]

    def _function(self, value: FunctionType) -> list[Any]:
        names = sorted(_names(value.__code__) & value.__globals__.keys())
        return [
            *("function", value.__module__, value.__qualname__),
            self._code(value.__code__),
            self.of(value.__defaults__),
            self.of(value.__kwdefaults__),
            [self.of(cell.cell_contents) for cell in value.__closure__ or ()],
            [[name, self.looked_up(value.__globals__[name])] for name in names],
            self.of(vars(value)),
        ]

    def _code(self, code: CodeType) -> list[Any]:
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
        return [
            code.co_code.hex(),
            code.co_flags,
            code.co_exceptiontable.hex(),
            *([*some] for some in (*names, counts)),
            *map(self.of, code.co_consts),
        ]

    def _class(self, value: type) -> list[Any]:
        own = {k: v for k, v in vars(value).items() if k not in _SKIPPED}
        return [
            *("class", value.__module__, value.__qualname__),
            [self.looked_up(base) for base in value.__bases__],
            [[name, self.looked_up(member)] for name, member in own.items()],
        ]

    def _object(self, value: Any) -> list[Any]:
        if callable(getattr(type(value), "settings", None)):
            return ["object", self.of(type(value)), self.of(dict(value.settings()))]
        saved: Any = copyreg.dispatch_table.get(type(value))
        reduced = saved(value) if saved else value.__reduce_ex__(4)
        if isinstance(reduced, str):
            wrapped = self.of(getattr(value, "__wrapped__", None))
            return ["named", f"{getattr(value, '__module__', '')}", reduced, wrapped]
        parts = [list(p) if isinstance(p, Iterator) else p for p in reduced]
        return ["object", *map(self.of, parts)]


def _is_array(value: Any) -> bool:
    """Return whether it is an array of numbers, not of objects."""
    numbers = isinstance(value, np.ndarray) and not value.dtype.hasobject
    return numbers or isinstance(value, Tensor)


def _is_small(value: Any) -> bool:
    """Return whether it is a setting, not data: plain, or made of plain parts."""
    if _is_array(value):
        return bool(value.nbytes <= _SMALL)
    if type(value) is dict:
        return _is_small([*value.keys(), *value.values()])
    if type(value) in (list, tuple, set, frozenset):
        return len(value) <= _SMALL // 1024 and all(map(_is_small, value))
    return type(value) in (*_PLAIN, torch.dtype, torch.device)


def _names(code: CodeType) -> set[str]:
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*inner)


def _is_library(value: Any) -> bool:
    """Return whether a library defines it under its name."""
    if str(value.__module__).partition(".")[0] not in _LIBRARIES:
        return False
    path = [sys.modules.get(str(value.__module__)), *value.__qualname__.split(".")]
    return reduce(lambda a, b: getattr(a, b, None), path) is value


def _is_installed(value: Any) -> bool:
    file = getattr(sys.modules.get(str(value.__module__)), "__file__", None) or ""
    return any(folder in file for folder in _INSTALLED)
