"""The server's half of a secure sum: each exchange becomes a few, and sees sums alone.

An exchange whose uploads a step adds up is replaced by these, in which nobody but a
client itself sees its contribution:

``keys``, ``shares``
    once a round: public keys, and shares of the secrets behind them, passed on sealed;
``exponents``, ``open``
    clients do what the exchange asks of them, keep it, and tell under masks how large
    it is; then what opens the sum;
``values``, ``open``
    the contributions in fixed point, under masks, and what opens their sum.

Then the exchange's own step takes the sum for one client's upload. Who leaves after the
shares is left out of the sums that follow, and cannot come back in that round: no sum
is ever asked for again of fewer clients.

Long: a third of it is what the user's option says of itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.errors import ConfigurationError, check_range, check_whole
from flwr_fisher.params import Params
from flwr_fisher.secure import steps
from flwr_fisher.secure.aggregator import degree_for
from flwr_fisher.secure.fixed_point import word_type
from flwr_fisher.secure.payload import SecureUpload, WordSums, rows_of
from flwr_fisher.secure.steps import GROUP, SecureState, signed
from flwr_fisher.server.exchange import (
    Exchange,
    Groups,
    ServerState,
    Step,
    Summation,
    Uploads,
)
from flwr_fisher.server.privacy import Privacy

_PART = "secure sum"  # what the log calls these exchanges
JOB = "secure-sums"  # what a client without the mod refuses
_Send = Callable[[SecureState, int], dict[str, Tensor]]
_Take = Callable[[ServerState, Uploads[SecureUpload]], Step]


@dataclass(frozen=True, kw_only=True)
class SecureSums:
    """That the server sees sums over clients, and no client's upload.

    SecAgg+ (Bell et al., CCS 2020): each client's contribution is hidden by masks that
    it agrees on with its neighbours, which cancel in the sum. What a malicious server
    can still do, and what stops it, is told in docs/secure-sums.md. Clients take part
    by :class:`SecureSumsMod`.

    Parameters
    ----------
    bits : 32 | 64, default 32
        Of a word. The sum of a tensor whose largest entry is below ``2**e`` is off by
        at most ``clients / 2 * 2**-(bits - 1 - ceil(log2(clients + 1)) - e)``.
    threshold : float, default 0.55
        The share of a client's neighbours, more than a half, that must still be there
        to open what it has masked. The rest may leave. Two thirds are for servers that
        may tell clients different things.
    neighbours : int, optional
        With how many others each client shares its secrets. Default: with all, up to 40
        clients; then as many as make it unlikely that a fifth of all clients, who leave
        or are in league with the server, are too many of one's neighbours.

    Raises
    ------
    ConfigurationError
        If a value is out of range.

    Examples
    --------
    ::

        strategy = FedFisherOneShot(aggregate="sums", secure=SecureSums())
    """

    bits: int = 32
    threshold: float = 0.55
    neighbours: int | None = None

    def __post_init__(self) -> None:
        word_type(self.bits)
        check_range("threshold", self.threshold, 0.5, 1)
        if self.neighbours is not None:
            check_whole("neighbours", self.neighbours, 2)

    def settings(self) -> dict[str, Any]:
        """Return what a resumed run must have in common."""
        return asdict(self)

    def degree(self, clients: int) -> int:
        """Return with how many others a client of so many shares its secrets."""
        if self.neighbours is None:
            return degree_for(clients, self.threshold)
        return min(self.neighbours, clients - 1)

    def check(self, exchanges: Sequence[Exchange[Any]], who: str) -> None:
        """Raise :class:`ConfigurationError` unless sums can take uploads' place."""
        if any(exchange.additive is None for exchange in exchanges):
            raise ConfigurationError(
                f"a round of {who}, as it is set up, takes more than sums of its "
                "clients' uploads: leave secure= out"
            )

    def secured(
        self, exchanges: Sequence[Exchange[Any]], *, seed: str, weighted_by: str
    ) -> list[Exchange[SecureUpload]]:
        """Return the exchanges of a round as secure sums.

        Parameters
        ----------
        exchanges : Sequence[Exchange]
            The round's, each of which has an ``additive``.
        seed : str
            Of who is whose neighbour.
        weighted_by : str
            The metric that weights clients.
        """
        stages = _Stages(self, weighted_by)
        replaced = [
            stages.keys(exchanges[0], 2 * len(exchanges), seed),
            stages.stage("shares", 0, steps.take_shares, _neighbours),
        ]
        for place, exchange in enumerate(exchanges):
            replaced += stages.of(exchange, 2 * place, exchange is exchanges[-1])
        return replaced


@dataclass(frozen=True)
class _Stage(Exchange[SecureUpload]):
    """An exchange of a secure sum, in which each client may be sent its own groups."""

    send_each: Callable[[ServerState], Callable[[int], Groups]] | None = None
    part: str = ""  # what the log calls it

    def records(self, state: ServerState) -> Callable[[int], ArrayRecord]:
        """Return what makes a client's record, by the client's number."""
        if self.send_each is None:
            return super().records(state)
        own = self.send_each(state)
        return lambda number: self.arrays(state, own(number))


