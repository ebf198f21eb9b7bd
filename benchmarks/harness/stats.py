"""Means over seeds, and differences that are paired by seed."""

from collections.abc import Sequence
from statistics import fmean, mean, stdev


def paired(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return ours minus theirs, seed by seed."""
    return [a - b for a, b in zip(ours, theirs, strict=True)]


def standard_error(values: Sequence[float]) -> float:
    """Return that of the mean."""
    return stdev(values) / len(values) ** 0.5


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return mean ± standard deviation, or a single value."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def with_error(differences: Sequence[float], digits: int) -> str:
    """Return mean ± standard error, the mean with its sign, or a single value."""
    if len(differences) == 1:
        return f"{differences[0]:+.{digits}f}"
    error = standard_error(differences)
    return f"{fmean(differences):+.{digits}f} ± {error:.{digits}f}"


def each(differences: Sequence[float], digits: int) -> str:
    """Return the mean, and in brackets every value, all with their signs."""
    shown = [f"{value:+.{digits}f}" for value in (fmean(differences), *differences)]
    return f"{shown[0]} ({', '.join(shown[1:])})"
