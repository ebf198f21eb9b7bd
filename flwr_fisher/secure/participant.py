"""One client of a secure sum: its secrets, and its rules for using them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_bytes

import numpy as np
from cryptography.fernet import InvalidToken

from flwr_fisher.errors import ClientError
from flwr_fisher.flower_internals import create_shares, decrypt, encrypt
from flwr_fisher.secure import crypto
from flwr_fisher.secure.crypto import SEED, noise
from flwr_fisher.secure.fixed_point import LEVELS, Words, unary

PublicKeys = Sequence[bytes]
"""Of one client: that of its channel, and one for each sum."""


@dataclass
class Participant:
    """A client's secrets for a number of sums, with a record of their use.

    A sum is masked once, and opened once. A second time, with another content or for
    another set of clients, the difference would reveal what the mask must hide.

    Parameters
    ----------
    number : int
        The client's number.
    channel : bytes
        The seed of the key that seals shares.
    seeds : list[bytes]
        For each sum two: of the key that the client agrees on with each neighbour, and
        of the mask that it shares with nobody (:func:`crypto.position`).
    private : bytes
        The seed of random numbers that are never revealed.
    threshold : int
        How many shares reveal a secret.
    neighbours : dict[int, list[bytes]]
        The public keys of the neighbourhood, itself included.
    shares : dict[int, bytes]
        By neighbour: for each sum, the shares of both secrets of this neighbour.
    masked, opened : dict[int, str]
        By sum: a digest of what was masked, and for which clients the sum was opened.
    """

    number: int
    channel: bytes
    seeds: list[bytes]
    private: bytes
    threshold: int = 0
    neighbours: dict[int, list[bytes]] = field(default_factory=dict)
    shares: dict[int, bytes] = field(default_factory=dict)
    masked: dict[int, str] = field(default_factory=dict)
    opened: dict[int, str] = field(default_factory=dict)

    @classmethod
    def new(cls, number: int, sums: int) -> "Participant":
        """Draw the secrets for a number of sums."""
        channel, private, *seeds = (token_bytes(SEED) for _ in range(2 + 2 * sums))
        return cls(number, channel, seeds, private)

    @property
    def sums(self) -> int:
        """The number of sums for which it has secrets."""
        return len(self.seeds) // 2

    def public(self) -> list[bytes]:
        """Return the public keys: one of the channel, and one of each sum."""
        pairwise = [self._seed(index, self_mask=False) for index in range(self.sums)]
        return [crypto.public_of(seed) for seed in (self.channel, *pairwise)]

    def share(
        self, neighbours: Mapping[int, PublicKeys], threshold: int
    ) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Split the secrets into shares for a neighbourhood.

        Parameters
        ----------
        neighbours : Mapping[int, Sequence[bytes]]
            The public keys of all clients in the neighbourhood, including its own.
        threshold : int
            How many shares will reveal a secret.

        Returns
        -------
        sealed : dict[int, bytes]
            For each other neighbour, shares that only it can read.
        commitments : dict[int, bytes]
            For each neighbour, itself included, digests that identify these shares.

        Raises
        ------
        ClientError
            If the keys lack this client's own or repeat one, if the secrets were
            already shared in another neighbourhood, or if the threshold is not more
            than half of it.
        """
        public = {n: list(keys) for n, keys in neighbours.items()}
        self._check_neighbours(public, threshold)
        self.threshold, self.neighbours = threshold, public
        order = sorted(neighbours)
        cut = [create_shares(seed, threshold, len(order)) for seed in self.seeds]
        shares = dict(zip(order, map(b"".join, zip(*cut, strict=True)), strict=True))
        self.shares = {self.number: shares[self.number]}
        sealed = {
            n: encrypt(self._channel_to(n), _header(self.number, n) + row)
            for n, row in shares.items()
            if n != self.number
        }
        return sealed, {n: crypto.commitments(row) for n, row in shares.items()}

    def _check_neighbours(
        self, neighbours: dict[int, list[bytes]], threshold: int
    ) -> None:
        if neighbours.get(self.number) != self.public():
            raise ClientError(
                f"in the server's list, the public keys of client {self.number} are "
                "not this client's own: they were changed, or are another run's"
            )
        every = [key for public in neighbours.values() for key in public]
        if len(set(every)) < len(every):
            raise ClientError(
                "the server sent the same public key for two clients, or twice"
            )
        if self.neighbours and self.neighbours != neighbours:
            raise ClientError(
                "the server sent another neighbourhood than before, but secrets are "
                "split into shares only once"
            )
        if not len(neighbours) // 2 < threshold <= len(neighbours):
            raise ClientError(
                f"the server's threshold is {threshold} of {len(neighbours)} shares, "
                "but it must be more than half: otherwise the server could open both "
                "secrets"
            )

    def receive(
        self, sealed: Mapping[int, bytes], commitments: Mapping[int, bytes]
    ) -> None:
        """Open the shares of the neighbours that take part.

        Raises
        ------
        ClientError
            If they are too few. Also if a neighbour's shares are not for this client,
            do not fit its commitments, or differ from those that it sent before; it
            names the neighbour.
        """
        received = {self.number: self.shares[self.number]}
        for sender in sorted(sealed):
            if sender not in self.neighbours or sender == self.number:
                raise ClientError(f"shares came from {sender}, which is no neighbour")
            try:
                text = decrypt(self._channel_to(sender), sealed[sender])
            except InvalidToken as error:
                raise ClientError(
                    f"the shares from {sender} were sealed with another key, or changed"
                ) from error
            header = _header(sender, self.number)
            if not text.startswith(header):
                raise ClientError(f"the shares from {sender} are not for {self.number}")
            received[sender] = text.removeprefix(header)
            if crypto.commitments(received[sender]) != commitments.get(sender):
                raise ClientError(
                    f"the shares from {sender} do not fit its commitments"
                )
        if len(received) < self.threshold:
            raise ClientError(
                f"only {len(received)} of {len(self.neighbours)} neighbours take part, "
                f"but {self.threshold} are needed to open secrets"
            )
        if len(self.shares) > 1 and self.shares != received:
            raise ClientError("the server sent other shares than before")
        self.shares = received

    def mask(self, index: int, words: Words) -> Words:
        """Return words with the masks of a sum.

        Raises
        ------
        ClientError
            If something else was masked for this sum before, or no shares have arrived.
        """
        if len(self.shares) < max(self.threshold, 1):
            raise ClientError(
                "no shares of neighbours have arrived, so this client masks nothing"
            )
        content = hashlib.sha256(words.tobytes()).hexdigest()
        if self.masked.setdefault(index, content) != content:
            raise ClientError(
                f"this client masked other content for sum {index} before, and the "
                "difference would reveal it"
            )
        masked = words.copy()
        crypto.mask(masked, self._seed(index, self_mask=True))
        for number in self.shares:
            if number != self.number:
                seed = self._seed(index, self_mask=False)
                key = crypto.agreed(seed, self.neighbours[number][1 + index])
                first = self.number < number
                crypto.mask(masked, key, np.add if first else np.subtract)
        return masked

    def exponents(self, index: int, exponents: Sequence[int]) -> Words:
        """Return the masked words that reveal the clients' highest exponents.

        Raises
        ------
        ClientError
            As for :meth:`mask`.
        """
        words = noise(self.private + b" %d" % index, len(exponents) * LEVELS)
        return self.mask(index, unary(exponents, words))

    def open(
        self, index: int, survivors: Sequence[int], dropped: Sequence[int]
    ) -> dict[int, bytes]:
        """Return the shares that open a sum: one of one secret of each neighbour.

        Parameters
        ----------
        index : int
            The sum.
        survivors : Sequence[int]
            This client's neighbours in the sum, itself included. For them it returns
            the shares of their own masks.
        dropped : Sequence[int]
            The other neighbours. For them it returns the shares of the keys of their
            pairwise masks, which are still in the sum.

        Raises
        ------
        ClientError
            If these are not its neighbours, each once; if they are too few; if it is
            not in the sum itself; or if it has already opened the sum for other
            clients.
        """
        if sorted([*survivors, *dropped]) != sorted(self.shares):
            raise ClientError(
                "the server requests shares of clients that are no neighbours"
            )
        if index not in self.masked or self.number not in survivors:
            raise ClientError(
                f"this client is not in sum {index}, so it does not help to open it"
            )
        if len(survivors) < self.threshold:
            raise ClientError(
                f"only {len(survivors)} of this client's neighbours are in sum "
                f"{index}, but {self.threshold} are needed"
            )
        split = json.dumps([sorted(survivors), sorted(dropped)])
        if self.opened.setdefault(index, split) != split:
            raise ClientError(
                f"this client opened sum {index} before for another set of clients, "
                "and both together would reveal one of them"
            )
        return {
            number: crypto.pieces(self.shares[number], crypto.SHARE)[
                crypto.position(index, self_mask=number in survivors)
            ]
            for number in (*survivors, *dropped)
        }

    def _seed(self, index: int, *, self_mask: bool) -> bytes:
        return self.seeds[crypto.position(index, self_mask=self_mask)]

    def _channel_to(self, number: int) -> bytes:
        return crypto.agreed(self.channel, self.neighbours[number][0])


def _header(sender: int, receiver: int) -> bytes:
    """Return a header with sender and receiver, against returned messages."""
    return b"%d to %d: " % (sender, receiver)
