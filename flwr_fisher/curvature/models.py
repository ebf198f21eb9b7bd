"""Evaluating a model, which is left as it was, and where it is."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.backends import cudnn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_fisher.curvature.batch import Inputs
from flwr_fisher.curvature.kept_model import KeptModel, gradient_hooks
from flwr_fisher.devices import check_default_device
from flwr_fisher.errors import ConfigurationError, DataError, StructureError
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
        _check_has_gradients(name, parameter)
    actual = next(iter(parameters.values())).device
    if device is not None and torch.device(device).type != actual.type:
        raise ConfigurationError(
            f"device={device!s}, but the model is on {actual!s}: move the model first"
        )
    return actual


def _check_has_gradients(name: str, parameter: nn.Parameter) -> None:
    """Raise an error for a parameter without real values, or without gradients."""
    if parameter.is_complex():
        raise StructureError(
            f"'{name}' has dtype {parameter.dtype}, and this library's curvatures are "
            "of real numbers: freeze it, or keep real parameters and make the complex "
            "one of them by torch.view_as_complex"
        )
    if parameter.is_inference():
        raise ConfigurationError(
            f"the model was made under torch.inference_mode, so '{name}' cannot have "
            "gradients: make it outside of inference_mode"
        )
    if parameter.device.type == "meta":
        raise ConfigurationError(
            f"'{name}' is on the meta device, where parameters have no values: make "
            "the model on the CPU, or load its values, load_state_dict(values, "
            "assign=True)"
        )


def place_of(model: nn.Module) -> torch.device | None:
    """Return the device of a model's first parameter, or None without parameters."""
    return next((parameter.device for parameter in model.parameters()), None)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode, with gradients, in a ``with`` block; restore it.

    What its ``forward`` changes, even in eval mode, is restored, too: buffers such as
    counters, weights that it clips, attributes and the contents of their lists and
    dicts, and the states of its own and of global generators. So are hooks that were
    left on it. Hooks on gradients do not run:
    they clip what a training uses, or expect train mode, as opacus's do. What is
    compiled runs as it was written: it does not call hooks that are added later, and
    would be compiled anew for each transformation, in minutes. Embeddings' gradients
    are dense, and not scaled by frequency. Ranges for quantisation are not observed.

    Raises
    ------
    StructureError
        For an error of torch's that does not say what the model does.
    """
    modes = {module: module.training for module in model.modules()}
    kept = KeptModel(model)
    states = generator_states()
    try:
        _into_eval_mode(model, kept)
        for each in gradient_hooks(model):
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
            finally:  # also if the block fails
                kept.check_parameters()
    finally:
        set_generator_states(states)
        kept.restore()
        for module, training in modes.items():
            module.training = training


REENTRANT = (
    "calls torch.utils.checkpoint in its reentrant form, which has gradients by "
    "backward() alone: pass use_reentrant=False to checkpoint"
)
_EXPLAINED = {  # what torch says, and what the model does
    "use_reentrant=True": REENTRANT,
    "backward through the graph a second time": (
        "keeps a tensor with a gradient from call to call, such as a weight that it "
        "computes once in eval mode: compute it in each call, or keep its detach()"
    ),
    "inside a function being vmapped": (
        "keeps a tensor from call to call, such as a hidden state: begin each call of "
        "forward from the same state"
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


@contextmanager
def refusing_batches_of_one(which: str) -> Iterator[None]:
    """Raise :class:`DataError` where a batch norm in train mode gets one example.

    Parameters
    ----------
    which : str
        How the error's sentence begins, such as "the last batch has".
    """
    try:
        yield
    except ValueError as error:
        if TOO_FEW not in str(error):
            raise
        raise DataError(
            f"{which} one example, on which batch norm cannot train: pass "
            "DataLoader(..., drop_last=True), or another batch_size"
        ) from error


def is_frozen(norm: _BatchNorm) -> bool:
    """Return whether a norm has parameters, none of which is trained."""
    own = list(norm.parameters(recurse=False))
    return bool(own) and not any(p.requires_grad for p in own)


def _eager() -> AbstractContextManager[object]:
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; importing it is slow
        return nullcontext()
    eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


def _into_eval_mode(model: nn.Module, kept: KeptModel) -> None:
    """Call the model's ``eval()``, and undo what it does to weights.

    Some layers merge their low-rank factors into a frozen weight there (loralib's), and
    then these have no gradient. ``train()`` takes them out again.
    """
    unmerged: KeptModel | None = None
    try:
        if kept.has_own_modes:
            model.train()
            unmerged = KeptModel(model)
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
        observes = getattr(module, "observer_enabled", None)  # in eval mode, too
        if isinstance(observes, Tensor):
            observes.zero_()  # a range for quantisation, as a norm its statistics


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
