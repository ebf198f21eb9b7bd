"""A copy of a network that ends in a fresh linear layer with one output."""

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from flwr_fisher.errors import ConfigurationError, StructureError, UnknownNameError

__all__ = ["check_last", "find_head", "linear_layer", "one_output_copy", "stream"]


def find_head(model: nn.Module, head: str | None) -> str:
    """Return the name of the layer to replace: `head`, or the last linear layer.

    Parameters
    ----------
    model : nn.Module
        The network.
    head : str | None
        What the caller calls it; None takes the ``nn.Linear`` that is defined last.

    Raises
    ------
    ConfigurationError
        If `head` names no layer, or one that is not linear.
    StructureError
        If the model has no linear layer, or shares this one's weight with another.
    """
    modules = dict(model.named_modules())
    linear = [name for name, m in modules.items() if isinstance(m, nn.Linear)]
    if not linear:
        raise StructureError(
            "the model has no nn.Linear, and features are gradients of a network whose "
            "last linear layer is replaced: end the model in one"
        )
    if head is not None and head not in modules:
        raise UnknownNameError("head", head, linear)
    if head is not None and head not in linear:
        raise ConfigurationError(
            f"head={head!r} is a {type(modules[head]).__name__}, and only an nn.Linear "
            f"can be replaced by one with a single output: {', '.join(linear)}"
        )
    found = linear[-1] if head is None else head
    _check_not_shared(modules, found)
    return found


def _check_not_shared(modules: dict[str, nn.Module], head: str) -> None:
    own = {id(p) for p in modules[head].parameters()}
    for name, module in modules.items():
        inside = not head or name == head or name.startswith(f"{head}.")
        if inside or own.isdisjoint(id(p) for p in module.parameters(recurse=False)):
            continue
        raise StructureError(
            f"head '{head}' shares its parameters with layer '{name}', so it cannot be "
            "replaced alone: untie them, or pass another layer's name as head"
        )


def linear_layer(model: nn.Module, name: str) -> nn.Linear:
    """Return the linear layer of that name, which is there."""
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer


def one_output_copy(model: nn.Module, head: str, seed: int) -> nn.Module:
    """Return a copy of the model that returns what its new head returns.

    Whatever the model does behind its head, such as a log-softmax (of one output always
    zero), has no part in it. Frozen parameters stay frozen; the head is trained.

    Raises
    ------
    StructureError
        If a layer normalises by its batch's own statistics.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise StructureError(
                f"layer '{name}' normalises by the batch's own statistics, so an "
                "example has no features of its own: use track_running_stats=True, or "
                "group norm"
            )
    network = copy.deepcopy(model)
    old = linear_layer(network, head)
    new = _fresh_head(old, seed)
    for name, module in list(network.named_modules(remove_duplicate=False)):
        if module is old and name:
            network.set_submodule(name, new)
    if head:
        _Answer(network, new, head)
    return (network if head else new).eval()


def check_last(network: nn.Module, head: str, inputs: Tensor, *, named: bool) -> None:
    """Raise :class:`StructureError` unless the head is where the network can end.

    No linear layer may be called after it, unless the caller `named` it, and nothing
    behind it may fail for want of its other outputs.
    """
    called: list[str] = []

    def note(name: str, module: nn.Module) -> RemovableHandle:
        return module.register_forward_pre_hook(lambda *_: called.append(name))

    linear = [(n, m) for n, m in network.named_modules() if isinstance(m, nn.Linear)]
    handles = [note(name, module) for name, module in linear]
    failure: Exception | None = None
    try:
        with torch.no_grad():
            network(inputs)
    except (RuntimeError, IndexError) as error:
        if head not in called:
            raise
        failure = error
    finally:
        for handle in handles:
            handle.remove()
    if called[-1] != head and not named:
        raise StructureError(
            f"layer '{called[-1]}' is called after '{head}', the last linear layer in "
            f"the model's definition: pass head={called[-1]!r}, or the name that you "
            "mean"
        ) from failure
    if failure is not None:
        raise StructureError(
            f"what the model does behind its head '{head}' fails when that has a single"
            f" output: {failure}"
        ) from failure


def _fresh_head(old: nn.Linear, seed: int) -> nn.Linear:
    """Return a layer with ``nn.Linear``'s usual distribution, drawn from `seed`."""
    new: nn.Linear = nn.utils.skip_init(  # type: ignore[no-untyped-call]
        nn.Linear,
        old.in_features,
        1,
        bias=old.bias is not None,
        device=old.weight.device,
        dtype=old.weight.dtype,
    )
    bound = old.in_features**-0.5 if old.in_features else 0.0
    generator = stream(seed, "head")
    with torch.no_grad():
        for parameter in new.parameters():
            drawn = generator.uniform(-bound, bound, tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(drawn))
    return new


def stream(seed: int, name: str) -> np.random.Generator:
    """Return one of a seed's streams; NumPy's, which no version of torch changes."""
    return np.random.Generator(np.random.PCG64(list(f"{seed}/tangent/{name}".encode())))


class _Answer:
    """Makes a network return its head's output in place of its own."""

    def __init__(self, network: nn.Module, head: nn.Linear, name: str) -> None:
        self.name = name
        self.seen: list[Tensor] = []
        network.register_forward_pre_hook(self._start)
        head.register_forward_hook(self._see)
        network.register_forward_hook(self._answer)

    def _start(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.seen = []

    def _see(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self.seen.append(output.clone())  # which nothing changes in place later on

    def _answer(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor:
        seen, self.seen = self.seen, []
        if len(seen) != 1:
            raise StructureError(
                f"head '{self.name}' is called {len(seen)} times in a forward pass, "
                "and the layer to replace must be called exactly once: pass another "
                "one's name as head"
            )
        return seen[0]
