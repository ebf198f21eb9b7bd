r"""Who shares secrets with whom: each client with a few, drawn at random.

In SecAgg+ (Bell et al., CCS 2020) clients stand on a ring in a random order, and each
shares secrets with the next :math:`k/2` on both sides. Up to :data:`EVERYONE` clients
share with all others, as in Bonawitz et al. (CCS 2017).
"""

import math
import random
from collections.abc import Sequence

from flwr_fisher.errors import ConfigurationError, check_range

EVERYONE = 40  # clients, up to which each shares with all
_SECURITY, _CORRECTNESS = 40, 20  # bits: chances that a secret, or the sum, is lost
_CORRUPT, _DROPPED = 0.2, 0.2  # shares of the clients that these chances allow for


def neighbourhoods(numbers: Sequence[int], degree: int, seed: int) -> list[list[int]]:
    """Return each client's neighbourhood, itself included, sorted.

    Parameters
    ----------
    numbers : Sequence[int]
        The clients.
    degree : int
        How many others a client shares with; one less where the ring's halves are not
        equal. All, where there are no more.
    seed : int
        Of the order on the ring.

    Examples
    --------
    >>> neighbourhoods([7, 8, 9], 2, seed=0)
    [[7, 8, 9], [7, 8, 9], [7, 8, 9]]
    """
    count = len(numbers)
    if degree >= count - 1:
        return [sorted(numbers)] * count
    order = sorted(numbers)
    random.Random(seed).shuffle(order)
    place = {number: index for index, number in enumerate(order)}
    half = degree // 2
    return [
        sorted(order[(place[n] + step) % count] for step in range(-half, half + 1))
        for n in numbers
    ]


def threshold_of(size: int, share: float) -> int:
    """Return how many of a neighbourhood must answer to open what one of it shared.

    More than half: else a server could open both of a client's secrets, by telling one
    half that it has left and the other that it has not.

    Examples
    --------
    >>> [threshold_of(size, 2 / 3) for size in (2, 3, 5, 6)]
    [2, 2, 4, 4]
    """
    check_range("threshold", share, 0, 1)
    return min(size, max(math.ceil(share * size - 1e-9), size // 2 + 1))


def degree_for(clients: int, share: float) -> int:
    r"""Return how many others a client shares with.

    The least even number for which, with a fifth of all clients in league with the
    server and a fifth leaving, drawn at random: of no client's secret enough shares are
    in the wrong hands (:math:`2^{-40}`, over all clients), and of every secret enough
    are there (:math:`2^{-20}`). Up to 40 clients share with all others.

    Parameters
    ----------
    clients : int
        How many there are.
    share : float
        The threshold, as for :func:`threshold_of`.

    Raises
    ------
    ConfigurationError
        If there is no such number: then the threshold is too near to one half, or to 1.

    Examples
    --------
    >>> degree_for(5, 2 / 3), degree_for(1000, 0.55) < 200
    (4, True)
    """
    if clients <= EVERYONE:
        return clients - 1
    for degree in range(EVERYONE, clients, 2):
        needed = threshold_of(degree + 1, share)
        # Its own share counts, and the client itself is neither corrupt nor gone.
        corrupt = _at_least(needed - 1, degree, clients - 1, _CORRUPT)
        gone = _at_least(degree + 2 - needed, degree, clients - 1, _DROPPED)
        secure = corrupt + math.log2(clients) <= -_SECURITY
        if secure and gone + math.log2(clients) <= -_CORRECTNESS:
            return degree
    if clients <= 2 * EVERYONE:
        return clients - 1
    raise ConfigurationError(
        f"threshold={share:g} is too near to one half or to 1 for {clients} clients, a "
        "fifth of whom may leave: take 0.6, or set the number of neighbours"
    )


def _at_least(wanted: int, drawn: int, total: int, share: float) -> float:
    """Return log2 of the chance to draw so many of a share of all, without return."""
    marked = math.floor(share * total)
    logs = [
        _log_choose(marked, hit) + _log_choose(total - marked, drawn - hit)
        for hit in range(max(wanted, 0), min(drawn, marked) + 1)
        if drawn - hit <= total - marked
    ]
    if not logs:
        return -math.inf
    top = max(logs)
    summed = top + math.log(sum(math.exp(value - top) for value in logs))
    return (summed - _log_choose(total, drawn)) / math.log(2)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
