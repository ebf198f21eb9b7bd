"""A user's loop: its arguments, what it leaves on the model, and its metrics."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flwr_fisher.curvature.kept_model import copies_of, hooks_of, restore
from flwr_fisher.errors import ClientError, ConfigurationError, plain
from flwr_fisher.log_lines import logger
from flwr_fisher.params import trainable, trainable_names
from flwr_fisher.wire.options import (
    LONGEST_NAME,
    MOST_METRICS,
    MOST_NUMBERS,
    NUM_EXAMPLES,
)

_OF_JOBS = 10  # metrics that jobs add to a loop's
_DEVICE = 2  # the device's place in the calls of loops
# Prefixes of DataParallel, of torch.compile and of opacus's GradSampleModule.
WRAPPERS = ("module.", "_orig_mod.", "_module.")


def check_loop(name: str, loop: Any) -> None:
    """Raise :class:`ConfigurationError` for a loop that takes other arguments.

    Many a Flower app has a ``train(net, trainloader, epochs, device)``.
    """
    try:
        call = signature(loop)
    except (TypeError, ValueError):
        return  # None, and built-in functions, have no signature
    # Required keywords are for jobs, such as `checkpoint`.
    places = [n for n, p in call.parameters.items() if p.kind is not p.KEYWORD_ONLY]
    positional = call.replace(parameters=[call.parameters[n] for n in places])
    try:
        positional.bind(*range(4))
        fits = "device" not in places or places.index("device") == _DEVICE
    except TypeError:
        fits = False
    if not fits:
        raise ConfigurationError(
            f"{name} is called with (model, loader, device, config), but "
            f"{name_of(loop)} takes {call}: pass lambda model, loader, device, config: "
            f"{name_of(loop)}(...), with the arguments in your order"
        )


@contextmanager
def left_as_known(model: nn.Module, loop: object) -> Iterator[None]:
    """Undo what a loop, run in a ``with`` block, changed on a model beside values.

    The model is then as the server knows it. It has its former dtypes, modes and
    trained parameters, whatever a loop made of them. Hooks that the loop left, the
    attributes with their handles, and a ``forward`` of the object's own are removed,
    because the server's model has none. This is done even if the loop fails.

    Raises
    ------
    ClientError
        If the model has other parameters than before.
    """
    shapes = _shapes(model)
    kept = {name: (t.dtype, t.requires_grad) for name, t in _tensors(model).items()}
    hooks, modules = copies_of(hooks_of(model)), _states(model)
    try:
        yield
    finally:
        restore(hooks)
        known = {id(held) for held, _ in hooks}
        for held in hooks_of(model):  # a parameter's first hook makes a dict
            if id(held) not in known:
                held.clear()
        for module, (training, before) in modules.items():
            module.training = training
            _restore_attributes(vars(module), before)
        _restore_tensors(model, kept)
    _check_shapes(shapes, model, loop)


def _restore_tensors(
    model: nn.Module, kept: Mapping[str, tuple[torch.dtype, bool]]
) -> None:
    """Give tensors the dtypes that they had, and train those that were trained."""
    for name, tensor in _tensors(model).items():
        dtype, trained = kept.get(name, (tensor.dtype, tensor.requires_grad))
        if tensor.dtype != dtype or tensor.is_inference():
            tensor.data, tensor.grad = tensor.detach().clone().to(dtype), None
        if tensor.requires_grad != trained:
            tensor.requires_grad_(trained)


def _states(model: nn.Module) -> dict[nn.Module, tuple[bool, dict[str, Any]]]:
    """Return the modes and attributes of a model's modules."""
    return {m: (m.training, dict(vars(m))) for m in model.modules()}


