"""The default device, what an accelerator can compute, and copies from it.

No other file asks torch for the accelerator: a CUDA or XPU GPU, or another one that
:mod:`torch.accelerator` knows.
"""

from typing import Any

import torch

from flwr_fisher.errors import ConfigurationError

CPU = torch.device("cpu")


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


def check_default_device() -> None:
    """Raise :class:`ConfigurationError` if torch makes tensors elsewhere by default."""
    # Not get_default_device: torch 2.6 raises in it after set_default_device(None).
    device = torch.empty(0).device
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
