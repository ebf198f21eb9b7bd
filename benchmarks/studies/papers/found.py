"""What was found of one table or figure, and the word for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from harness.stats import standard_error

REPRODUCED, IN_PART, NOT = "reproduced", "in part", "not"
NOT_RUN, NO_RESULT = "could not be run here", "no result"


@dataclass(frozen=True)
class Found:
    """Our figures for a table or figure of a paper.

    Parameters
    ----------
    shown : str
        The figures.
    checks : Sequence[bool]
        Which parts of the claim hold: all, some or none make the verdict.
    reading : str
        What is to be said of it.
    command : str
        Makes the figures.
    page : str
        The page of results that has them in full.
    """

    shown: str
    checks: Sequence[bool]
    reading: str
    command: str
    page: str

    @property
    def verdict(self) -> str:
        """One word."""
        return REPRODUCED if all(self.checks) else IN_PART if any(self.checks) else NOT


# Given the numbers of a page by its name; None where they are not there yet.
Reader = Callable[[Callable[[str], Any]], Found | None]


def ahead(gains: Sequence[float]) -> bool:
    """Whether paired gains are above zero by two standard errors of their mean."""
    return mean(gains) > 2 * standard_error(gains)


def listed(values: Sequence[float], digits: int = 1) -> str:
    """Return numbers with commas between."""
    return ", ".join(f"{value:.{digits}f}" for value in values)
