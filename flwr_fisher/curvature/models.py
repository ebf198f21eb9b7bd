"""A model while it is evaluated: its modes, its device, and checks of its outputs."""

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.backends import cudnn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_fisher.curvature.data import Inputs
from flwr_fisher.devices import check_default_device
from flwr_fisher.errors import ConfigurationError, StructureError
from flwr_fisher.params import trainable, widened

TOO_FEW = "Expected more than 1 value per channel"  # torch, of a batch of one example
_OWN = (
    "use nothing in forward that is of the whole batch, such as x.mean(0), its fixed "
    "size, or a batch norm with track_running_stats=False"
)
_ALONE = 0.05  # relative: far above the rounding of other kernels, TF32's too


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's trainable parameters.

    Raises
    ------
    ConfigurationError
        If there are none, or they are on several devices.
    ParamsError
        If a layer is still lazy.
    StructureError
        If one is complex.
    """
    check_default_device()
    if not (parameters := trainable(model)):
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
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        raise ConfigurationError(
            f"the model is on {sorted(map(str, devices))}: move it to one device, "
            "model.to(device)"
        )
    return devices.pop()


def place_of(model: nn.Module) -> torch.device | None:
    """Return the device of a model's first parameter, or None without parameters."""
    return next((parameter.device for parameter in model.parameters()), None)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode, with gradients, in a ``with`` block.

    The modules' modes are afterwards as before. Nothing else changes: gradients are
    computed by ``torch.autograd.grad``, which leaves ``.grad`` alone, and no buffer
    changes in eval mode. What is compiled runs as it was written, since it would be
    compiled anew for each derivative.
    """
    modes = {module: module.training for module in model.modules()}
    # An embedding with a largest norm shortens its rows when it looks them up.
    embeddings = [m for m in modes if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    tables = [m.weight.data for m in embeddings if m.max_norm is not None]
    before = [table.clone() for table in tables]
    model.eval()
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            _without_cudnn_for_recurrent(model),
            _eager(),
        ):
            yield
    finally:
        # A module may do more in train(): loralib's adapters leave the weight again.
        model.train(modes[model])
        for module, training in modes.items():
            module.training = training
        for table, own in zip(tables, before, strict=True):
            table.copy_(own)


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Put a model in train mode, in a ``with`` block within :func:`evaluating`.

    Its batch norms normalise by each batch. Frozen norms stay in eval mode: their
    running statistics are a part of a pre-trained network.
    """
    model.train()
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    for norm in norms:
        norm.training = not is_frozen(norm)
    with by_batch_statistics([norm for norm in norms if norm.training]):
        yield


@contextmanager
def by_batch_statistics(norms: Collection[_BatchNorm]) -> Iterator[None]:
    """Let batch norms normalise by each batch, in a ``with`` block.

    Their running statistics stay as they are. For a block within :func:`evaluating`,
    which restores the modes.
    """
    tracking = {norm: norm.track_running_stats for norm in norms}
    for norm in norms:
        norm.training, norm.track_running_stats = True, False
    try:
        yield
    finally:
        for norm, tracks in tracking.items():
            norm.track_running_stats = tracks


def is_frozen(norm: _BatchNorm) -> bool:
    """Return whether a norm has parameters, none of which is trained."""
    parameters = list(norm.parameters(recurse=False))
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def _eager() -> AbstractContextManager[object]:
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; importing it is slow
        return nullcontext()
    eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


@contextmanager
def _without_cudnn_for_recurrent(model: nn.Module) -> Iterator[None]:
    """Turn cuDNN off: it cannot differentiate recurrent layers in eval mode."""
    before = cudnn.enabled
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        cudnn.enabled = False
    try:
        yield
    finally:
        cudnn.enabled = before


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
    names = {id(p): n for n, p in [*model.named_parameters(), *model.named_buffers()]}
    replaced = {}
    for prefix, module in model.named_modules():
        # Not by methods, which a class may have of its own.
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if names.get(id(tensor)) in state:
                key = f"{prefix}.{name}" if prefix else name
                replaced[key] = state[names[id(tensor)]]

    def called(*args: object, **kwargs: object) -> object:
        return functional_call(model, replaced, args, kwargs, tie_weights=False)

    return inputs(called)


def check_outputs(outputs: Tensor, n: int) -> None:
    """Raise unless each of n examples has a row of outputs, with a gradient.

    Raises
    ------
    StructureError
        If outputs have another first dimension, or depend on no trainable parameter.
    """
    if outputs.shape[:1] != (n,):
        raise StructureError(
            f"the model's outputs have shape {tuple(outputs.shape)} for {n} examples, "
            "but must have a row for each: undo in the model what joins examples, for "
            "example by outputs.unflatten(0, (n, -1)); inputs must have the examples "
            "first, too"
        )
    if not (outputs.requires_grad and outputs.is_floating_point()):
        raise StructureError(
            "the model's outputs depend on no trainable parameter, or not by real "
            "numbers, so they have no gradient: return logits, before any argmax() or "
            "detach(), and without torch.no_grad"
        )


def check_rows(model: nn.Module, inputs: Inputs, outputs: Tensor) -> None:
    """Raise unless each example's row of outputs depends on this example alone.

    The first example alone shows what depends on any other one, and every second one
    without the others what depends on the examples before.

    Parameters
    ----------
    model : nn.Module
        In eval mode.
    inputs : Inputs
        Some examples.
    outputs : Tensor
        What the model returned for them.

    Raises
    ------
    StructureError
        If outputs depend on the other examples of a batch or on former calls.
    """
    n = len(inputs)
    parts = [slice(1), slice(1, None, 2)][:n]
    try:
        again = [inputs[rows](model).detach() for rows in parts]
    except (RuntimeError, ValueError) as error:
        raise StructureError(
            f"the model takes {n} examples, but fails on fewer ({error}): {_OWN}"
        ) from error
    together = widened(outputs.detach()).reshape(n, -1)
    most = _ALONE * together.norm(dim=1).mean()
    pairs = [(own, together[rows]) for rows, own in zip(parts, again, strict=True)]
    same = all(own.shape == (len(rows), *outputs.shape[1:]) for own, rows in pairs)
    if same:  # a GPU waits once; NaN shows nothing
        apart = [widened(own).view_as(rows) - rows for own, rows in pairs]
        same = not (torch.cat(apart).norm(dim=1) > most).any()
    if not same:
        raise StructureError(
            "the model's outputs of an example depend on the other examples of its "
            "batch, or on former calls, in eval mode, too, so an example has no "
            f"gradient of its own: {_OWN}, and begin each call from the same state"
        )