@dataclass(frozen=True)
class _Stages:
    """Makes the exchanges of each stage."""

    secure: SecureSums
    weighted_by: str

    def keys(
        self, first: Exchange[Any], sums: int, seed: str
    ) -> Exchange[SecureUpload]:
        """Ask for public keys: of whom, as the round's first exchange says."""
        return _Stage(
            self._options("keys", 0) | {"secure-sums": sums},
            SecureUpload.from_arrays,
            partial(
                steps.take_keys, self.secure.degree, self.secure.threshold, sums, seed
            ),
            start=_nothing,
            clients=first.clients,
            require_same_parameters=first.require_same_parameters,
            part=f"{_PART}, keys",
        )

    def of(
        self, exchange: Exchange[Any], index: int, last: bool
    ) -> list[Exchange[SecureUpload]]:
        """Ask for the exponents and the values, and open both sums."""
        assert exchange.additive is not None
        own_job = exchange.options.get("job", "train")
        asked = {**exchange.options, **self._options("exponents", index)}
        asked["secure-job"] = own_job
        if exchange.additive.weighted:
            asked["secure-weighted"] = True
        privacy = exchange.additive.privacy
        of_exponents, of_values = WordSums(), WordSums()
        exponents = _Stage(
            asked,
            SecureUpload.from_arrays,
            partial(steps.take_words, index, of_exponents, privacy),
            send=exchange.send,
            start=exchange.start,
            clients=_present,
            send_each=_each(
                partial(_bounds, privacy, _sealed_shares if index == 0 else _no_more)
            ),
            additive=Summation(total=of_exponents, alone=False),
            part=f"{_PART}, how large contribution {1 + index // 2} is",
        )
        values = index + 1
        take_words = partial(steps.take_words, values, of_values, privacy)
        taken = partial(steps.open_values, values, self.secure.bits, exchange, last)
        return [
            exponents,
            self.stage("open", index, partial(steps.open_exponents, index), _sets),
            replace(
                self.stage("values", values, take_words, self._exponents),
                additive=Summation(total=of_values, alone=False),
            ),
            self.stage("open", values, taken, _sets),
        ]

    def stage(
        self, stage: str, index: int, step: _Take, send: _Send
    ) -> Exchange[SecureUpload]:
        """Ask those who are present, and send each its own."""
        return _Stage(
            self._options(stage, index),
            SecureUpload.from_arrays,
            step,
            start=_nothing,
            clients=_present,
            send_each=_each(send),
            part=f"{_PART}, {stage}",
        )

    def _options(self, stage: str, index: int) -> dict[str, str | int | float]:
        return {
            "job": JOB,
            "secure": stage,
            "secure-sum": index,
            "secure-weight": self.weighted_by,
        }

    def _exponents(self, known: SecureState, number: int) -> dict[str, Tensor]:
        return {
            "exponents": torch.tensor(known.exponents, dtype=torch.int64),
            "clients": torch.tensor(len(known.aggregator.public)),
            "bits": torch.tensor(self.secure.bits),
        }


# What each stage sends, to whom


def _nothing(state: ServerState) -> Params:
    return {}


def _present(state: ServerState) -> Sequence[int]:
    return SecureState.of(state).present


def _each(send: _Send) -> Callable[[ServerState], Callable[[int], Groups]]:
    """Return what sends each client its own, and the number of its session."""

    def of(state: ServerState) -> Callable[[int], Groups]:
        known = SecureState.of(state)  # once for all clients

        def own(number: int) -> Groups:
            session = rows_of([known.sessions[number]])[0]
            return {GROUP: {"session": session, **send(known, number)}}

        return own

    return of


def _bounds(
    privacy: Privacy | None, send: _Send, known: SecureState, number: int
) -> dict[str, Tensor]:
    """Return also how far a contribution is clipped, and what noise it is to have."""
    sent = send(known, number)
    if privacy is None:
        return sent
    deviation = privacy.share(len(known.aggregator.public))
    bounds = torch.tensor([privacy.clipping_norm, deviation], dtype=torch.float64)
    return {**sent, "bounds": bounds}


def _no_more(known: SecureState, number: int) -> dict[str, Tensor]:
    return {}


def _neighbours(known: SecureState, number: int) -> dict[str, Tensor]:
    around = known.aggregator.keys_for(number)
    return {
        "neighbours": signed(list(around)),
        "keys": rows_of([b"".join(keys) for keys in around.values()]),
        "signatures": rows_of([known.signatures[n] for n in around]),
        "threshold": torch.tensor(known.aggregator.threshold),
    }


def _sealed_shares(known: SecureState, number: int) -> dict[str, Tensor]:
    sealed = known.aggregator.sealed_shares_for(number)
    commitments = known.aggregator.commitments_for(number)
    rows = [b"".join(a + b for a, b in pairs) for pairs in commitments.values()]
    return {
        "senders": signed(list(sealed)),
        "sealed-shares": rows_of(list(sealed.values())),
        "commitments": rows_of(rows),
    }


def _sets(known: SecureState, number: int) -> dict[str, Tensor]:
    survivors, dropped = known.aggregator.split(number, known.present)
    return {"survivors": signed(survivors), "dropped": signed(dropped)}
