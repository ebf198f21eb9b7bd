"""The end of a round's wait: its deadline, its window, or enough replies."""

from math import ceil, inf, isfinite

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.options import Options, option


class Waiting(Options):
    """When a round ends, in addition to its deadline (`timeout` of ``start``).

    A client that misses a deadline sits out the next round. If it misses more, it sits
    out two rounds, four, …, until it replies. If too few other clients are connected,
    it is asked nonetheless. Options that are not for training or for a collection
    window also apply to evaluation.

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

    enough_fraction: float = option(
        1.0,
        "A request ends when this share of the wanted replies has arrived and is "
        "usable. Below 1 the result depends on which clients are fast.",
        above=0,
        high=1,
    )
    enough_replies: int | None = option(
        None,
        "A request also ends when this many replies are usable, but not with fewer "
        "than ``min_train_nodes``. In a collection window only this limit applies, not "
        "`enough_fraction`.",
        low=1,
    )
    over_selection: float = option(
        0.0,
        "How many additional clients are asked to train, as a share of the wanted "
        "ones, so that the server need not wait for slow clients (Bonawitz et al. 2019 "
        "ask 30 % more).",
        low=0,
    )
    window: float | None = option(
        None,
        "Seconds of a collection window, which replaces the deadline of a request to "
        "train. While it is open, clients are asked when they connect. If a client's "
        "node dies, or its ClientApp is killed, the client is asked again after one "
        "minute, if it is connected, then after two, four, …. With a "
        "``checkpoint_dir``, a silent client is asked again after an hour, two, four, "
        "…, because a node that was restarted has forgotten the request; and the "
        "window has this length in total, even if the server is restarted.",
        above=0,
    )
    on_failed_round: str = option(
        "raise",
        "What happens after a round with too few usable replies. ``raise``: the run "
        "ends with a ``RoundError``, and can be resumed there. ``skip``: the round "
        "changes nothing, and the run goes on, as with Flower's own strategies.",
        choices=("raise", "skip"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isfinite(self.over_selection):
            raise ConfigurationError("over_selection must be finite")
        if self.window is not None and (self.enough_fraction, self.over_selection) != (
            1.0,
            0.0,
        ):
            raise ConfigurationError(
                "enough_fraction and over_selection do not go with a window, which "
                "asks all that connect: pass enough_replies"
            )

    def to_ask(self, wanted: int) -> int:
        """Return how many clients to ask for a number of replies."""
        return ceil(round(wanted * (1 + self.over_selection), 9))

    def enough(self, wanted: int | None) -> float:
        """Return how many usable replies end a request for a number of replies.

        The number is None in a collection window, which takes all that come.
        """
        limit = inf if self.enough_replies is None else self.enough_replies
        if wanted is None:
            return limit
        return min(limit, ceil(round(wanted * self.enough_fraction, 9)))
