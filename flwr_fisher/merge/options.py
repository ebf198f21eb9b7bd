"""The options of a merge: each solver's defaults, and the allowed ranges."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from torch import Tensor

from flwr_fisher.errors import (
    ConfigurationError,
    check_known,
    check_range,
    check_whole,
    plain_fields,
)
from flwr_fisher.params import NORM_STATISTICS, Params

# Chosen on validation data of MNIST, CIFAR-10 and digits:
# benchmarks/results/fedfisher_defaults.md; for batch norms: pretrained.md there. The
# other solvers by default reproduce the papers.
_PCG = {"anchor": 0.1, "shrink": None, "damping": 0.0, "balance": 0.5, "robust": 1.0}
_CG = {"anchor": 0.03, "shrink": 0.1, "damping": 0.3, "balance": 1.0, "robust": 0.0}
_NONE = dict.fromkeys(_PCG, 0.0)
_SHRINK, _SHRINK_WITH_NORMS = 0.3, 0.9
_HALF, _ANY = {"max_share": 0.5}, {"max_share": 1.0}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "pcg": _PCG | _HALF | {"iterations": 4},
    "cg": _CG | _HALF | {"iterations": 100},
    "closed-form": _NONE | _ANY | {"iterations": 2000},
    "adam": _NONE | _ANY | {"iterations": 2000},
    "gd": _NONE | _ANY | {"iterations": 2000},
}
_RANGES: dict[str, tuple[float, ...]] = {
    "anchor": (0,),
    "shrink": (0, 1),
    "damping": (0, 1),
    "balance": (0, 1),
    "robust": (0,),
    "max_share": (0.5, 1),
    "trust": (0,),
    "outlier": (1,),
    "iterations": (1,),
    "tolerance": (0, 1),
    "lr": (0,),
}
_WHOLE = ("iterations",)
_UNUSED = dict.fromkeys(_DEFAULTS, ("lr",)) | {
    "adam": ("tolerance",),
    "closed-form": ("lr", "tolerance", "iterations"),
}
SOLVERS = tuple(_DEFAULTS)
_TRUST = 1.0  # a strategy's; a single merge has none

Score = Callable[[dict[str, Tensor]], float]  # of merged parameters, higher is better
Report = Callable[[str], object]  # is called with a text about the solver's progress


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """A server's options of a merge, as :func:`~flwr_fisher.merge.fedfisher` has them.

    Parameters
    ----------
    anchor, shrink, damping, balance, robust, max_share : float, optional
        Regularisation and weights; by default those of the solver.
    outlier : float, default inf
        Robust merging, for example with 1.5. A client is left out if its distance,
        measured by the other clients' Fishers, is more than this times the median. Its
        examples and its curvature are limited to this times the median.
    trust : float, optional
        How far a layer may move from the clients' mean, from the second round on. With
        short training in a few rounds, longer steps sometimes lose accuracy. Default 1.
    iterations : int, optional
        At most this many iterations of the solver. Default: 4 with ``pcg``, but 1 if
        the clients' task is a regression (``likelihood="gaussian"``) and the server
        merges their parts; 100 with ``cg``, 2000 with ``gd`` and ``adam``.

    Raises
    ------
    ConfigurationError
        If a number is out of range.
    """

    anchor: float | None = None
    shrink: float | None = None
    damping: float | None = None
    balance: float | None = None
    robust: float | None = None
    max_share: float | None = None
    outlier: float = math.inf
    trust: float | None = None
    iterations: int | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        _check_ranges(self)

    def settings(self, solver: str) -> "MergeSettings":
        """Return all settings of a strategy's merges, by a solver."""
        trust = _TRUST if self.trust is None else self.trust
        return merge_settings(solver, **(asdict(self) | {"trust": trust}))


@dataclass(frozen=True, kw_only=True)
class MergeSettings:
    """All settings of :func:`~flwr_fisher.merge.fedfisher`, defaults filled in."""

    solver: str
    anchor: float
    shrink: float | None  # None: a default that depends on the model's layers
    damping: float
    balance: float
    robust: float
    max_share: float
    iterations: int
    trust: float = math.inf
    outlier: float = math.inf
    tolerance: float = 1e-6
    lr: float = 0.01

    def __post_init__(self) -> None:
        plain_fields(self)
        _check_ranges(self)

    def for_round(self, number: int) -> "MergeSettings":
        """Return the settings for a round: `trust` begins with the second."""
        return replace(self, trust=math.inf) if number == 1 else self

    def of_model(self, params: Params) -> "MergeSettings":
        """Return the settings with `shrink`, whose default depends on the model.

        Examples
        --------
        >>> import torch
        >>> settings, norms = merge_settings("pcg"), {"bn.running_mean": torch.zeros(2)}
        >>> settings.of_model({}).shrink, settings.of_model(norms).shrink
        (0.3, 0.9)
        """
        if self.shrink is not None:
            return self
        norms = any(name.endswith(NORM_STATISTICS[0]) for name in params)
        return replace(self, shrink=_SHRINK_WITH_NORMS if norms else _SHRINK)

    def used(self) -> dict[str, Any]:
        """Return the settings that the solver uses.

        Examples
        --------
        >>> settings = merge_settings("pcg").of_model({})
        >>> asdict(settings).keys() - settings.used().keys()
        {'lr'}
        """
        own, unused = asdict(self), _UNUSED[self.solver]
        return {k: v for k, v in own.items() if v is not None and k not in unused}


def merge_settings(solver: str = "pcg", **options: Any) -> MergeSettings:
    """Return the options with the solver's defaults, after checking their ranges.

    Parameters
    ----------
    solver : str, default "pcg"
        One of :data:`SOLVERS`.
    **options
        Other fields of :class:`MergeSettings`. None means the default.

    Raises
    ------
    UnknownNameError
        If the solver or an option is not known.
    ConfigurationError
        If an option is out of range, or the solver does not use it.

    Examples
    --------
    >>> merge_settings("adam").iterations
    2000
    """
    check_known("solver", solver, SOLVERS)
    known = [each.name for each in fields(MergeSettings)]
    for name in options:
        check_known("option of fedfisher", name, known)
    for name in _UNUSED[solver]:
        if options.get(name) is not None:
            raise ConfigurationError(
                f"solver='{solver}' does not use {name}: leave it out"
            )
    given = {name: value for name, value in options.items() if value is not None}
    return MergeSettings(solver=solver, **(_DEFAULTS[solver] | given))


def _check_ranges(options: MergeOptions | MergeSettings) -> None:
    for name, limits in _RANGES.items():
        if (value := getattr(options, name, None)) is not None:
            check_range(name, value, *limits)
            if name in _WHOLE:
                check_whole(name, value)


def check_score(score: object, solver: str) -> None:
    """Raise :class:`ConfigurationError` for a score that is none, or is not used."""
    if not callable(score or len):
        raise ConfigurationError(f"score must be a function, got {score!r:.80}")
    if score is not None and solver != "adam":
        raise ConfigurationError(
            f"score works with solver='adam' only, not '{solver}': leave it out"
        )
