"""How to merge, resolved and validated once."""

from dataclasses import dataclass

from flwr_fisher.errors import ConfigurationError, check_known, check_range

__all__ = ["SOLVERS", "MergeOptions", "check_score", "merge_options"]

SOLVERS = ("cg", "closed-form", "adam", "gd")

# Chosen on validation data, see benchmarks/results/fedfisher_defaults.md. The other
# solvers reproduce the papers unless told otherwise.
_CG = {"anchor": 0.03, "shrink": 0.1, "damping": 0.3, "balance": 1.0}
_PAPER = {"anchor": 0.0, "shrink": 0.0, "damping": 0.0, "balance": 0.0}
_ITERATIONS = {"cg": 100}


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """The options of :func:`~flwr_fisher.merge.fedfisher`, which describes them."""

    solver: str
    anchor: float
    shrink: float
    damping: float
    balance: float
    iterations: int
    tolerance: float
    lr: float

    def __post_init__(self) -> None:
        check_known("solver", self.solver, SOLVERS)
        check_range("anchor", self.anchor, 0)
        check_range("shrink", self.shrink, 0, 1)
        check_range("damping", self.damping, 0, 1)
        check_range("balance", self.balance, 0, 1)
        check_range("iterations", self.iterations, 1)
        check_range("tolerance", self.tolerance, 0, 1)
        check_range("lr", self.lr, 0)


def merge_options(
    solver: str = "cg",
    *,
    anchor: float | None = None,
    shrink: float | None = None,
    damping: float | None = None,
    balance: float | None = None,
    iterations: int | None = None,
    tolerance: float = 1e-6,
    lr: float = 0.01,
) -> MergeOptions:
    """Fill in the solver's defaults and validate.

    Examples
    --------
    >>> merge_options("adam").iterations
    2000
    """
    default = _CG if solver == "cg" else _PAPER
    return MergeOptions(
        solver=solver,
        anchor=default["anchor"] if anchor is None else anchor,
        shrink=default["shrink"] if shrink is None else shrink,
        damping=default["damping"] if damping is None else damping,
        balance=default["balance"] if balance is None else balance,
        iterations=_ITERATIONS.get(solver, 2000) if iterations is None else iterations,
        tolerance=tolerance,
        lr=lr,
    )


def check_score(score: object, solver: str) -> None:
    """Raise :class:`ConfigurationError` if there is a score and nobody to ask it."""
    if score is not None and solver != "adam":
        raise ConfigurationError(f"score is for solver='adam', not '{solver}'")
