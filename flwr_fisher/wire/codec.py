"""Codecs of uploads: a server requests one, and an upload says which it has."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from flwr_fisher.errors import (
    ConfigurationError,
    WireError,
    check_known,
    check_range,
    plain_fields,
    printable,
)
from flwr_fisher.wire.arrays import FORMAT_VERSION, read_description

_BUDGETS = {"fedavg": 1.0, "small": 0.5}
_NAMES = ("auto", "lossless", *_BUDGETS)


@dataclass(frozen=True)
class Codec:
    """A codec: how a client packs its upload.

    Parameters
    ----------
    name : "auto" | "fedavg" | "small" | "lossless", default "auto"
        ``fedavg`` packs an upload into FedAvg's bytes, ``small`` into half of them;
        ``lossless`` sends plain arrays. ``auto`` is ``fedavg``, or ``lossless`` for a
        model so small that the headers alone exceed the budget.
    budget : float, optional
        The size of a packed upload in multiples of FedAvg's upload, which is the same
        parameters in float32. Keys, scales and headers count. Default: the budget that
        belongs to the name. ``auto`` with a budget is ``fedavg`` with this budget.

    Raises
    ------
    ConfigurationError
        If the name is unknown, the budget is out of range, or ``lossless`` has one.

    Examples
    --------
    >>> Codec("small"), Codec("fedavg", budget=0.75)
    (Codec(name='small', budget=0.5), Codec(name='fedavg', budget=0.75))
    """

    name: str = "auto"
    budget: float | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        check_known("codec", self.name, _NAMES)
        if self.budget is None:
            object.__setattr__(self, "budget", _BUDGETS.get(self.name))
            return
        check_range("budget", self.budget, 1e-3, 1e3)
        if self.name == "lossless":
            raise ConfigurationError(
                "codec 'lossless' takes no budget: leave budget out, or use codec "
                "'fedavg' or 'small'"
            )
        if self.name == "auto":
            object.__setattr__(self, "name", "fedavg")

    @classmethod
    def of(cls, codec: "str | Codec") -> "Codec":
        """Return a codec unchanged, or the codec of a name."""
        return codec if isinstance(codec, Codec) else cls(codec)

    def to_options(self) -> dict[str, str | int | float]:
        """Return the config that requests this codec."""
        config: dict[str, str | int | float] = {
            "codec": self.name,
            "codec-version": FORMAT_VERSION,
        }
        return config | ({"codec-budget": float(self.budget)} if self.budget else {})

    @classmethod
    def from_options(cls, config: Mapping[str, Any]) -> "Codec":
        """Return the codec that a server requests, by default ``lossless``.

        Raises
        ------
        ConfigurationError
            If the server requests a format that this version does not write, or a
            number is out of range.
        """
        if "codec" not in config:
            return LOSSLESS
        if (version := config.get("codec-version")) != FORMAT_VERSION:
            raise ConfigurationError(
                f"the server asks for version {printable(version)} of the upload "
                f"format, but this client writes version {FORMAT_VERSION}: install "
                "the same version of flwr-fisher on both"
            )
        return cls(str(config["codec"]), config.get("codec-budget"))

    def describe(self, *, packed: bool = True) -> dict[str, Any]:
        """Return the description of the codec that an upload carries.

        If packing failed and the client sends its upload lossless, the description says
        so.
        """
        unpacked = {} if packed else {"packed": False}
        return {"version": FORMAT_VERSION, **asdict(self), **unpacked}

    def check_description(
        self, text: Tensor | None, *, field: str, packed: bool = True
    ) -> None:
        """Raise :class:`WireError` unless an upload's description names this codec."""
        received = read_description(text, field)
        if received != (requested := self.describe(packed=packed)):
            other = {k: v for k, v in requested.items() if received.get(k) != v}
            raise WireError(f"the server requested another codec: {other}", field=field)


LOSSLESS = Codec("lossless")
