"""The default device, what an accelerator can compute, and copies from it.

No other file asks torch for the accelerator: a CUDA or XPU GPU, or another one that
:mod:`torch.accelerator` knows.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from flwr_fisher.errors import ConfigurationError

CPU = torch.device("cpu")
T = TypeVar("T")


def accelerator() -> torch.device | None:
    """Return the accelerator that this process may use, or None."""
    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_accelerator()


def default_device() -> torch.device:
    """Return the accelerator if it computes in float64, or else the CPU.

    Examples
    --------
    >>> has_float64(default_device())
    True
    """
    device = accelerator()
    return device if device is not None and has_float64(device) else CPU


@contextmanager
def defaults_kept() -> Iterator[None]:
    """Restore torch's default dtype and device, grad mode and autocast after a block.

    A client's process does other clients' work afterwards.
    """
    dtype, device = torch.get_default_dtype(), _default_device()
    grad = torch.is_grad_enabled()
    kinds = {"cpu", own.type if (own := accelerator()) else "cpu"}
    autocast = {kind: torch.is_autocast_enabled(kind) for kind in kinds}
    try:
        yield
    finally:
        for kind, enabled in autocast.items():
            torch.set_autocast_enabled(kind, enabled)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        if _default_device() != device:
            # None for the CPU: with its name, torch would run a mode in every call.
            torch.set_default_device(None if device == CPU else device)


def _default_device() -> torch.device:
    # Not get_default_device: torch 2.6 raises in it after set_default_device(None).
    return torch.empty(0).device


def check_default_device() -> None:
    """Raise :class:`ConfigurationError` if torch makes tensors elsewhere by default."""
    device = _default_device()
    if device.type != "cpu":
        raise ConfigurationError(
            f"torch's default device is {device!s}, and this library's own tensors "
            "would be there: leave torch.set_default_device(...) out, and move the "
            "model and its batches, model.to(device)"
        )


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64. Apple's GPUs do not.

    Examples
    --------
    >>> has_float64(torch.device("cpu"))
    True
    """
    if device.type in ("cpu", "cuda", "meta"):
        return True
    try:
        torch.ones(1, dtype=torch.float64, device=device).add_(1)
    except (TypeError, RuntimeError):
        return False
    return True


def usable_device(device: torch.device | str, way_out: str) -> torch.device:
    """Return a device on which this process can compute in float64.

    CUDA is not set up, because a process that has done so cannot fork any more.

    Raises
    ------
    ConfigurationError
        If there is no such device here, or it has no float64.
    """
    try:
        chosen = torch.device(device)
        if chosen.type != "cuda":
            torch.empty(0, device=chosen)
        elif (chosen.index or 0) >= (count := torch.cuda.device_count()):
            raise RuntimeError(f"this process sees {count} CUDA devices")
    except (AssertionError, RuntimeError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigurationError(
            f"the device {device!r:.80} cannot be used here ({reason}): {way_out}"
        ) from error
    check_float64(chosen, way_out)
    return chosen


def check_float64(device: torch.device, way_out: str) -> None:
    """Raise :class:`ConfigurationError` if a device does not compute in float64."""
    if not has_float64(device):
        raise ConfigurationError(
            f"the device '{device}' has no float64, and this library computes "
            f"eigenvectors and linear systems in float64: {way_out}"
        )


def random_states() -> dict[str, Any]:
    """Return the accelerator's random states, one for each device of its kind.

    They are ``{"kind": …, "states": […]}``, for :func:`set_random_states`, or ``{}``
    without an accelerator.
    """
    if (device := accelerator()) is None:
        return {}
    module: Any = torch.get_device_module(device)
    every = getattr(module, "get_rng_state_all", None)
    states = [module.get_rng_state()] if every is None else every()
    return {"kind": device.type, "states": states}


def set_random_states(states: dict[str, Any]) -> None:
    """Restore what :func:`random_states` returned, on an accelerator of that kind."""
    device = accelerator()
    if device is None or states.get("kind") != device.type:
        return
    module: Any = torch.get_device_module(device)
    every = getattr(module, "set_rng_state_all", None)
    if every is None:
        module.set_rng_state(*states["states"])
    else:
        every(states["states"])


class Reads:
    """A queue of tensors that are copied to the CPU together.

    Every copy from an accelerator waits until its work is done. The queue waits once
    for all tensors in it.

    Examples
    --------
    >>> reads = Reads()
    >>> later = reads.queue(torch.ones(2))
    >>> now = reads.queue(torch.zeros(1))
    >>> now.values(), later.values()
    ([tensor([0.])], [tensor([1., 1.])])
    """

    def __init__(self) -> None:
        self._queued: list[Read] = []

    def queue(self, *tensors: Tensor) -> "Read":
        """Queue tensors; return the object that will have them on the CPU."""
        read = Read(self, tensors)
        self._queued.append(read)
        return read

    def copy(self) -> None:
        """Copy all that is queued to the CPU, in one wait for a device."""
        queued, self._queued = self._queued, []
        copies = iter(_on_cpu([tensor for read in queued for tensor in read.tensors]))
        for read in queued:
            read.tensors = [next(copies) for _ in read.tensors]
            read.copied = True


class Read:
    """Queued tensors, as :meth:`Reads.queue` returns them."""

    def __init__(self, reads: Reads, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.copied, self._reads = list(tensors), False, reads

    def values(self) -> list[Tensor]:
        """Return the tensors on the CPU; the rest of the queue is copied with them."""
        if not self.copied:
            self._reads.copy()
        return self.tensors


def one_ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield each item when the next one has been made; the last one at the end.

    An accelerator is then waited for once an item: what was queued for one is read
    together with what the next one is made of (:class:`Reads`).

    Examples
    --------
    >>> made = (print("make", i) or i for i in range(2))
    >>> for item in one_ahead(made):
    ...     print("use", item)
    make 0
    make 1
    use 0
    use 1
    """
    before: list[T] = []
    for item in items:
        yield from before
        before = [item]
    yield from before


def _on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors on the CPU, copied where they are not there already."""
    copies = list(tensors)
    away = [i for i, tensor in enumerate(copies) if tensor.device.type != "cpu"]
    if not away:
        return copies
    own = [copies[i].contiguous().reshape(-1).view(torch.uint8) for i in away]
    parts = torch.split(torch.cat(own).cpu(), [len(each) for each in own])
    for i, part in zip(away, parts, strict=True):
        # A view in a wider dtype needs aligned bytes, and a clone is aligned.
        like = copies[i]
        copies[i] = part.clone().view(like.dtype).view(like.shape)
    return copies
