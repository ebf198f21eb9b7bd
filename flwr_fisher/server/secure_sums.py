"""The server's half of a secure sum: each exchange becomes a few, and sees sums alone.

An exchange whose uploads a step adds up is replaced by these, in which nobody but a
client itself sees its summand:

``keys``, ``shares``
    once a round: public keys, and shares of the secrets behind them, passed on sealed;
``exponents``, ``open``
    clients do what the exchange asks of them, keep it, and tell under masks how large
    it is; then what opens the sum;
``values``, ``open``
    the summands in fixed point, under masks, and what opens their sum.

Then the exchange's own step takes the sum for one client's upload. Who leaves after the
shares is left out of the sums that follow, and cannot come back in that round: no sum
is ever asked for again of fewer clients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.params import Params
from flwr_fisher.secure.privacy import Privacy
from flwr_fisher.server import secure_steps as steps
from flwr_fisher.server.exchange import Exchange, Groups, ServerState, Step, Uploads
from flwr_fisher.server.running_sums import WordSums
from flwr_fisher.server.secure_options import SecureSums
from flwr_fisher.server.secure_state import GROUP, SecureState, rows_of, signed
from flwr_fisher.wire.secure_upload import SecureUpload

_Send = Callable[[SecureState, int], dict[str, Tensor]]
_Take = Callable[[ServerState, Uploads[SecureUpload]], Step]


def check_summed(exchanges: Sequence[Exchange[Any]], who: str) -> None:
    """Raise :class:`ConfigurationError` unless sums can take the uploads' place."""
    if any(exchange.summed is None for exchange in exchanges):
        raise ConfigurationError(
            f"a round of {who}, as it is set up, takes more than sums of its clients' "
            "uploads: leave secure= out"
        )


def secured(
    exchanges: Sequence[Exchange[Any]],
    secure: SecureSums,
    *,
    seed: str,
    weighted_by: str,
) -> list[Exchange[SecureUpload]]:
    """Return the exchanges of a round as secure sums.

    Parameters
    ----------
    exchanges : Sequence[Exchange]
        The round's, each of which has a ``summed``.
    secure : SecureSums
        How.
    seed : str
        Of who is whose neighbour.
    weighted_by : str
        The metric that weights clients.
    """
    stages = _Stages(secure, weighted_by)
    first = exchanges[0]
    replaced = [
        stages.keys(first, 2 * len(exchanges), seed),
        stages.stage("shares", 0, steps.take_shares, _neighbours),
    ]
    for place, exchange in enumerate(exchanges):
        replaced += stages.of(exchange, 2 * place, exchange is exchanges[-1])
    return replaced


@dataclass(frozen=True)
class _Stages:
    """Makes the exchanges of each stage."""

    secure: SecureSums
    weighted_by: str

    def keys(
        self, first: Exchange[Any], sums: int, seed: str
    ) -> Exchange[SecureUpload]:
        """Ask for public keys: of whom, as the round's first exchange says."""
        return Exchange(
            self._options("keys", 0) | {"secure-sums": sums},
            SecureUpload.from_arrays,
            partial(steps.take_keys, self.secure, sums, seed),
            start=_nothing,
            everyone=first.everyone,
            require_same_parameters=first.require_same_parameters,
            part="keys",
        )

    def of(
        self, exchange: Exchange[Any], index: int, last: bool
    ) -> list[Exchange[SecureUpload]]:
        """Ask for the exponents and the values, and open both sums."""
        assert exchange.summed is not None
        asked = {**exchange.options, **self._options("exponents", index)}
        if exchange.summed.weighted:
            asked["secure-weighted"] = True
        privacy = exchange.summed.privacy
        of_exponents, of_values = WordSums(), WordSums()
        exponents = Exchange(
            asked,
            SecureUpload.from_arrays,
            partial(steps.take_words, index, of_exponents, privacy),
            send=exchange.send,
            start=exchange.start,
            asks=_present,
            send_each=_each(
                partial(_bounds, privacy, _letters if index == 0 else _no_more)
            ),
            fold=of_exponents,
            part=f"how large summand {1 + index // 2} is",
        )
        values = index + 1
        take_words = partial(steps.take_words, values, of_values, privacy)
        taken = partial(steps.open_values, values, self.secure, exchange, last)
        return [
            exponents,
            self.stage("open", index, partial(steps.open_exponents, index), _sets),
            replace(
                self.stage("values", values, take_words, self._exponents),
                fold=of_values,
            ),
            self.stage("open", values, taken, _sets),
        ]

    def stage(
        self, stage: str, index: int, step: _Take, send: _Send
    ) -> Exchange[SecureUpload]:
        """Ask those who are present, and send each its own."""
        return Exchange(
            self._options(stage, index),
            SecureUpload.from_arrays,
            step,
            start=_nothing,
            asks=_present,
            send_each=_each(send),
            part=stage,
        )

    def _options(self, stage: str, index: int) -> dict[str, str | int | float]:
        return {
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
        return lambda number: {
            GROUP: {"session": known.sessions[number], **send(known, number)}
        }

    return of


def _bounds(
    privacy: Privacy | None, send: _Send, known: SecureState, number: int
) -> dict[str, Tensor]:
    """Return also how far a summand is clipped, and what noise it is to have."""
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


def _letters(known: SecureState, number: int) -> dict[str, Tensor]:
    letters = known.aggregator.letters_for(number)
    commitments = known.aggregator.commitments_for(number)
    rows = [b"".join(a + b for a, b in pairs) for pairs in commitments.values()]
    return {
        "senders": signed(list(letters)),
        "letters": rows_of(list(letters.values())),
        "commitments": rows_of(rows),
    }


def _sets(known: SecureState, number: int) -> dict[str, Tensor]:
    survivors, dropped = known.aggregator.split(number, known.present)
    return {"survivors": signed(survivors), "dropped": signed(dropped)}
