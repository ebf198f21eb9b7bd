"""The options of a Fisher, which a server sends to clients."""

from typing import Any, Self

from flwr_fisher.curvature.structures import STRUCTURES
from flwr_fisher.errors import ConfigurationError, check_known
from flwr_fisher.options import Options, option

EXPECTATIONS = ("exact", "sampled", "empirical", "empirical-batch")
WEIGHT_SHARINGS = ("expand", "reduce")
LARGEST_FACTOR = 2**14  # rows, which take a GiB in float32: a vocabulary has more
# Of examples="auto": benchmarks/results/budget.md. Packing an upload costs about as
# much as the passes of 300 examples.
_MOST, _FEWEST, _SHARE, _PACKING = 1000, 64, 4, 300


class FisherOptions(Options):
    """How a Fisher is computed: from which examples and labels, at which cost.

    The defaults are those of a client that a server asks: few examples, in few passes
    and at few positions. On real images this is :doc:`as accurate as with all of them
    </benchmarks/budget>`, at a fraction of the cost: :doc:`below a local epoch
    </benchmarks/client>` for clients of 600 examples and more, and about one for those
    of 300. :meth:`full` has no such bounds.

    Raises
    ------
    ConfigurationError
        If a name is not known, or a number out of range.

    Examples
    --------
    >>> FisherOptions(expectation="sampled", examples=200).to_options()
    {'expectation': 'sampled', 'tolerance': 0.001, 'examples': 200, 'max-passes': 3, \
'max-positions': 32, 'weight-sharing': 'expand'}
    """

    expectation: str = option(
        "exact",
        "The labels over which the expectation is. ``exact``: all classes, up to "
        "`tolerance`; the true Fisher. ``sampled``: one label that is drawn from the "
        "model, which is unbiased. ``empirical``: the given labels, example by "
        "example; a label of -100, PyTorch's ``ignore_index``, adds nothing. "
        "``empirical-batch``: the mean over batches of the squared gradient of a "
        "batch's mean loss, over its labels without -100 (FedFish's Fisher); a batch "
        "without any is not counted. For ``diagonal`` only.",
        choices=EXPECTATIONS,
    )
    tolerance: float = option(
        1e-3,  # measured on a LeNet and a CNN
        "With ``exact``: the share of each batch's :math:`\\sum_{x,c} p_c (1 - p_c)` "
        "(the trace of the Fisher with respect to the outputs) that may be left out to "
        "save backward passes. With 0 nothing is left out.",
        low=0,
        high=1,
    )
    examples: int | str | None = option(
        "auto",
        "From how many examples at most it is computed, chosen at random; with "
        "``None`` from all. ``auto`` is a quarter of those beyond 300 (packing an "
        "upload costs about as much as a pass of these), at least 64 and at most 1000: "
        "a K-FAC of a few hundred examples merges as well as one of ten thousand. A "
        "client's ``ClientLimits`` may reduce the number.",
        low=1,
        choices=("auto",),
    )
    max_passes: int | None = option(
        3,
        "With ``exact``: about how many backward passes an example may cost; with "
        "``None`` one for each class that matters. If it would cost more, the result "
        "is an unbiased estimate: the most likely labels are taken exactly, and one "
        "label that is drawn from the others represents them. Positions (tokens) share "
        "passes, with random signs.",
        low=1,
    )
    max_positions: int | None = option(
        32,
        "For ``kfac``: at most how many positions of a layer (of a convolution's "
        "output, or tokens) count in an example for :math:`A`, and twice as many for "
        ":math:`G`, whose gradients vary more; with ``None`` all. The positions lie on "
        "a grid with a random origin, which is unbiased.",
        low=1,
    )
    weight_sharing: str = option(
        "expand",
        "How ``kfac``'s factors are computed if a layer has several positions "
        "(Eschenhagen et al., NeurIPS 2023). ``expand``: every position is an input of "
        "its own (:math:`A` is summed over positions, :math:`G` averaged; Grosse & "
        "Martens 2016). ``reduce``: an example counts with its mean input and its "
        "summed gradient, at all positions. This is cheaper, and exact if the model is "
        "linear up to a mean over positions.",
        choices=WEIGHT_SHARINGS,
    )

    @classmethod
    def full(cls, **options: Any) -> Self:
        """Return options without bounds on examples, passes and positions.

        Examples
        --------
        >>> FisherOptions.full(tolerance=0).max_passes is None
        True
        """
        unbounded = {"examples": None, "max_passes": None, "max_positions": None}
        return cls(**unbounded | options)

    def num_examples(self, total: int | None) -> int | None:
        """Return how many examples to take; None for all.

        Parameters
        ----------
        total : int | None
            How many there are; None if that is not known.

        Examples
        --------
        >>> FisherOptions().num_examples(800), FisherOptions().num_examples(None)
        (125, 1000)
        """
        if not isinstance(self.examples, str):
            return self.examples
        if total is None:
            return _MOST
        return min(_MOST, max(_FEWEST, (total - _PACKING) // _SHARE))

    def check(self, structure: str) -> None:
        """Raise an error for options that a structure does not have.

        Raises
        ------
        UnknownNameError
            If the structure is not known.
        ConfigurationError
            If it has no such `weight_sharing` or `expectation`.
        """
        check_known("structure", structure, STRUCTURES)
        if self.weight_sharing != "expand" and not STRUCTURES[structure].has_positions:
            raise ConfigurationError(
                f"weight_sharing='{self.weight_sharing}' is for 'kfac', not for "
                f"'{structure}': leave it out"
            )
        if self.expectation == "empirical-batch" and structure != "diagonal":
            raise ConfigurationError(
                "expectation='empirical-batch' needs structure='diagonal'"
            )
