"""Evaluating a model and leaving it as it was; checks of models."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.backends import cudnn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_fisher.curvature.batch import Inputs
from flwr_fisher.errors import ConfigurationError, StructureError
from flwr_fisher.params import trainable_names
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
        another type of device.
    StructureError
        If it is a ``ScriptModule``.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise StructureError(
            "the model is a ScriptModule, and the inputs of its layers cannot be "
            "recorded: pass the nn.Module from which it was made"
        )
    names = trainable_names(model)
    if not names:
        raise ConfigurationError(
            "the model has no trainable parameter: set requires_grad on the "
            "parameters to merge"
        )
    first = model.get_parameter(names[0])
    if first.is_inference():
        raise ConfigurationError(
            "the model was made under torch.inference_mode, so its parameters cannot "
            "have gradients: make it outside of inference_mode"
        )
    actual = first.device
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
    counters, weights that it clips, attributes, and the state of global generators; and
    hooks that were left on it.
    """
    modes = {module: module.training for module in model.modules()}
    kept = _KeptModel(model)
    states = generator_states()
    try:
        model.eval()
        recurrent = recurrent_backwards(model)
        with torch.inference_mode(False), torch.enable_grad(), recurrent:
            yield
    finally:
        set_generator_states(states)
        kept.restore()
        for module, training in modes.items():
            module.training = training


class _KeptModel:
    """What a model's ``forward`` may change: its modules' attributes and tensors."""

    def __init__(self, model: nn.Module) -> None:
        own = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._attributes = [(module, dict(vars(module))) for module in own]
        held = (item for module in own for item in vars(module).items())
        self._dicts = [
            (each, dict(each))
            for name, each in held
            if name == "_buffers" or (name.endswith("_hooks") and each is not None)
        ]
        trained = [p for p in model.parameters() if p.requires_grad]
        self._values = [
            (tensor, tensor.detach().clone())
            for tensor in [*trained, *model.buffers()]
            if _may_change(tensor)
        ]

    def restore(self) -> None:
        for module, attributes in self._attributes:
            now = vars(module)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update(attributes)
        for each, before in self._dicts:
            each.clear()
            each.update(before)
        for tensor, value in self._values:
            # On an accelerator, a comparison would wait for it.
            if tensor.device.type != "cpu" or not torch.equal(tensor, value):
                tensor.data.copy_(value)


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
