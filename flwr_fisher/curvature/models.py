"""Evaluating a model and leaving it as it was; checks of models.

Long: what an evaluation keeps, restores and checks of a model is all here.
"""

import copy
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.backends import cudnn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_fisher.curvature.batch import Inputs
from flwr_fisher.curvature.sums import within
from flwr_fisher.devices import check_default_device
from flwr_fisher.errors import ConfigurationError, StructureError
from flwr_fisher.params import trainable
from flwr_fisher.randomness import (
    generator_states,
    rewinding,
    seeded,
    set_generator_states,
)


def device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Return the device where the model is.

    Parameters
    ----------
    model : nn.Module
        The model.
    device : torch.device | str | None
        Where the caller believes the model to be; None if the caller does not say.

    Returns
    -------
    torch.device
        The device of the first trainable parameter.

    Raises
    ------
    ConfigurationError
        If the model has no trainable parameter, was made under inference mode, or is on
        another type of device, or on the meta device.
    ParamsError
        If a layer is still lazy.
    StructureError
        If it is or has a ``ScriptModule``, or a trainable complex parameter.
    """
    check_default_device()
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise StructureError(
                f"{f'layer {name!r}' if name else 'the model'} is a ScriptModule, and "
                "the inputs of its layers cannot be recorded: pass the nn.Module from "
                "which it was made"
            )
    parameters = trainable(model)
    if not parameters:
        raise ConfigurationError(
            "the model has no trainable parameter: set requires_grad on the "
            "parameters to merge"
        )
    for name, parameter in parameters.items():
        if parameter.is_complex():
            raise StructureError(
                f"'{name}' has dtype {parameter.dtype}, and this library's curvatures "
                "are of real numbers: freeze it, or keep real parameters and make the "
                "complex one of them by torch.view_as_complex"
            )
        if parameter.is_inference():
            raise ConfigurationError(
                f"the model was made under torch.inference_mode, so '{name}' cannot "
                "have gradients: make it outside of inference_mode"
            )
        if parameter.device.type == "meta":
            raise ConfigurationError(
                f"'{name}' is on the meta device, where parameters have no values: "
                "make the model on the CPU, or load its values, "
                "load_state_dict(values, assign=True)"
            )
    actual = next(iter(parameters.values())).device
    if device is not None and torch.device(device).type != actual.type:
        raise ConfigurationError(
            f"device={device!s}, but the model is on {actual!s}: move the model first"
        )
    return actual


def place_of(model: nn.Module) -> torch.device | None:
    """Return the device of a model's first parameter, or None without parameters."""
    return next((parameter.device for parameter in model.parameters()), None)


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model, which holds no graph of the model's calls.

    ``copy.deepcopy`` alone refuses weights that a layer computes (``weight_norm``,
    ``prune``), and outputs that it keeps. It leaves functions as they are, such as
    hooks, which then change and read the model where they should the copy.
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


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode, with gradients, in a ``with`` block; restore it.

    What its ``forward`` changes, even in eval mode, is restored, too: buffers such as
    counters, weights that it clips, attributes and what is in their lists and dicts
    (tensors of a vmap are of no use after it), also in place, the states of its own and
    of global generators, and hooks that were left on it. Hooks on gradients do not run:
    they clip what a training uses, or expect train mode, as opacus's do. What is
    compiled runs as it was written: it does not call hooks that are added later, and
    would be compiled anew for each transformation, in minutes. Embeddings' gradients
    are dense, and not scaled by frequency.

    Raises
    ------
    StructureError
        For an error of torch's that does not say what the model does.
    """
    modes = {module: module.training for module in model.modules()}
    kept = _KeptModel(model)
    states = generator_states()
    try:
        _into_eval_mode(model, kept)
        for each in _gradient_hooks(model):
            each.clear()
        recurrent = recurrent_backwards(model)
        with torch.inference_mode(False), torch.enable_grad(), recurrent, _eager():
            try:
                yield
            except RuntimeError as error:
                for said, what in _EXPLAINED.items():
                    if said in str(error):
                        raise StructureError(f"the model {what}") from error
                raise
            finally:  # what the block fails for, too
                kept.check_parameters()
    finally:
        set_generator_states(states)
        kept.restore()
        for module, training in modes.items():
            module.training = training


_EXPLAINED = {  # what torch says, and what the model does
    "use_reentrant=True": (
        "calls torch.utils.checkpoint in its reentrant form, which has gradients by "
        "backward() alone: pass use_reentrant=False to checkpoint"
    ),
    "backward through the graph a second time": (
        "keeps a tensor with a gradient from call to call, such as a weight that it "
        "computes once in eval mode: compute it in each call, or keep its detach()"
    ),
    "inference tensor": (
        "was made under torch.inference_mode: make it outside of inference_mode"
    ),
}


TOO_FEW = "Expected more than 1 value per channel"  # torch, of a batch of one example


def into_train_mode(model: nn.Module) -> None:
    """Put a model in train mode, but for frozen norms; :func:`evaluating` restores it.

    Their own statistics are a part of a pre-trained network.
    """
    model.train()
    for module in model.modules():
        if isinstance(module, _BatchNorm) and is_frozen(module):
            module.eval()


def is_frozen(norm: _BatchNorm) -> bool:
    """Return whether a norm has parameters, none of which is trained."""
    own = list(norm.parameters(recurse=False))
    return bool(own) and not any(p.requires_grad for p in own)


def _eager() -> AbstractContextManager[object]:
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; importing it is slow
        return nullcontext()
    eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


def _into_eval_mode(model: nn.Module, kept: "_KeptModel") -> None:
    """Call the model's ``eval()``, and undo what it does to weights.

    Some layers merge their low-rank factors into a frozen weight there (loralib's), and
    then these have no gradient. ``train()`` takes them out again.
    """
    unmerged: _KeptModel | None = None
    try:
        if kept.has_own_modes:
            model.train()
            unmerged = _KeptModel(model)
        model.eval()
    except NotImplementedError as error:
        raise StructureError(
            f"the model, a {type(model).__name__}, has no eval mode (as what "
            "torch.export makes): pass the nn.Module from which it was made"
        ) from error
    if unmerged is not None and unmerged.values_differ():
        unmerged.restore()
        for module in model.modules():
            module.training = False
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = module.scale_grad_by_freq = False


class _KeptModel:
    """What a model's ``forward`` may change: tensors and attributes."""

    def __init__(self, model: nn.Module) -> None:
        own = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._attributes = [(vars(module), dict(vars(module))) for module in own]
        held = chain.from_iterable(each.values() for _, each in self._attributes)
        reached = _reached([*held, *_gradient_hooks(model)])
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
        return not all(_same(tensor, value) for tensor, value in self._values)

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
        for now, attributes in self._attributes:
            if not _identical(now.items(), attributes.items()):
                now.clear()
                now.update(attributes)
        restore(self._containers)
        for rewind in self._rewind:
            rewind()
        _put_back([*self._values, *self._others])


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


def _same(tensor: Tensor, value: Tensor) -> bool:
    return tensor.shape == value.shape and torch.equal(tensor, value)


def hooks_of(model: nn.Module) -> list[dict[Any, Any]]:
    """Return the dicts in which a model's modules and parameters keep their hooks."""
    own = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    held = [item for module in own for item in vars(module).items()]
    of_modules = [v for k, v in held if k.endswith("_hooks") and isinstance(v, dict)]
    names = "_backward_hooks", "_post_accumulate_grad_hooks"
    found = (getattr(p, name, None) for p in model.parameters() for name in names)
    return of_modules + [each for each in found if isinstance(each, dict)]


def _gradient_hooks(model: nn.Module) -> list[dict[Any, Any]]:
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


def outputs_with(
    model: nn.Module, state: Mapping[str, Tensor], inputs: Inputs
) -> Tensor:
    """Return a model's outputs with other parameters or buffers than its own.

    Each replaces the model's own tensor under all of its names. A module with several
    names is replaced once: ``functional_call`` would replace it several times, and in
    the end restore a tensor that it had put there itself.

    Parameters
    ----------
    model : nn.Module
        The model, which is left as it was.
    state : Mapping[str, Tensor]
        By the names of ``named_parameters`` and ``named_buffers``.
    inputs : Inputs
        The inputs of the call.
    """
    if not state:
        return inputs(model)
    own = {id(p): n for n, p in [*model.named_parameters(), *model.named_buffers()]}
    places = {}
    for prefix, module in model.named_modules():
        # Not by methods, which a class may have of its own.
        tensors = {**module._parameters, **module._buffers}
        for name, tensor in tensors.items():
            if own.get(id(tensor)) in state:
                place = f"{prefix}.{name}" if prefix else name
                places[place] = state[own[id(tensor)]]

    def called(*args: object, **kwargs: object) -> object:
        return functional_call(model, places, args, kwargs, tie_weights=False)

    return inputs(called)


@contextmanager
def recurrent_backwards(model: nn.Module) -> Iterator[None]:
    """Turn cuDNN off: it cannot differentiate recurrent layers in eval mode."""
    before = cudnn.enabled
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        cudnn.enabled = False
    try:
        yield
    finally:
        cudnn.enabled = before


def check_examples_are_independent(model: nn.Module, consequence: str) -> None:
    """Raise unless every batch norm of the model has running statistics.

    Parameters
    ----------
    model : nn.Module
        The model, which is used in eval mode.
    consequence : str
        What cannot be computed otherwise; a clause for the error message.

    Raises
    ------
    StructureError
        If a batch norm uses its batch's own statistics.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise StructureError(
                f"layer '{name}' normalises by the statistics of each batch, so "
                f"{consequence}: use track_running_stats=True, or group norm"
            )


_LEAST = 0.05  # relative: far above the rounding of other kernels, TF32's too
_EQUAL = 1e-3  # of the same kernels


def check_outputs_have_rows(inputs: Inputs, outputs: Tensor) -> None:
    """Raise unless each example has a row of outputs, with gradients.

    Parameters
    ----------
    inputs : Inputs
        Several examples.
    outputs : Tensor
        What the model returned for them, with gradients.

    Raises
    ------
    StructureError
        If outputs have another first dimension, or depend on no trainable parameter.
    """
    n = len(inputs)
    if outputs.shape[:1] != (n,):
        raise StructureError(
            f"the model's outputs have shape {tuple(outputs.shape)} for {n} examples, "
            "but must have a row for each: undo what joins examples with something "
            "else, outputs.unflatten(0, (n, -1)) for example, in the model or in an "
            "output_fn; inputs must have the examples first, too"
        )
    if not (outputs.requires_grad and outputs.is_floating_point()):
        raise StructureError(
            "the model's outputs depend on no trainable parameter, or not by real "
            "numbers, so they have no gradient: return logits, before any argmax() or "
            "detach(), and without torch.no_grad"
        )


def check_examples_do_not_mix(
    model: nn.Module, inputs: Inputs, outputs: Tensor
) -> None:
    """Raise unless an example's outputs are its own.

    Parameters
    ----------
    model : nn.Module
        In eval mode. It is called again; a graph of its outputs may be of no use then.
    inputs : Inputs
        Several examples.
    outputs : Tensor
        What the model returned for them.

    Raises
    ------
    StructureError
        If outputs depend on the other examples of a batch; or if the model takes no
        other number of examples, because of what it keeps of former calls.

    Notes
    -----
    Where outputs differ from call to call, by random numbers or by what the model
    remembers, nothing is known of other examples.
    """
    try:
        alone = inputs[:1](model)
    except Exception as error:  # a model may take no single example
        _check_keeps_nothing(model, inputs, error)
        return
    if not _near(alone, outputs[:1]) and _near(inputs(model), outputs):
        raise StructureError(
            "the model's outputs of an example depend on the other examples of its "
            "batch, in eval mode, too, so an example has no gradient of its own: use "
            "nothing that is of the whole batch, such as x.mean(0)"
        )


def _check_keeps_nothing(model: nn.Module, inputs: Inputs, error: Exception) -> None:
    """Raise unless a model's outputs are the same in each call, but for randomness."""
    outputs = []
    for _ in range(2):
        with seeded(0):
            outputs.append(inputs(model))
    if not _near(outputs[1], outputs[0], _EQUAL):
        raise StructureError(
            f"the model fails on another number of examples ({error}), and its outputs "
            "of the same ones differ from call to call: it keeps something, such as a "
            "hidden state. Begin each call of forward from the same state"
        ) from error


def _near(found: Tensor, wanted: Tensor, least: float = _LEAST) -> bool:
    """Return whether outputs are equal, or not finite."""
    if found.shape != wanted.shape:
        return False
    tolerance = max(least, 16 * torch.finfo(wanted.dtype).eps)
    near = within(tolerance, found, wanted)
    return bool(near | ~wanted.isfinite().all())


_SAID = (
    *("not implemented", "not been implemented", "does not support", "forward AD"),
    *("jvp", "vmap", "functorch", "torch.func", "torch.utils.checkpoint"),
    # vmap: the memory of a wrapped tensor, and a GRU's and LSTM's own steps.
    *("Cannot access", "the broadcast shape"),
)


def is_refusal(error: RuntimeError) -> bool:
    """Return whether an error says that torch does not support a transformation.

    Examples
    --------
    >>> is_refusal(RuntimeError("vmap: we don't support .item()"))
    True
    >>> is_refusal(RuntimeError("CUDA out of memory"))
    False
    """
    return isinstance(error, NotImplementedError) or any(s in str(error) for s in _SAID)
