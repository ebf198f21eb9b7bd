"""The server of a secure sum: it passes on keys and shares, and takes masks away."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flwr_fisher.errors import RoundError, WireError
from flwr_fisher.log_lines import logger
from flwr_fisher.secure import keys
from flwr_fisher.secure.fixed_point import Words
from flwr_fisher.secure.masks import MaskedWords
from flwr_fisher.secure.participant import Pair


@dataclass(frozen=True)
class Sealed:
    """What a client has sent to its neighbours.

    Parameters
    ----------
    shares : Mapping[int, bytes]
        By neighbour, sealed.
    commitments : Mapping[int, Sequence[tuple[bytes, bytes]]]
        By neighbour, itself included: for each sum, of both shares.
    """

    shares: Mapping[int, bytes]
    commitments: Mapping[int, Sequence[Pair]]


@dataclass(frozen=True)
class Aggregator:
    """What the server knows of the clients of its sums; none of it is secret.

    Parameters
    ----------
    names : Mapping[int, str]
        What each client's number stands for in messages.
    public : Mapping[int, Sequence[bytes]]
        Their public keys: of the channel, and of each sum.
    neighbourhoods : Mapping[int, Sequence[int]]
        Of each, sorted, itself included.
    threshold : int
        How many shares tell a secret.
    sealed : Mapping[int, Sealed]
        What those have sent that take part; at first of nobody.
    """

    names: Mapping[int, str]
    public: Mapping[int, Sequence[bytes]]
    neighbourhoods: Mapping[int, Sequence[int]]
    threshold: int
    sealed: Mapping[int, Sealed] = field(default_factory=dict)

    def keys_for(self, number: int) -> dict[int, Sequence[bytes]]:
        """Return the public keys of a client's neighbourhood."""
        return {n: self.public[n] for n in self.neighbourhoods[number]}

    def shared(self, sealed: Mapping[int, Sealed]) -> "Aggregator":
        """Return it with what clients have sent to their neighbours.

        Raises
        ------
        RoundError
            If of some client so few neighbours take part that it could not be opened.
        """
        new = replace(self, sealed=sealed)
        for number in sealed:
            present = len(new.peers(number))
            if present < self.threshold:
                gone = [n for n in self.neighbourhoods[number] if n not in sealed]
                raise RoundError(
                    f"{present} of the {len(self.neighbourhoods[number])} neighbours "
                    f"of {self.names[number]} have shared secrets, and "
                    f"{self.threshold} are needed; not {self._listed(gone)}"
                )
        return new

    def peers(self, number: int) -> list[int]:
        """Return those of a neighbourhood that take part, itself included."""
        return [n for n in self.neighbourhoods[number] if n in self.sealed]

    def sealed_shares_for(self, number: int) -> dict[int, bytes]:
        """Return what a client's neighbours have sent to it."""
        others = [n for n in self.peers(number) if n != number]
        return {n: self.sealed[n].shares[number] for n in others}

    def commitments_for(self, number: int) -> dict[int, Sequence[Pair]]:
        """Return what they have committed to in it."""
        others = [n for n in self.peers(number) if n != number]
        return {n: self.sealed[n].commitments[number] for n in others}

    def split(
        self, number: int, survivors: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Return which of a client's peers are in a sum, and which have left."""
        present, peers = set(survivors), self.peers(number)
        return (
            [n for n in peers if n in present],
            [n for n in peers if n not in present],
        )

    def unmask(
        self,
        index: int,
        total: Words,
        survivors: Sequence[int],
        shares: Mapping[int, Mapping[int, bytes]],
    ) -> Words:
        """Return a sum's words without masks.

        Parameters
        ----------
        index : int
            The sum.
        total : numpy.ndarray
            The masked words of all survivors, added up.
        survivors : Sequence[int]
            Who is in it.
        shares : Mapping[int, Mapping[int, bytes]]
            By who has answered: the share of each of its peers, of its own mask if that
            is a survivor, of the key of its pairwise masks if not.

        Raises
        ------
        RoundError
            If too few shares of a secret have come, naming who did not answer, or
            answered with another share than it was given.
        """
        opened = MaskedWords(total)
        for number in survivors:
            opened.subtract(self._secret(index, 1, number, shares))
        for number in self.sealed.keys() - set(survivors):
            beside, _ = self.split(number, survivors)
            if not beside:
                continue
            seed = self._secret(index, 0, number, shares)
            if keys.public_of(seed) != self.public[number][1 + index]:
                raise RoundError(
                    f"{self.names[number]} has shared another key than its public one: "
                    f"sum {index} cannot be opened without it"
                )
            for other in beside:
                # What the survivor added for the client that has left.
                key = keys.agreed(seed, self.public[other][1 + index])
                (opened.subtract if other < number else opened.add)(key)
        return opened.words

    def _secret(
        self,
        index: int,
        which: int,
        number: int,
        shares: Mapping[int, Mapping[int, bytes]],
    ) -> bytes:
        """Return one of a client's secrets for a sum, from its neighbours' shares."""
        good: list[bytes] = []
        wrong: list[int] = []
        missing: list[int] = []
        for peer in self.peers(number):
            share = shares.get(peer, {}).get(number)
            if share is None:
                missing.append(peer)
            elif (
                keys.commitment(share)
                != (self.sealed[number].commitments[peer][index][which])
            ):
                wrong.append(peer)
            else:
                good.append(share)
        if wrong:
            logger.warning(
                "aggregate_train: not the share of %s's secret that it was given, "
                "from %s",
                self.names[number],
                self._listed(wrong),
            )
        if len(good) < self.threshold:
            blamed = (("no answer from", missing), ("wrong ones from", wrong))
            reasons = [f"{text} {self._listed(who)}" for text, who in blamed if who]
            raise RoundError(
                f"{len(good)} shares of the secret of {self.names[number]} have come, "
                f"and {self.threshold} are needed to open sum {index}: "
                f"{'; '.join(reasons)}; nothing of it can be seen"
            )
        try:
            return keys.combined(good[: self.threshold])
        except WireError as error:
            raise RoundError(f"the secret of {self.names[number]}: {error}") from error

    def _listed(self, numbers: Sequence[int]) -> str:
        return ", ".join(self.names[number] for number in numbers)


def added(parts: Sequence[Words]) -> Words:
    """Return the sum of words, modulo 2**bits."""
    total = np.zeros_like(parts[0])
    for part in parts:
        np.add(total, part, out=total)
    return total
