"""The forms that uploads travel in, and how a server requests one of them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from flwr_fisher.errors import (
    ConfigurationError,
    WireError,
    check_known,
    check_range,
    printable,
)

FORMAT_VERSION = 1
_SCHEMES = ("auto", "packed", "lossless", "paper")
_BITS = ("weight_bits", "diagonal_bits", "factor_bits")


@dataclass(frozen=True)
class Codec:
    """How an upload is packed.

    Parameters
    ----------
    budget : float, default 1.0
        The size of an upload in multiples of FedAvg's upload, which is the same
        parameters in float32. Keys, scales and headers count.
    weight_bits : int, optional
        Bits of a parameter, 2 to 16. By default parameters get half of the budget:
        ``16 * budget``.
    diagonal_bits : int, optional
        Bits of a diagonal's entry, 2 to 16. By default as many as fit: up to 8 beside
        factors, else up to 16.
    factor_bits : int, optional
        Bits of an entry of a factor, 2 to 16. By default 8 where all factors fit whole,
        else 6.
    scheme : "packed" | "lossless" | "paper" | "auto", default "packed"
        ``lossless``: plain arrays, without a budget. ``paper``: what FedFisher's
        Appendix C does, at a budget of 1. ``auto``: packed, and lossless where the
        model is so small that headers alone break the budget.

    Raises
    ------
    ConfigurationError
        If a number is out of range.

    Examples
    --------
    >>> Codec(0.5).bits_of_weights
    8
    """

    budget: float = 1.0
    weight_bits: int | None = None
    diagonal_bits: int | None = None
    factor_bits: int | None = None
    scheme: str = "packed"

    def __post_init__(self) -> None:
        check_known("codec", self.scheme, _SCHEMES)
        check_range("budget", self.budget, 1e-3, 1e3)
        for name in _BITS:
            if (bits := getattr(self, name)) is not None:
                check_range(name, bits, 2, 16)
                if not isinstance(bits, int):
                    raise ConfigurationError(f"{name} must be an integer, got {bits}")
        free = (self.budget, *(getattr(self, name) for name in _BITS))
        if self.scheme != "packed" and free != (1.0, None, None, None):
            raise ConfigurationError(
                f"codec '{self.scheme}' takes no budget and bits: name 'fedavg' or "
                "'small' with them"
            )

    @property
    def bits_of_weights(self) -> int:
        """The bits of a parameter."""
        if self.weight_bits is not None:
            return self.weight_bits
        return min(16, max(2, int(16 * self.budget)))

    def to_options(self) -> dict[str, str | int | float]:
        """Return the config that requests this codec; 0 stands for a default."""
        config: dict[str, str | int | float] = {
            "codec": self.scheme,
            "codec-version": FORMAT_VERSION,
            "codec-budget": float(self.budget),
        }
        for name in _BITS:
            config[f"codec-{name.replace('_', '-')}"] = getattr(self, name) or 0
        return config

    @classmethod
    def from_options(cls, config: Mapping[str, Any]) -> "Codec":
        """Return the codec that a server requests; ``lossless`` if it names none.

        Raises
        ------
        ConfigurationError
            If the server requests a format that this version does not write, or a
            number is out of range.
        """
        if "codec" not in config:
            return CODECS["lossless"]
        if (version := config.get("codec-version")) != FORMAT_VERSION:
            raise ConfigurationError(
                f"the server asks for version {printable(version)} of the upload "
                f"format, and this client writes {FORMAT_VERSION}: install the same "
                "flwr-fisher on both"
            )
        bits = {n: config.get(f"codec-{n.replace('_', '-')}") or None for n in _BITS}
        budget = float(config.get("codec-budget", 1.0))
        return cls(budget, **bits, scheme=str(config["codec"]))

    def describe(self) -> dict[str, Any]:
        """Return the description that an upload carries, so that it can be read."""
        return {"version": FORMAT_VERSION, **asdict(self)}

    def check_description(self, description: object, *, field: str) -> None:
        """Raise :class:`WireError` unless an upload says that it is of this codec."""
        received = check_version(description, field=field)
        if received != (requested := self.describe()):
            odd = {k: v for k, v in requested.items() if received.get(k) != v}
            raise WireError(f"another codec was asked for: {odd}", field=field)


CODECS = {
    "auto": Codec(scheme="auto"),
    "lossless": Codec(scheme="lossless"),
    "fedavg": Codec(1.0),
    "small": Codec(0.5),
    "paper": Codec(scheme="paper"),
}


def check_version(description: object, *, field: str) -> dict[str, Any]:
    """Return an upload's description, which comes from outside and may be anything.

    Raises
    ------
    WireError
        If it names no format version, or one that this package does not read.
    """
    if not isinstance(description, dict) or "version" not in description:
        raise WireError("does not say which format it has", field=field)
    if (version := description["version"]) != FORMAT_VERSION:
        reason = f"format version {version!r}, and this server reads"
        raise WireError(f"{reason} {FORMAT_VERSION}"[:200], field=field)
    return description


def get_codec(codec: str | Codec, budget: float | None = None) -> Codec:
    """Return a codec by its name, with another budget if one is given.

    Parameters
    ----------
    codec : "auto" | "lossless" | "fedavg" | "small" | "paper" | Codec
        ``fedavg`` keeps an upload at FedAvg's size, ``small`` at half of it.
    budget : float, optional
        Replaces the codec's own; ``auto`` with a budget is ``fedavg`` with it.

    Raises
    ------
    ConfigurationError
        If the name is not known, or the budget is out of range.

    Examples
    --------
    >>> get_codec("fedavg", budget=0.75).bits_of_weights
    12
    """
    if isinstance(codec, str):
        check_known("codec", codec, CODECS)
        codec = CODECS[codec]
    if budget is None:
        return codec
    return replace(CODECS["fedavg"] if codec.scheme == "auto" else codec, budget=budget)
