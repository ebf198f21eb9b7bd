"""How to merge, resolved and validated once."""

from dataclasses import dataclass
from typing import Any

from flwr_fisher.errors import ConfigurationError, check_known, check_range

SOLVERS = ("cg", "closed-form", "adam", "gd")

# Chosen on validation data, see benchmarks/results/fedfisher_defaults.md. The other
# solvers by default reproduce the papers.
_CG = {"anchor": 0.03, "shrink": 0.1, "damping": 0.3, "balance": 1.0, "iterations": 100}
_PAPER = dict.fromkeys(_CG, 0.0) | {"iterations": 2000}


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """The options of :func:`~flwr_fisher.merge.fedfisher`, which describes them."""

    solver: str
    anchor: float
    shrink: float
    damping: float
    balance: float
    iterations: int
    tolerance: float = 1e-6
    lr: float = 0.01

    def __post_init__(self) -> None:
        check_known("solver", self.solver, SOLVERS)
        check_range("anchor", self.anchor, 0)
        check_range("shrink", self.shrink, 0, 1)
        check_range("damping", self.damping, 0, 1)
        check_range("balance", self.balance, 0, 1)
        check_range("iterations", self.iterations, 1)
        check_range("tolerance", self.tolerance, 0, 1)
        check_range("lr", self.lr, 0)


def merge_options(solver: str = "cg", **options: Any) -> MergeOptions:
    """Fill in the solver's defaults and validate.

    Parameters
    ----------
    solver : str, default "cg"
        Of :data:`SOLVERS`.
    **options
        Other fields of :class:`MergeOptions`. None stands for the solver's default, of
        those that it has: not for that of `tolerance` or `lr`.

    Examples
    --------
    >>> merge_options("adam").iterations
    2000
    """
    default: dict[str, Any] = _CG if solver == "cg" else _PAPER
    given = {k: default.get(k) if v is None else v for k, v in options.items()}
    return MergeOptions(solver=solver, **(default | given))


def check_score(score: object, solver: str) -> None:
    """Raise :class:`ConfigurationError` if there is a score and nobody to ask it."""
    if score is not None and solver != "adam":
        raise ConfigurationError(f"score is for solver='adam', not '{solver}'")
