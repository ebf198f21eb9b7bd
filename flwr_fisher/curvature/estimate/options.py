"""The options of a Fisher, which a server sends, and the checks of combinations."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flwr_fisher.errors import (
    ConfigurationError,
    check_known,
    check_range,
    check_whole,
    plain_fields,
)

STRUCTURES = ("kfac", "diagonal", "ekfac", "block", "dense")
WEIGHT_SHARINGS = ("expand", "reduce")
EXPECTATIONS = ("exact", "sampled", "empirical", "empirical-batch")
ENGINES = ("auto", "nngeometry")
_NNGEOMETRY_ONLY = ("lowrank", "quasidiag", "implicit")
TOLERANCE = 1e-3  # measured on a LeNet and a CNN
_COUNTS = ("examples", "max_passes", "max_positions")
AUTO = "auto"
_MOST = 1000  # examples by default: benchmarks/results/budget.md
_FEWEST = 128  # passes that a client of few examples may take: of 32 with three
_PACKING = 300  # passes, in place of which an upload is packed
LARGEST_FACTOR = 2**14  # rows, which take a GiB in float32: a vocabulary has more


@dataclass(frozen=True, kw_only=True)
class FisherOptions:
    """The options with which a server asks clients for a Fisher.

    By default a client computes it from few examples, in few passes and at few
    positions. On real images this is :doc:`as accurate as with all of them
    </benchmarks/budget>`, at a fraction of the cost. The cost is below that of a local
    epoch. With packing this holds for most clients of 300 examples; a small client with
    a large model :doc:`pays a little more </benchmarks/client>`.

    Parameters
    ----------
    expectation : "exact" | "sampled" | "empirical" | "empirical-batch"
        The labels of the expectation; by default ``exact``, all classes. See
        :func:`flwr_fisher.curvature.fisher`.
    tolerance : float, default 1e-3
        The share of the Fisher that a client may leave out to save time.
    examples : int | None | "auto", default "auto"
        From how many examples at most it is computed; with ``None`` from all. ``auto``
        is 1000, with a limit on passes, forward and backward: a client of n examples
        takes at most n - 300 passes, because packing costs about 300; or n / 2, or 128,
        if one of these is more. With one forward and three backward passes an example,
        this is an eighth to a quarter of its examples, and more for fewer than 128
        examples. If the model is so certain that examples need fewer passes, it is more
        of them. A client's ``ClientLimits`` may reduce the number.
    max_passes : int | None, default 3
        With ``exact``: how many backward passes an example takes; with ``None`` one for
        each class that matters.
    max_positions : int | None, default 32
        For ``kfac`` and ``ekfac``: how many positions of a layer count; with ``None``
        all.
    weight_sharing : "expand" | "reduce", default "expand"
        What ``kfac`` and ``ekfac`` do if a layer has several positions; ``reduce``
        takes all of them.

    Raises
    ------
    ConfigurationError
        If a name is not known, or a number out of range.

    Examples
    --------
    >>> FisherOptions(expectation="sampled").for_structure("diagonal").to_options()
    {'expectation': 'sampled', 'tolerance': 0.001, 'examples': 'auto', \
'weight-sharing': 'expand'}
    """

    expectation: str = "exact"
    tolerance: float = TOLERANCE
    examples: int | str | None = AUTO
    max_passes: int | None = 3
    max_positions: int | None = 32
    weight_sharing: str = "expand"

    def __post_init__(self) -> None:
        plain_fields(self)
        check_known("expectation", self.expectation, EXPECTATIONS)
        check_known("weight_sharing", self.weight_sharing, WEIGHT_SHARINGS)
        check_range("tolerance", self.tolerance, 0, 1)
        for name in _COUNTS:
            count = getattr(self, name)
            if count is not None and not (name == "examples" and count == AUTO):
                check_whole(name, count, 1)

    def for_client(self, count: int | None) -> dict[str, Any]:
        """Return the keyword arguments of :func:`~flwr_fisher.curvature.fisher`.

        ``examples="auto"`` becomes at most 1000 examples, and the bound on passes that
        the class describes.

        Parameters
        ----------
        count : int | None
            How many examples the client has; None if that is not known.
        """
        options = asdict(self)
        if self.examples == AUTO:
            passes = (
                None if count is None else max(count - _PACKING, count // 2, _FEWEST)
            )
            options |= {"examples": _MOST, "total_passes": passes}
        return options

    def for_structure(self, structure: str) -> "FisherOptions":
        """Return the options without the bounds that do not apply to a structure.

        Raises
        ------
        ConfigurationError
            If the structure is not known, or has no such `weight_sharing`.
        """
        expands = self.weight_sharing == "expand" and structure in ("kfac", "ekfac")
        exact = self.expectation == "exact"
        own = replace(
            self,
            max_passes=self.max_passes if exact else None,
            max_positions=self.max_positions if expands else None,
        )
        own.check([structure])
        return own

    def check(self, structures: Sequence[str], engine: str = "auto") -> None:
        """Raise an error for options that have no effect on these structures.

        Raises
        ------
        UnknownNameError
            If a structure or the engine is not known.
        ConfigurationError
            If an option does not apply to them.
        """
        check_known("engine", engine, ENGINES)
        own = engine == "auto"
        for name in structures:
            known = STRUCTURES if own else (*STRUCTURES, *_NNGEOMETRY_ONLY)
            check_known("structure", name, known)
        kfac = own and bool({"kfac", "ekfac"} & set(structures))
        expands = self.weight_sharing == "expand"
        if not (expands or kfac):
            raise ConfigurationError(
                f"weight_sharing='{self.weight_sharing}' is for 'kfac' and 'ekfac' by "
                f"this library's own engine, not for {structures} by engine='{engine}'"
                ": leave it out"
            )
        if self.max_passes is not None and not (own and self.expectation == "exact"):
            raise ConfigurationError(
                f"max_passes={self.max_passes} bounds the passes of expectation="
                f"'exact' by this library's own engine, not of '{self.expectation}' by "
                f"engine='{engine}': leave it out"
            )
        if self.max_positions is not None and not (kfac and expands):
            raise ConfigurationError(
                f"max_positions={self.max_positions} bounds the positions of 'kfac' "
                "and 'ekfac' by this library's own engine with weight_sharing="
                f"'expand', not of {structures} by engine='{engine}' with "
                f"'{self.weight_sharing}': leave it out"
            )

    def to_options(self) -> dict[str, str | int | float]:
        """Return the options as the server sends them: hyphenated names, no None."""
        fields = asdict(self).items()
        return {name.replace("_", "-"): v for name, v in fields if v is not None}

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "FisherOptions":
        """Return the options that :meth:`to_options` wrote; missing counts are None.

        Raises
        ------
        ConfigurationError
            If a name is not known, or a number is not a number or out of range.
        """
        counts = {name: options.get(name.replace("_", "-")) for name in _COUNTS}
        return cls(
            expectation=str(options.get("expectation", "exact")),
            tolerance=options.get("tolerance", TOLERANCE),
            weight_sharing=str(options.get("weight-sharing", "expand")),
            **counts,
        )