def _restore_attributes(now: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Restore a module's own ``forward``, and take new handles of hooks away.

    With a new ``forward``, the private attributes that came with it are removed, too:
    accelerate would not prepare a model again that it has marked as prepared.
    """
    patched = now.get("forward") is not before.get("forward")
    for name in now.keys() - before.keys():
        held = now[name] if isinstance(now[name], (list, tuple)) else [now[name]]
        handles = held and all(isinstance(each, RemovableHandle) for each in held)
        if handles or name == "forward" or (patched and name.startswith("_")):
            del now[name]
    if patched and "forward" in before:
        now["forward"] = before["forward"]


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _check_shapes(
    before: Mapping[str, torch.Size], model: nn.Module, loop: object
) -> None:
    """Raise :class:`ClientError` if a loop has left other parameters in the model."""
    now = _shapes(model)
    lost = [name for name, shape in before.items() if now.get(name) != shape]
    new = [name for name in trainable_names(model) if name not in before]
    if lost or new:
        changes = [f"without {lost[:4]} as it was"] if lost else []
        changes += [f"with the new {new[:4]}"] if new else []
        raise ClientError(
            f"{name_of(loop)} has left the model {' and '.join(changes)}, and the "
            "server's model has no such change: undo it at the end of the loop, for "
            "example by remove_parametrizations, prune.remove or merge_and_unload"
        )


def check_is_not_another(returned: object, model: nn.Module) -> None:
    """Raise :class:`ClientError` if a loop returns a trained copy of the model."""
    own, trained = model.state_dict(), trainable(model).keys()
    for part in returned if isinstance(returned, (tuple, list)) else [returned]:
        state = part.state_dict() if isinstance(part, nn.Module) else part
        if not isinstance(state, Mapping):
            continue
        theirs = {_without_wrapper(str(name)): value for name, value in state.items()}
        if trained <= theirs.keys() and not all(
            torch.equal(torch.as_tensor(theirs[name]).to(own[name]), own[name])
            for name in own.keys() & theirs.keys()
        ):
            raise ClientError(
                f"train_fn returned another model ({type(part).__name__}) than the one "
                "that it was given, and only this one is uploaded: train it in place, "
                "or end with model.load_state_dict(trained.state_dict())"
            )


def _without_wrapper(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper)
    return name


def name_of(function: object) -> str:
    """Return a function's name, or that of an object's class."""
    return str(getattr(function, "__name__", type(function).__name__))


def takes(function: Callable[..., object], keyword: str, *, or_any: bool) -> bool:
    """Return whether a function has this keyword, or takes any keyword."""
    try:
        parameters = signature(function).parameters
    except ValueError:  # built-in functions have no signature
        return or_any
    kinds = {parameter.kind for parameter in parameters.values()}
    return keyword in parameters or (or_any and Parameter.VAR_KEYWORD in kinds)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def checked_metrics(returned: object, loop: str) -> dict[str, Any]:
    """Return metrics that Flower's records can hold: numbers and lists of numbers.

    Numbers and arrays with one axis from NumPy and torch are converted, and None counts
    as no metrics. Anything else is left out with a warning, so that the training is not
    lost.

    Examples
    --------
    >>> checked_metrics({"loss": torch.tensor(0.5), "late": True}, "train_fn")
    {'loss': 0.5, 'late': 1}
    """
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        logger.warning(
            "%s returned %.80r, which is no dict of metrics: ignoring it",
            loop,
            returned,
        )
        return {}
    metrics: dict[str, Any] = {}
    for key, value in returned.items():
        number = plain(value)
        if isinstance(number, list) and all(map(_is_number, number)):
            metrics[str(key)] = _of_one_kind(number)
        elif key == NUM_EXAMPLES and not (
            _is_number(number) and 0 <= number < math.inf
        ):
            raise ClientError(
                f"{loop} returned 'num-examples': {value!r:.80}, but it must be a "
                "number >= 0"
            )
        elif _is_number(number):
            metrics[str(key)] = int(number) if isinstance(number, bool) else number
        else:
            logger.warning(
                "Ignoring a metric that %s returned, which is no number: %.40r: %.80r",
                loop,
                key,
                value,
            )
    return _within_limits(metrics, loop)


def _within_limits(metrics: Mapping[str, Any], loop: str) -> dict[str, Any]:
    """Return the metrics that a server takes; the log says what is left out."""
    kept, numbers = dict[str, Any](), 0
    for name, value in metrics.items():
        length = len(value) if isinstance(value, list) else 0
        room = len(kept) < MOST_METRICS - _OF_JOBS and numbers + length <= MOST_NUMBERS
        if name == NUM_EXAMPLES or (room and len(name) <= LONGEST_NAME):
            kept[name], numbers = value, numbers + length
    if others := [name for name in metrics if name not in kept]:
        logger.warning(
            "Ignoring %d metrics that %s returned, such as %.40r: a server takes at "
            "most %d, with names of %d characters, and %d numbers in lists",
            len(others),
            loop,
            others[0],
            MOST_METRICS - _OF_JOBS,
            LONGEST_NAME,
            MOST_NUMBERS,
        )
    return kept


def _is_number(value: object) -> bool:
    """Return whether a record can hold this number."""
    return isinstance(value, float) or (
        isinstance(value, int) and -(2**63) <= value < 2**63
    )


def _of_one_kind(numbers: Sequence[Any]) -> list[Any]:
    """Return a list of integers only, or of floats only, as records need it."""
    whole = all(isinstance(number, int) for number in numbers)
    return [int(number) if whole else float(number) for number in numbers]
