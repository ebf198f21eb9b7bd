"""Which of a Fisher's options go together."""

from collections.abc import Mapping, Sequence

from flwr_fisher.errors import ConfigurationError, check_known, check_range, check_whole

STRUCTURES = ("kfac", "diagonal", "ekfac", "block", "dense")
WEIGHT_SHARINGS = ("expand", "reduce")
EXPECTATIONS = ("exact", "sampled", "empirical", "empirical-batch")
ENGINES = ("auto", "nngeometry")
_NNGEOMETRY_ONLY = ("lowrank", "quasidiag", "implicit")
TOLERANCE = 1e-3  # measured: benchmarks/results/curvature.md
LARGEST_FACTOR = 2**14  # rows, which take a GiB in float32: a vocabulary has more


def check_options(
    structures: Sequence[str],
    *,
    expectation: str,
    tolerance: float,
    weight_sharing: str,
    counts: Mapping[str, int | None],
    engine: str = "auto",
) -> None:
    """Refuse options of :func:`~flwr_fisher.curvature.fisher` that would do nothing.

    Parameters
    ----------
    structures : Sequence[str]
        All that are wanted.
    expectation, tolerance, weight_sharing, engine
        As for ``fisher``.
    counts : Mapping[str, int | None]
        ``max_passes``, ``max_positions`` and whatever else is at least 1, or None.

    Raises
    ------
    UnknownNameError
        If a name is not known.
    ConfigurationError
        If a number is out of range, or bounds what there is none of.
    """
    check_known("engine", engine, ENGINES)
    own = engine == "auto"
    for name in structures:
        known = STRUCTURES if own else (*STRUCTURES, *_NNGEOMETRY_ONLY)
        check_known("structure", name, known)
    check_known("expectation", expectation, EXPECTATIONS)
    check_known("weight_sharing", weight_sharing, WEIGHT_SHARINGS)
    check_range("tolerance", tolerance, 0, 1)
    for name, count in counts.items():
        if count is not None:
            check_whole(name, count, 1)
    kfac = own and bool({"kfac", "ekfac"} & set(structures))
    expands = weight_sharing == "expand"
    if not (expands or kfac):
        raise ConfigurationError(
            f"weight_sharing='{weight_sharing}' is for 'kfac' and 'ekfac' by this "
            f"library's own engine, not for {structures} by engine='{engine}'"
        )
    if counts.get("max_passes") is not None and not (own and expectation == "exact"):
        raise ConfigurationError(
            f"max_passes={counts['max_passes']} bounds the passes of expectation="
            f"'exact' by this library's own engine, not of '{expectation}' by engine="
            f"'{engine}': leave it out"
        )
    if counts.get("max_positions") is not None and not (kfac and expands):
        raise ConfigurationError(
            f"max_positions={counts['max_positions']} bounds the positions of 'kfac' "
            "and 'ekfac' by this library's own engine with weight_sharing='expand', "
            f"not of {structures} by engine='{engine}' with '{weight_sharing}': leave "
            "it out"
        )
