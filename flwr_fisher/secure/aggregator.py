r"""The server of a secure sum: it passes on keys and shares, and removes masks.

In SecAgg+ (Bell et al., CCS 2020) clients stand on a ring in a random order, and each
shares secrets with the next :math:`k/2` on both sides. Up to :data:`EVERYONE` clients
share with all others, as in Bonawitz et al. (CCS 2017).
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flwr_fisher.errors import RoundError, check_range, listed
from flwr_fisher.flower_internals import combine_shares
from flwr_fisher.log_lines import logger
from flwr_fisher.secure import crypto
from flwr_fisher.secure.fixed_point import Words


@dataclass(frozen=True)
class Sealed:
    """A client's sealed shares for its neighbours, and its commitments.

    Parameters
    ----------
    shares : Mapping[int, bytes]
        The sealed shares, by neighbour.
    commitments : Mapping[int, bytes]
        By neighbour, itself included: for each sum, the commitments to both shares.
    """

    shares: Mapping[int, bytes]
    commitments: Mapping[int, bytes]


@dataclass(frozen=True)
class Aggregator:
    """The server's state of a secure sum; none of it is secret.

    Parameters
    ----------
    names : Mapping[int, str]
        Each client's name in messages, by its number.
    public : Mapping[int, Sequence[bytes]]
        The clients' public keys: one for the channel, and one for each sum.
    neighbourhoods : Mapping[int, Sequence[int]]
        Each client's neighbours, sorted, itself included.
    threshold : int
        How many shares reveal a secret.
    sealed : Mapping[int, Sealed]
        What the clients that take part have sent; empty at first.
    """

    names: Mapping[int, str]
    public: Mapping[int, Sequence[bytes]]
    neighbourhoods: Mapping[int, Sequence[int]]
    threshold: int
    sealed: Mapping[int, Sealed] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        names: Mapping[int, str],
        public: Mapping[int, Sequence[bytes]],
        share: float,
        seed: str,
    ) -> "Aggregator":
        """Return the state for clients' public keys, with neighbours that are drawn.

        `share` is that of :func:`threshold_of`; `seed` decides the order on the ring.
        """
        drawn = random.Random(seed).getrandbits(62)
        around = neighbourhoods(list(public), degree_for(len(public), share), drawn)
        needed = threshold_of(len(around[0]), share)
        return cls(names, public, dict(zip(public, around, strict=True)), needed)

    def keys_for(self, number: int) -> dict[int, Sequence[bytes]]:
        """Return the public keys of a client's neighbourhood."""
        return {n: self.public[n] for n in self.neighbourhoods[number]}

    def shared(self, sealed: Mapping[int, Sealed]) -> "Aggregator":
        """Return the state with the clients' shares for their neighbours.

        Raises
        ------
        RoundError
            If so few neighbours of a client take part that its secrets could not be
            opened.
        """
        new = replace(self, sealed=sealed)
        for number in sealed:
            present = len(new.peers(number))
            if present < self.threshold:
                gone = [n for n in self.neighbourhoods[number] if n not in sealed]
                raise RoundError(
                    f"only {present} of the {len(self.neighbourhoods[number])} "
                    f"neighbours of {self.names[number]} have shared secrets, but "
                    f"{self.threshold} are needed. Missing: {self._listed(gone)}"
                )
        return new

    def peers(self, number: int) -> list[int]:
        """Return the clients of a neighbourhood that take part, itself included."""
        return [n for n in self.neighbourhoods[number] if n in self.sealed]

    def received_by(self, number: int) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Return the sealed shares and commitments of a client's neighbours for it."""
        others = {n: self.sealed[n] for n in self.peers(number) if n != number}
        shares = {n: sealed.shares[number] for n, sealed in others.items()}
        return shares, {n: sealed.commitments[number] for n, sealed in others.items()}

    def split(
        self, number: int, survivors: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Return a client's peers in a sum, and those that have left."""
        present, peers = set(survivors), self.peers(number)
        here = [n for n in peers if n in present]
        return here, [n for n in peers if n not in present]

    def unmask(
        self,
        index: int,
        total: Words,
        survivors: Sequence[int],
        shares: Mapping[int, Mapping[int, bytes]],
    ) -> Words:
        """Return a sum's words with the masks removed.

        Parameters
        ----------
        index : int
            The sum.
        total : numpy.ndarray
            The sum of the masked words of all survivors.
        survivors : Sequence[int]
            The clients in the sum.
        shares : Mapping[int, Mapping[int, bytes]]
            By the client that answered: a share for each of its neighbours. It is a
            share of the neighbour's own mask if the neighbour is a survivor, and
            otherwise of the key of its pairwise masks.

        Raises
        ------
        RoundError
            If there are too few shares of a secret. It names the clients that did not
            answer, or that answered with another share than they had received.
        """
        opened = total.copy()
        # Each survivor's words have its own mask, which it shares with nobody.
        own_mask = crypto.position(index, self_mask=True)
        for number in survivors:
            crypto.mask(opened, self._secret(own_mask, number, shares), np.subtract)
        # Pairwise masks cancel between survivors. Those with a client that has left
        # remain; they follow from its key.
        pairwise = crypto.position(index, self_mask=False)
        for number in self.sealed.keys() - set(survivors):
            left_with, _ = self.split(number, survivors)
            if not left_with:
                continue
            seed = self._secret(pairwise, number, shares)
            if crypto.public_of(seed) != self.public[number][1 + index]:
                raise RoundError(
                    f"{self.names[number]} shared a key that does not fit its public "
                    f"one, so sum {index} cannot be opened"
                )
            for other in left_with:
                key = crypto.agreed(seed, self.public[other][1 + index])
                crypto.mask(opened, key, np.subtract if other < number else np.add)
        return opened

    def _secret(
        self, position: int, number: int, shares: Mapping[int, Mapping[int, bytes]]
    ) -> bytes:
        """Return one of a client's secrets, from its neighbours' shares."""
        good: list[bytes] = []
        lacking: list[int] = []
        for peer in self.peers(number):
            row = self.sealed[number].commitments[peer]
            expected = crypto.pieces(row, crypto.DIGEST)[position]
            share = shares.get(peer, {}).get(number)
            if share is not None and crypto.commitment(share) == expected:
                good.append(share)
                continue
            lacking.append(peer)
            if share is not None:
                text = "aggregate_train: wrong shares of %s's secret from %s"
                logger.warning(text, self.names[number], self.names[peer])
        if len(good) < self.threshold:
            raise RoundError(
                f"only {len(good)} shares of the secret of {self.names[number]} "
                f"arrived, but {self.threshold} are needed to open the sum: none, or "
                f"wrong ones, from {self._listed(lacking)}. The sum stays secret"
            )
        try:
            return combine_shares(good[: self.threshold])
        except ValueError as error:  # the client has shared something else
            raise RoundError(f"the secret of {self.names[number]}: {error}") from error

    def _listed(self, numbers: Sequence[int]) -> str:
        return listed(self.names[number] for number in numbers)


EVERYONE = 40  # clients up to which each shares with all others
_LEARNT, _LOST = 2**-40, 2**-20  # how likely the server learns a secret, or lacks one
_CORRUPT, _DROPPED = 0.2, 0.2  # shares of clients that are corrupt, or absent


def neighbourhoods(numbers: Sequence[int], degree: int, seed: int) -> list[list[int]]:
    """Return each client's neighbourhood, itself included, sorted.

    Parameters
    ----------
    numbers : Sequence[int]
        The clients.
    degree : int
        With how many others a client shares its secrets. It is one less if the halves
        of the ring are not equal, and all if there are no more clients.
    seed : int
        The seed of the order on the ring.

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
    """Return how many of a neighbourhood must answer to open a shared secret.

    It is more than half. Otherwise a server could open both of a client's secrets: it
    could tell one half that the client has left, and the other half that it has not.

    Examples
    --------
    >>> [threshold_of(size, 2 / 3) for size in (2, 3, 5, 6)]
    [2, 2, 4, 4]
    """
    check_range("threshold", share, 0, 1)
    return min(size, max(math.ceil(share * size - 1e-9), size // 2 + 1))


def degree_for(clients: int, share: float) -> int:
    r"""Return with how many other clients a client shares its secrets.

    It is the least even number that is safe if a random fifth of all clients works
    together with the server, and another fifth leaves. Safe means two things: the
    server gets enough shares of any client's secret with a probability of at most
    :math:`2^{-40}`, over all clients; and too few shares of a secret are left with a
    probability of at most :math:`2^{-20}`. Up to 40 clients share with all others, and
    so do more if no smaller number is safe.

    Parameters
    ----------
    clients : int
        The number of clients.
    share : float
        The threshold, as for :func:`threshold_of`.

    Examples
    --------
    >>> degree_for(5, 2 / 3), degree_for(1000, 0.55) < 200
    (4, True)
    """
    if clients <= EVERYONE:
        return clients - 1
    for degree in range(EVERYONE, clients, 2):
        needed = threshold_of(degree + 1, share)
        # Its own share counts; the client itself is neither corrupt nor absent.
        corrupt = _at_least(needed - 1, degree, clients - 1, _CORRUPT)
        gone = _at_least(degree + 2 - needed, degree, clients - 1, _DROPPED)
        if clients * corrupt <= _LEARNT and clients * gone <= _LOST:
            return degree
    return clients - 1


def _at_least(wanted: int, drawn: int, total: int, share: float) -> float:
    """Return the probability to draw `wanted` marked clients or more, of all clients.

    That is the tail of a hypergeometric distribution, where a share of all is marked.
    """
    marked = math.floor(share * total)
    return sum(
        math.comb(marked, hits) * math.comb(total - marked, drawn - hits)
        for hits in range(wanted, drawn + 1)
    ) / math.comb(total, drawn)
