"""Differential privacy as a strategy's option, and the noise that the server adds."""

from dataclasses import asdict
from typing import Any

from torch import Tensor

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.params import Params
from flwr_fisher.secure.privacy import Privacy, with_noise

__all__ = ["Privacy", "check_privacy", "noised", "settings_of"]


def noised(mean: Params, privacy: Privacy, clients: int) -> dict[str, Tensor]:
    """Return the mean of contributions of norm 1 at most, with a sum's noise."""
    return with_noise(mean, privacy.noise_multiplier / clients)


def check_privacy(privacy: object) -> Privacy | None:
    """Return it, or raise :class:`ConfigurationError` if it is another thing."""
    if not isinstance(privacy, Privacy | None):
        raise ConfigurationError(f"privacy must be Privacy(...), got {privacy!r}")
    return privacy


def settings_of(privacy: Privacy | None) -> dict[str, Any]:
    """Return a strategy's settings of that name."""
    if privacy is None:
        return {}
    return {f"privacy.{name}": value for name, value in asdict(privacy).items()}
