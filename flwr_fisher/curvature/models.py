"""Evaluating a model and leaving it as it was; checks of models.

Long: what an evaluation keeps, restores and checks of a model is all here.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cudnn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_fisher.curvature.batch import Inputs
from flwr_fisher.curvature.sums import within
from flwr_fisher.errors import ConfigurationError, StructureError
from flwr_fisher.params import trainable
from flwr_fisher.randomness import generator_states, set_generator_states


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
    first = next(iter(parameters.values()))
    if first.is_inference():
        raise ConfigurationError(
            "the model was made under torch.inference_mode, so its parameters cannot "
            "have gradients: make it outside of inference_mode"
        )
    actual = first.device
    if actual.type == "meta":
        raise ConfigurationError(
            "the model is on the meta device, where parameters have no values: make it "
            "on the CPU, or load its values, load_state_dict(values, assign=True)"
        )
    if device is not None and torch.device(device).type != actual.type:
        raise ConfigurationError(
            f"device={device!s}, but the model is on {actual!s}: move the model first"
        )
    return actual


def place_of(model: nn.Module) -> torch.device | None:
    """Return the device of a model's first parameter, or None without parameters."""
    return next((parameter.device for parameter in model.parameters()), None)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode, with gradients, in a ``with`` block; restore it.

    What its ``forward`` changes, even in eval mode, is restored, too: buffers such as
    counters, weights that it clips, attributes that are tensors (which of a vmap are
    of no use after it), and the state of global generators; and hooks that were left on
    it. Hooks on gradients do not run: they clip what a training uses, or expect train
    mode, as opacus's do. What is compiled runs as it was written: it does not call
    hooks that are added later, and would be compiled anew for each transformation, in
    minutes. Embeddings' gradients are dense, and not scaled by frequency.
    """
    modes = {module: module.training for module in model.modules()}
    kept = _KeptModel(model)
    states = generator_states()
    try:
        for each in _gradient_hooks(model):
            each.clear()
        _into_eval_mode(model)
        recurrent = recurrent_backwards(model)
        with torch.inference_mode(False), torch.enable_grad(), recurrent, _eager():
            yield
    finally:
        set_generator_states(states)
        kept.restore()
        for module, training in modes.items():
            module.training = training


def _eager() -> AbstractContextManager[object]:
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; importing it is slow
        return nullcontext()
    eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


def _into_eval_mode(model: nn.Module) -> None:
    try:
        model.eval()
    except NotImplementedError as error:
        raise StructureError(
            f"the model, a {type(model).__name__}, has no eval mode (as what "
            "torch.export makes): pass the nn.Module from which it was made"
        ) from error
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = module.scale_grad_by_freq = False


_OF_LOOKUPS = ("sparse", "scale_grad_by_freq")  # which `evaluating` sets


class _KeptModel:
    """What a model's ``forward`` may change: tensors, also those in attributes."""

    def __init__(self, model: nn.Module) -> None:
        own = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._attributes = [(module, dict(vars(module))) for module in own]
        every = [*hooks_of(model), *(vars(module)["_buffers"] for module in own)]
        self._dicts = copies_of([*every, *_gradient_hooks(model)])
        trained = [p for p in model.parameters() if p.requires_grad]
        self._values = [
            (tensor, tensor.detach().clone())
            for tensor in [*trained, *model.buffers()]
            if _may_change(tensor)
        ]

    def restore(self) -> None:
        for module, attributes in self._attributes:
            now = vars(module)
            for name, value in list(now.items()):
                if isinstance(value, Tensor):
                    del now[name]
            kept = attributes.items()
            now.update((k, v) for k, v in kept if k not in now or k in _OF_LOOKUPS)
        restore(self._dicts)
        for tensor, value in self._values:
            if tensor.shape != value.shape:  # an observer's, of quantisation
                tensor.data = value
            # On an accelerator, a comparison would wait for it.
            elif tensor.device.type != "cpu" or not torch.equal(tensor, value):
                tensor.data.copy_(value)


def hooks_of(model: nn.Module) -> list[dict[Any, Any]]:
    """Return the dicts in which a model's modules keep their hooks."""
    own = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    held = [item for module in own for item in vars(module).items()]
    return [v for k, v in held if k.endswith("_hooks") and isinstance(v, dict)]


def _gradient_hooks(model: nn.Module) -> list[dict[Any, Any]]:
    """Return the dicts of hooks that read or change gradients."""
    names = "_backward_hooks", "_backward_pre_hooks"
    owners = [*model.modules(), *model.parameters()]
    held = (getattr(owner, name, None) for owner in owners for name in names)
    return [each for each in held if isinstance(each, dict)]


def copies_of(dicts: Iterable[dict[Any, Any]]) -> list[tuple[dict[Any, Any], ...]]:
    """Return dicts with copies, for :func:`restore`."""
    return [(each, dict(each)) for each in dicts]


def restore(copies: Iterable[tuple[dict[Any, Any], ...]]) -> None:
    """Give dicts the entries that they had in :func:`copies_of`."""
    for each, before in copies:
        each.clear()
        each.update(before)


def _may_change(tensor: Tensor) -> bool:
    """Return whether an operation in place can change a tensor, and is undone here."""
    if tensor.layout != torch.strided or tensor.is_inference():
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
        tensors = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, tensor in tensors:
            if own[id(tensor)] in state:
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


def check_outputs_are_of_examples(
    model: nn.Module, inputs: Inputs, outputs: Tensor
) -> None:
    """Raise unless each example has outputs of its own, with gradients.

    Parameters
    ----------
    model : nn.Module
        In eval mode, with gradients.
    inputs : Inputs
        Several examples.
    outputs : Tensor
        What the model returned for them.

    Raises
    ------
    StructureError
        If outputs have another first dimension, depend on no trainable parameter, or on
        the other examples of a batch.
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
    check_examples_do_not_mix(model, inputs, outputs)


def check_examples_do_not_mix(
    model: nn.Module, inputs: Inputs, outputs: Tensor
) -> None:
    """Raise :class:`StructureError` if outputs depend on the batch's other examples.

    Where outputs differ from call to call, by random numbers or by what the model
    remembers, nothing is known of other examples.

    Parameters
    ----------
    model, inputs
        As for :func:`check_outputs_are_of_examples`.
    outputs : Tensor
        What the model returned for them, with a row for each.
    """
    try:
        alone = inputs[:1](model)
    except Exception:  # a model may take no single example
        return
    if not _near(alone, outputs[:1]) and _near(inputs(model), outputs):
        raise StructureError(
            "the model's outputs of an example depend on the other examples of its "
            "batch, in eval mode, too, so an example has no gradient of its own: use "
            "nothing that is of the whole batch, such as x.mean(0)"
        )


def _near(found: Tensor, wanted: Tensor) -> bool:
    """Return whether outputs are equal, or not finite."""
    if found.shape != wanted.shape:
        return False
    tolerance = max(_LEAST, 16 * torch.finfo(wanted.dtype).eps)
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
