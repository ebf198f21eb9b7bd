"""A copy of a network with a new linear head that has one output."""

import copy
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flwr_fisher.curvature.data import Inputs
from flwr_fisher.errors import StructureError, check_known
from flwr_fisher.randomness import random_stream


def find_head(model: nn.Module, head: str | None) -> str:
    """Return the name of the layer to replace: `head`, or the last linear layer.

    Raises
    ------
    UnknownNameError
        If `head` names no linear layer. It lists these.
    StructureError
        If the model has no linear layer, or the layer shares its weight with another
        one.
    """
    modules = dict(model.named_modules())
    linear = [name for name, m in modules.items() if isinstance(m, nn.Linear)]
    if not linear:
        raise StructureError(
            "the model has no nn.Linear layer, and the last one would be its head: end "
            "the model in an nn.Linear"
        )
    name = linear[-1] if head is None else head
    check_known("linear layer for head", name, linear)
    _check_not_shared(modules, name)
    return name


def _check_not_shared(modules: dict[str, nn.Module], head: str) -> None:
    parameters = {id(p) for p in modules[head].parameters()}
    for name, module in modules.items():
        inside = not head or name == head or name.startswith(f"{head}.")
        own = {id(p) for p in module.parameters(recurse=False)}
        if not inside and parameters & own:
            raise StructureError(
                f"head '{head}' shares its parameters with layer '{name}', so it "
                "cannot be replaced alone: untie them, or pass another layer's name as "
                "head"
            )


def linear_layer(model: nn.Module, name: str) -> nn.Linear:
    """Return the linear layer of that name."""
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer


def check_called_once(head: str, calls: int) -> None:
    """Raise :class:`StructureError` unless a head was called once."""
    if calls != 1:
        raise StructureError(
            f"head '{head}' is called {calls} times in a forward pass, but it must be "
            "called once: pass the name of another layer as head"
        )


def one_output_copy(model: nn.Module, head: str, seed: int) -> nn.Module:
    """Return a copy of the model that returns its new head's output.

    What the model does after its head, such as a log-softmax (which is zero for a
    single output), is left out. Frozen parameters stay frozen; the head is trained.
    """
    network = copy.deepcopy(model)
    old = linear_layer(network, head)
    new = _fresh_head(old, seed)
    for name, module in list(network.named_modules(remove_duplicate=False)):
        if module is old and name:
            network.set_submodule(name, new)
    if head:
        _ReturnHead(network, new, head)
    return (network if head else new).eval()


def check_last(network: nn.Module, head: str, inputs: Inputs, *, named: bool) -> None:
    """Check by one call that a copied network can end in its new head.

    If the caller named the head, linear layers may be called after it.

    Raises
    ------
    StructureError
        If a linear layer is called after the head, or if what the model does after the
        head fails because there is only one output.
    """
    called: list[str] = []

    def record(name: str, *_: object) -> None:
        called.append(name)

    failure: Exception | None = None
    with ExitStack() as hooks, torch.no_grad():
        for name, module in network.named_modules():
            if isinstance(module, nn.Linear):
                hook = module.register_forward_pre_hook(partial(record, name))
                hooks.enter_context(hook)
        try:
            inputs(network)
        except (RuntimeError, IndexError) as error:
            if head not in called:
                raise
            failure = error
    if called[-1] != head and not named:
        raise StructureError(
            f"layer '{called[-1]}' is called after '{head}', the last linear layer in "
            f"the model's definition: pass head={called[-1]!r}, or another layer"
        ) from failure
    if failure is not None:
        raise StructureError(
            f"the model fails after its head '{head}' if it has one output: {failure}"
        ) from failure


def _fresh_head(old: nn.Linear, seed: int) -> nn.Linear:
    """Return a new linear layer with torch's usual distribution, drawn from `seed`."""
    with torch.random.fork_rng(devices=[]):  # its weights are drawn below
        f32 = {"device": "cpu", "dtype": torch.float32}
        new = nn.Linear(old.in_features, 1, bias=old.bias is not None, **f32)
    new.to(old.weight)
    bound = old.in_features**-0.5 if old.in_features else 0.0
    stream = random_stream(seed, "tangent", "head")
    with torch.no_grad():
        for parameter in new.parameters():
            drawn = stream.uniform(-bound, bound, tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(drawn))
    return new


class _ReturnHead:
    """A network that returns its head's output in place of its own."""

    def __init__(self, network: nn.Module, head: nn.Linear, name: str) -> None:
        self.name = name
        self.outputs: list[Tensor] = []
        network.register_forward_pre_hook(self._start)
        head.register_forward_hook(self._keep)
        network.register_forward_hook(self._replace)

    def _start(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.outputs = []

    def _keep(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self.outputs.append(output.clone())  # later layers may change it in place

    def _replace(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor:
        outputs, self.outputs = self.outputs, []
        check_called_once(self.name, len(outputs))
        return outputs[0]
