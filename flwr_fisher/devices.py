"""Where work is done that nobody has placed; what an accelerator can compute.

Nothing else asks torch which accelerator there is. A CUDA or XPU GPU is one, and so is
whatever :mod:`torch.accelerator` knows besides.
"""

from typing import Any

import torch

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
