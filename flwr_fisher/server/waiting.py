"""The end of a round's wait: its deadline, its window, or enough replies."""

from dataclasses import dataclass
from math import ceil, inf

from flwr_fisher.errors import (
    ConfigurationError,
    check_known,
    check_positive,
    check_range,
    check_whole,
)

_ON_FAILED_ROUND = ("raise", "skip")


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """When a round ends, in addition to its deadline (`timeout` of ``start``).

    A client that lets a deadline pass, or is not waited for twice in a row, sits out
    the next round, then two, then four, …, until it replies, unless too few others are
    there. What is not said to be of training or of the collection window holds for
    evaluation, too.

    Parameters
    ----------
    enough_fraction : float, default 1
        A request to clients ends when this share of the replies that it wanted are
        usable. In (0, 1]; below 1 the result depends on who is fast.
    enough_replies : int, optional
        Or so many, if that is less. The only such limit of a collection window. Never
        fewer than ``min_train_nodes``.
    over_selection : float, default 0
        How many more clients are asked to train than are wanted, as a share of those,
        so that stragglers need not be waited for (Bonawitz et al. 2019, who ask 30 %
        more).
    window : float, optional
        Seconds of a collection window, in place of the deadline of a request to train.
        While it is open clients are asked as they connect. One whose node dies, or
        whose ClientApp is killed, is asked again a minute later, if it is there, then
        two, four, …; with a ``checkpoint_dir`` one that is silent after an hour, two,
        four, …, since a node that was restarted has forgotten what it was to do. It is
        as long as this over all lives of a server with a ``checkpoint_dir``.
    on_failed_round : "raise" | "skip", default "raise"
        What becomes of a round with too few usable replies: the run ends with a
        ``RoundError`` and can be resumed there, or the round changes nothing, and the
        run goes on, as with Flower's own strategies.

    Raises
    ------
    ConfigurationError
        If a number is out of range, or a window asks more clients than there are.

    Examples
    --------
    >>> Waiting(over_selection=0.3).to_ask(10)
    13
    >>> Waiting(enough_fraction=0.8).enough(10)
    8
    """

    enough_fraction: float = 1.0
    enough_replies: int | None = None
    over_selection: float = 0.0
    window: float | None = None
    on_failed_round: str = "raise"

    def __post_init__(self) -> None:
        check_range("enough_fraction", self.enough_fraction, 0, 1)
        check_positive("enough_fraction", self.enough_fraction)
        if self.enough_replies is not None:
            check_whole("enough_replies", self.enough_replies, 1)
        check_positive("over_selection", self.over_selection, or_zero=True)
        check_known("on_failed_round", self.on_failed_round, _ON_FAILED_ROUND)
        if self.window is None:
            return
        check_positive("window", self.window)
        for name, default in (("enough_fraction", 1), ("over_selection", 0)):
            if getattr(self, name) != default:
                raise ConfigurationError(
                    f"{name} is a part of the sampled clients, but a window asks all "
                    "that connect: pass enough_replies instead"
                )

    def to_ask(self, wanted: int) -> int:
        """Return how many clients to ask for a number of replies."""
        return ceil(round(wanted * (1 + self.over_selection), 9))

    def enough(self, wanted: int) -> float:
        """Return how many usable replies end a request for a number of replies."""
        share = ceil(round(wanted * self.enough_fraction, 9))
        return min(share, inf if self.enough_replies is None else self.enough_replies)

    @property
    def enough_in_window(self) -> float:
        """The number of usable replies that closes the window."""
        return inf if self.enough_replies is None else self.enough_replies
