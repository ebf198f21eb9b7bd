"""A deep copy of a model; and restoring what calls of a model have changed."""

import copy
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from itertools import chain
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flwr_fisher.errors import StructureError
from flwr_fisher.params import trainable
from flwr_fisher.randomness import rewinding


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model, which holds no graph of the model's calls.

    ``copy.deepcopy`` alone refuses weights that a layer computes (``weight_norm``,
    ``prune``), and outputs that it keeps. It does not copy functions, such as hooks,
    and these would then read and change the model instead of the copy.
    """
    held = [each for module in model.modules() for each in vars(module).values()]
    tensors = [each for each in held if isinstance(each, Tensor) and not each.is_leaf]
    copies: dict[int, Any] = {id(each): each.detach().clone() for each in tensors}
    made = copy.deepcopy(model, copies)
    functions = _OwnFunctions(copies)
    for values in _reached(vars(module) for module in made.modules()):
        if isinstance(values, (dict, list)):
            pairs = values.items() if isinstance(values, dict) else enumerate(values)
            for key, value in list(pairs):
                if (own := functions.own(value)) is not value:
                    values[key] = own
    return made


class _OwnFunctions:
    """Makes functions of an original into those of its copy.

    Parameters
    ----------
    copies : dict[int, Any]
        What ``copy.deepcopy`` has copied, by the original's ``id``.
    """

    def __init__(self, copies: dict[int, Any]) -> None:
        self._copies = copies
        self._cells: dict[int, CellType] = {}

    def own(self, value: Any) -> Any:
        """Return a copy of a function if its closure holds copied objects.

        Return any other value as it is.
        """
        if not (isinstance(value, FunctionType) and value.__closure__):
            return value
        cells = tuple(map(self._own_cell, value.__closure__))
        if all(a is b for a, b in zip(cells, value.__closure__, strict=True)):
            return value
        made = FunctionType(
            value.__code__,
            value.__globals__,
            value.__name__,
            value.__defaults__,
            cells,
        )
        made.__kwdefaults__ = value.__kwdefaults__
        return made

    def _own_cell(self, cell: CellType) -> CellType:
        """Return a cell with the copy of what is in it; one for all its functions."""
        if id(cell) not in self._cells:
            self._cells[id(cell)] = cell  # of a function in its own closure
            with suppress(ValueError):  # it is empty
                before = cell.cell_contents
                now = self._copies.get(id(before), self.own(before))
                if now is not before:
                    self._cells[id(cell)] = CellType(now)
        return self._cells[id(cell)]


class KeptModel:
    """What a model's ``forward`` may change: tensors and attributes."""

    def __init__(self, model: nn.Module) -> None:
        own = _unscripted(model)
        self._attributes = [(vars(module), dict(vars(module))) for module in own]
        reached = attributes_of(model)
        self._rewind = rewinding(reached)
        for each in reached:
            if isinstance(each, np.ndarray) and each.flags.writeable:
                self._rewind.append(partial(np.copyto, each, each.copy()))
        self._containers = copies_of(reached)
        self._model, self._trained = model, trainable(model)
        classes = with_own_train(own)
        self.has_own_modes = bool(classes)
        tensors = [*self._trained.values(), *model.buffers()]
        tensors += [each for module in classes for each in module.parameters()]
        kept = {id(each): each for each in tensors}
        self._values = _copies(kept.values())
        rest = [x for x in reached if isinstance(x, Tensor) and id(x) not in kept]
        frozen = [x for x in rest if isinstance(x, nn.Parameter)]
        # A momentum encoder is as large as what is trained. What is below adapters
        # is larger, too large to copy, and no forward changes it.
        if sum(x.nbytes for x in frozen) > sum(x.nbytes for x in tensors):
            rest = [x for x in rest if not isinstance(x, nn.Parameter)]
        self._others = _copies(rest)

    def values_differ(self) -> bool:
        """Return whether a tensor has another value than before."""
        return any(x.shape != v.shape or not torch.equal(x, v) for x, v in self._values)

    def check_parameters(self) -> None:
        """Raise :class:`StructureError` if calls have made trainable parameters."""
        now = trainable(self._model)
        made = [k for k, p in now.items() if p is not self._trained.get(k)]
        if made:
            raise StructureError(
                f"the model makes its parameters {made} when it is called, so no "
                "optimizer knows of them: make them in __init__, or call the model "
                "once, on a batch, where it is made"
            )

    def restore(self) -> None:
        """Give the model's tensors and attributes their former values."""
        for now, attributes in self._attributes:
            if not _identical(now.items(), attributes.items()):
                now.clear()
                now.update(attributes)
        restore(self._containers)
        for rewind in self._rewind:
            rewind()
        _put_back([*self._values, *self._others])


