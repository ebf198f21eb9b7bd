"""The server's side of a secure sum: several exchanges replace one, and see only sums.

They replace an exchange whose uploads are only added up. Nobody but a client itself
sees its contribution:

``keys``, ``shares``
    once a round: clients send public keys, and sealed shares of their secrets for each
    other;
``exponents``, ``open``
    clients do the exchange's work, keep its result, and send its size under masks; then
    they send shares that open the sum;
``values``, ``open``
    clients send their contributions in fixed point, under masks, and then shares that
    open the sum.

Then the exchange's own step uses the sum like one client's upload. A client that leaves
after the shares is not in later sums, and cannot come back in that round. The server
never asks again for a sum over fewer clients.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.options import Options, option
from flwr_fisher.params import Params
from flwr_fisher.secure import steps
from flwr_fisher.secure.fixed_point import FixedPoint
from flwr_fisher.secure.payload import SecureUpload, rows_of
from flwr_fisher.secure.steps import GROUP, SecureState, present
from flwr_fisher.server.exchange import Exchange, ServerState, Step, Uploads
from flwr_fisher.server.privacy import Privacy
from flwr_fisher.wire import join_groups, tensors_to_arrays
from flwr_fisher.wire.arrays import numbers_to_tensor

JOB = "secure-sums"  # a client without the mod refuses this job
_Send = Callable[[SecureState, int], dict[str, Tensor]]
_Take = Callable[[ServerState, Uploads[SecureUpload]], Step]


@dataclass(frozen=True)
class _Stage(Exchange[SecureUpload]):
    """An exchange of a secure sum, with different tensors for each client."""

    start: Callable[[ServerState], Params] = lambda state: {}
    clients: Callable[[ServerState], Collection[int]] = present
    send_each: _Send | None = None
    quiet: bool = True

    @property
    def log_name(self) -> str:
        """The stage's name in the log."""
        return f"secure sum, {self.options['secure']!s}"

    def records(self, state: ServerState) -> Callable[[int], ArrayRecord]:
        """Return a function from a client's number to its record."""
        if (send := self.send_each) is None:
            return super().records(state)
        known, common = SecureState.of(state), self.tensors(state)

        def record(number: int) -> ArrayRecord:
            session = rows_of([known.sessions[number]])[0]
            own = {GROUP: {"session": session, **send(known, number)}}
            return tensors_to_arrays({**common, **join_groups(own)})

        return record


