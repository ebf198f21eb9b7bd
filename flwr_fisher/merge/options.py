"""How to merge, resolved and validated once."""

import math
from dataclasses import dataclass
from typing import Any

from flwr_fisher.errors import ConfigurationError, check_known, check_range

# Chosen on validation data of MNIST, CIFAR-10 and digits:
# benchmarks/results/fedfisher_defaults.md. The other solvers by default reproduce the
# papers.
_PCG = {"anchor": 0.1, "shrink": 0.3, "damping": 0.0, "balance": 0.5, "robust": 1.0}
_CG = {"anchor": 0.03, "shrink": 0.1, "damping": 0.3, "balance": 1.0, "robust": 0.0}
_NONE = dict.fromkeys(_PCG, 0.0)
_HALF, _ANY = {"max_share": 0.5}, {"max_share": 1.0}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "pcg": _PCG | _HALF | {"iterations": 4},
    "cg": _CG | _HALF | {"iterations": 100},
    "closed-form": _NONE | _ANY | {"iterations": 2000},
    "adam": _NONE | _ANY | {"iterations": 2000},
    "gd": _NONE | _ANY | {"iterations": 2000},
}
SOLVERS = tuple(_DEFAULTS)
TRUST = 1.0  # from the second round on


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """The options of :func:`~flwr_fisher.merge.fedfisher`, which describes them."""

    solver: str
    anchor: float
    shrink: float
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
        check_range("anchor", self.anchor, 0)
        check_range("shrink", self.shrink, 0, 1)
        check_range("damping", self.damping, 0, 1)
        check_range("balance", self.balance, 0, 1)
        check_range("robust", self.robust, 0)
        check_range("max_share", self.max_share, 0.5, 1)
        check_range("trust", self.trust, 0)
        check_range("outlier", self.outlier, 1)
        check_range("iterations", self.iterations, 1)
        check_range("tolerance", self.tolerance, 0, 1)
        check_range("lr", self.lr, 0)


def merge_options(solver: str = "pcg", **options: Any) -> MergeOptions:
    """Fill in the solver's defaults and validate.

    Parameters
    ----------
    solver : str, default "pcg"
        Of :data:`SOLVERS`.
    **options
        Other fields of :class:`MergeOptions`. None stands for the solver's default, of
        those that it has: not for that of `tolerance` or `lr`.

    Examples
    --------
    >>> merge_options("adam").iterations
    2000
    """
    check_known("solver", solver, SOLVERS)
    default = _DEFAULTS[solver]
    given = {k: default.get(k) if v is None else v for k, v in options.items()}
    return MergeOptions(solver=solver, **(default | given))


def check_score(score: object, solver: str) -> None:
    """Raise :class:`ConfigurationError` if a solver other than ``adam`` has a score."""
    if score is not None and solver != "adam":
        raise ConfigurationError(f"score is for solver='adam', not '{solver}'")