def attributes_of(model: nn.Module) -> list[Any]:
    """Return the values of all attributes of a model's modules, and what they hold."""
    held = chain.from_iterable(vars(module).values() for module in _unscripted(model))
    return _reached([*held, *gradient_hooks(model)])


def _unscripted(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]


def with_own_train(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules whose class has a ``train()`` of its own.

    It may change weights, also frozen ones: loralib's merge their factors there.
    """
    return [m for m in modules if type(m).train is not nn.Module.train]


def _content(container: Any) -> Iterable[Any]:
    return container.items() if isinstance(container, dict) else container


def _identical(now: Iterable[Any], before: Iterable[Any]) -> bool:
    """Return whether two collections hold the same objects, in pairs or alone."""

    def ids(values: Iterable[Any]) -> list[Any]:
        pairs = (v if isinstance(v, tuple) and len(v) == 2 else (v, v) for v in values)
        return [(id(key), id(value)) for key, value in pairs]

    return ids(now) == ids(before)


def _copies(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(each, each.detach().clone()) for each in tensors if _may_change(each)]


def _put_back(values: Iterable[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in values:
        if tensor.shape != value.shape:  # an observer's, of quantisation
            tensor.data = value
        # On an accelerator, a comparison would wait for it.
        elif tensor.device.type != "cpu" or not torch.equal(tensor, value):
            tensor.data.copy_(value)


def hooks_of(model: nn.Module) -> list[dict[Any, Any]]:
    """Return the dicts in which a model's modules and parameters keep their hooks."""
    own = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    held = [item for module in own for item in vars(module).items()]
    of_modules = [v for k, v in held if k.endswith("_hooks") and isinstance(v, dict)]
    names = "_backward_hooks", "_post_accumulate_grad_hooks"
    found = (getattr(p, name, None) for p in model.parameters() for name in names)
    return of_modules + [each for each in found if isinstance(each, dict)]


def gradient_hooks(model: nn.Module) -> list[dict[Any, Any]]:
    """Return the dicts of hooks that read or change gradients."""
    names = "_backward_hooks", "_backward_pre_hooks"
    owners = [*model.modules(), *model.parameters()]
    held = (getattr(owner, name, None) for owner in owners for name in names)
    return [each for each in held if isinstance(each, dict)]


def copies_of(values: Iterable[Any]) -> list[tuple[Any, list[Any]]]:
    """Return what lists, dicts, sets and deques hold, for :func:`restore`.

    Also of those that they hold; other values are skipped.
    """
    return [
        (each, list(_content(each)))
        for each in _reached(values)
        if isinstance(each, (dict, list, set, deque))
    ]


def _reached(values: Iterable[Any]) -> list[Any]:
    """Return some values, and all that lists, dicts and the like among them hold."""
    reached: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if id(value) not in reached:
            reached[id(value)] = value
            if isinstance(value, dict):
                waiting += value.values()
            elif isinstance(value, (list, tuple, set, deque)):
                waiting += value
    return [*reached.values()]


def restore(copies: Iterable[tuple[Any, list[Any]]]) -> None:
    """Give lists, dicts, sets and deques what they held in :func:`copies_of`."""
    for each, before in copies:
        if not _identical(_content(each), before):
            each.clear()
            (each.extend if isinstance(each, list | deque) else each.update)(before)


def _may_change(tensor: Tensor) -> bool:
    """Return whether an operation in place can change a tensor, and is undone here."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_inference():
        return False
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    return not any(stride == 0 and size > 1 for stride, size in sizes)