class SecureSums(Options):
    """The option for secure sums: the server sees sums, and no client's upload.

    SecAgg+ (Bell et al., CCS 2020): masks hide each client's contribution. A client
    agrees on them with its neighbours, and they cancel in the sum. :doc:`/secure-sums`
    says what a malicious server can still do, and what prevents it. Clients need
    :class:`SecureSumsMod`.

    Raises
    ------
    ConfigurationError
        If a value is out of range.

    Examples
    --------
    ::

        strategy = FedFisherOneShot(aggregate="sums", secure=SecureSums())
    """

    bits: int = option(
        32,
        "The bits of a word, 32 or 64. If a tensor's largest entry is below ``2**e``, "
        "the error of its sum is at most "
        "``clients / 2 * 2**-(bits - 1 - ceil(log2(clients + 1)) - e)``. Sums of "
        "features' squares always have 64.",
    )
    threshold: float = option(
        0.55,
        "The share of a client's neighbours that must still be connected to remove its "
        "masks; it is more than a half. The others may leave. Take two thirds if the "
        "server may tell clients different things.",
        low=0.5,
        high=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        FixedPoint(self.bits, clients=1)

    def check(self, exchanges: Sequence[Exchange[Any]], who: str) -> None:
        """Raise :class:`ConfigurationError` unless sums can replace the uploads."""
        if any(exchange.additive is None for exchange in exchanges):
            raise ConfigurationError(
                f"with these options, a round of {who} needs more than sums of its "
                "clients' uploads: leave secure= out. FedFisherOneShot needs only sums "
                "with aggregate='sums', an Exchange of your own with "
                "additive=Summation()"
            )

    def secured(
        self, exchanges: Sequence[Exchange[Any]], *, seed: str, weighted_by: str
    ) -> list[Exchange[SecureUpload]]:
        """Return the exchanges of a round as secure sums.

        Parameters
        ----------
        exchanges : Sequence[Exchange]
            The round's exchanges. Each must have an ``additive``.
        seed : str
            The seed of the neighbourhoods.
        weighted_by : str
            The metric that weights clients.
        """
        first, sums = exchanges[0], 2 * len(exchanges)

        def ask(
            stage: str,
            index: int,
            step: _Take,
            send_each: _Send | None = None,
            options: Mapping[str, Any] | None = None,
            **fields: Any,
        ) -> _Stage:
            """Return a stage's exchange with the present clients."""
            asked = {
                **(options or {}),
                "job": JOB,
                "secure": stage,
                "secure-sum": index,
                "secure-weight": weighted_by,
            }
            fields |= {"send_each": send_each, "optional": first.optional}
            fields |= {"refines": first.refines}
            return _Stage(asked, SecureUpload.from_arrays, step, **fields)

        stages: list[Exchange[SecureUpload]] = [
            ask(
                "keys",
                0,
                partial(steps.take_keys, self.threshold, sums, seed),
                options={"secure-sums": sums},
                clients=first.clients,  # the clients of the round's first exchange
                require_same_parameters=first.require_same_parameters,
            ),
            ask("shares", 0, steps.take_shares, _neighbours),
        ]
        for index, exchange in zip(range(0, sums, 2), exchanges, strict=True):
            assert exchange.additive is not None
            privacy, values = exchange.additive.privacy, index + 1
            bits = max(self.bits, exchange.additive.bits)
            job = exchange.options.get("job", "train")
            work = {**exchange.options, "secure-job": job}
            if exchange.additive.weighted:
                work["secure-weighted"] = True
            begin = partial(_begin, privacy, index == 0)
            start = {"send": exchange.send, "start": exchange.start}
            sized = partial(steps.take_words, index, privacy)
            summed = partial(steps.take_words, values, privacy)
            last = exchange is exchanges[-1]
            opened = partial(steps.open_values, values, bits, exchange, last)
            stages += [
                ask("exponents", index, sized, begin, options=work, **start),
                ask("open", index, partial(steps.open_exponents, index), _sets),
                ask("values", values, summed, partial(_scales, bits)),
                ask("open", values, opened, _sets, name=exchange.name),
            ]
        return stages


# --- what each stage sends to each client


def _begin(
    privacy: Privacy | None, first: bool, known: SecureState, number: int
) -> dict[str, Tensor]:
    """Send the neighbours' shares once, with the clipping norm and the noise."""
    sent = {}
    if first:
        sealed, commitments = known.aggregator.received_by(number)
        sent = {
            "senders": numbers_to_tensor(list(sealed)),
            "sealed-shares": rows_of(list(sealed.values())),
            "commitments": rows_of(list(commitments.values())),
        }
    if privacy is not None:
        deviation = privacy.share(len(known.aggregator.public))
        bounds = torch.tensor([privacy.clipping_norm, deviation], dtype=torch.float64)
        sent["bounds"] = bounds
    return sent


def _neighbours(known: SecureState, number: int) -> dict[str, Tensor]:
    around = known.aggregator.keys_for(number)
    return {
        "neighbours": numbers_to_tensor(list(around)),
        "keys": rows_of([b"".join(keys) for keys in around.values()]),
        "signatures": rows_of([known.signatures[n] for n in around]),
        "threshold": torch.tensor(known.aggregator.threshold),
    }


def _scales(bits: int, known: SecureState, number: int) -> dict[str, Tensor]:
    return {
        "exponents": torch.tensor(known.exponents, dtype=torch.int64),
        "clients": torch.tensor(len(known.aggregator.public)),
        "bits": torch.tensor(bits),
    }


def _sets(known: SecureState, number: int) -> dict[str, Tensor]:
    survivors, dropped = known.aggregator.split(number, known.present)
    return {
        "survivors": numbers_to_tensor(survivors),
        "dropped": numbers_to_tensor(dropped),
    }
