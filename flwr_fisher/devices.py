"""Where work is done that nobody has placed; what an accelerator can compute.

Nothing else asks torch which accelerator there is. A CUDA or XPU GPU is one, and so is
whatever :mod:`torch.accelerator` knows besides. What is read of one together is here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flwr_fisher.errors import ConfigurationError

CPU = torch.device("cpu")


def accelerator() -> torch.device | None:
    """Return the accelerator that this process may use; None where there is none."""
    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_accelerator()


def default_device() -> torch.device:
    """Return the accelerator, or the CPU where there is none with float64.

    Examples
    --------
    >>> has_float64(default_device())
    True
    """
    found = accelerator()
    return found if found is not None and has_float64(found) else CPU


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64, as Apple's GPUs do not.

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


def check_float64(device: torch.device, way_out: str) -> None:
    """Raise :class:`ConfigurationError` where a device does not compute in float64.

    Parameters
    ----------
    device : torch.device
        Where something is to be computed.
    way_out : str
        What the caller is to do instead, in words.
    """
    if not has_float64(device):
        raise ConfigurationError(
            f"the device '{device}' has no float64, in which eigenvectors and linear "
            f"systems are computed here: {way_out}"
        )


def random_states() -> dict[str, Any]:
    """Return the states of the accelerator's random numbers, one a device of its kind.

    ``{"kind": …, "states": […]}``, for :func:`set_random_states`; ``{}`` without one.
    """
    if (found := accelerator()) is None:
        return {}
    module: Any = torch.get_device_module(found)
    every = getattr(module, "get_rng_state_all", None)
    states = [module.get_rng_state()] if every is None else every()
    return {"kind": found.type, "states": states}


def set_random_states(states: dict[str, Any]) -> None:
    """Put back what :func:`random_states` returned, if the accelerator is of its kind.

    Parameters
    ----------
    states : dict[str, Any]
        As returned, here or in another process.
    """
    found = accelerator()
    if found is None or states.get("kind") != found.type:
        return
    module: Any = torch.get_device_module(found)
    every = getattr(module, "set_rng_state_all", None)
    if every is None:
        module.set_rng_state(*states["states"])
    else:
        every(states["states"])


class Reads:
    """A queue of tensors, which are copied to the CPU in one wait for a device.

    An accelerator works off what it was given in its own time; a copy of its results
    waits until it is done. What nobody needs yet goes along with what is next.

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
    """Some tensors of a queue, which :meth:`Reads.queue` returns."""

    def __init__(self, reads: Reads, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.copied, self._reads = list(tensors), False, reads

    def values(self) -> list[Tensor]:
        """Return the tensors on the CPU; what else is queued is copied as well."""
        if not self.copied:
            self._reads.copy()
        return self.tensors


def _on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors on the CPU: those that are there, and copies of all others."""
    found = list(tensors)
    away = [i for i, tensor in enumerate(found) if tensor.device.type != "cpu"]
    if not away:
        return found
    own = [found[i].contiguous().reshape(-1).view(torch.uint8) for i in away]
    parts = torch.split(torch.cat(own).cpu(), [len(each) for each in own])
    for i, part in zip(away, parts, strict=True):
        # A view as wider numbers needs aligned bytes, which a clone has.
        like = found[i]
        found[i] = part.clone().view(like.dtype).view(like.shape)
    return found
