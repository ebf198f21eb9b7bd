"""A client's half of a secure sum, as a mod around whatever answers the request.

Long: the stages, in their order, with the refusals of each.
"""

import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor

from flwr_fisher.client.limits import whole_number
from flwr_fisher.client.request import config_of
from flwr_fisher.client.store import (
    DEFAULT_STATE_DIR,
    STATE_BYTES,
    ClientStore,
    partition_of,
)
from flwr_fisher.client.summand import NUM_EXAMPLES, Summand
from flwr_fisher.errors import ClientError, check_range, check_whole
from flwr_fisher.secure import FixedPoint, Participant
from flwr_fisher.secure.fixed_point import Words
from flwr_fisher.secure.identity import SIGNATURE, UNSIGNED, Trusted, signature
from flwr_fisher.secure.keys import DIGEST, PUBLIC
from flwr_fisher.wire import (
    arrays_to_tensors,
    join_groups,
    named_options,
    split_groups,
    tensors_to_arrays,
)
from flwr_fisher.wire.secure_upload import (
    LAYOUT,
    SECURE,
    WORDS,
    SecureUpload,
    layout_text,
)

_GROUP = "secure"  # of the tensors that are for the mod alone
_NAME = "secure-sum"
_MOST_SUMS = 10_000


@dataclass(frozen=True)
class SecureSumsMod:
    r"""Takes part in sums that the server cannot look into, and refuses others.

    :func:`make_client_app` has one. Around another ``ClientApp`` it serves strategies
    whose uploads are averaged, such as FedAvg::

        app = ClientApp(client_fn, mods=[SecureSumsMod()])

    It answers a sum's own requests, and masks the reply of those that want a summand:
    no number of it, and no metric, leaves this machine as it is. What it has masked,
    and for whom it was opened, stays on its disk: nothing is masked in two ways.

    Parameters
    ----------
    min_clients : int, default 3
        The fewest among whom it hides; a sum over two shows each to the other.
    required : bool, default False
        Refuse to train without. A server that wants single uploads needs but ask for
        them: clients whose uploads must never be seen say so themselves.
    identity : Path | str, optional
        An ECDSA private key (a SuperNode's own will do) with which this client signs
        what it sends to its neighbours.
    trusted : Path | str, optional
        A folder of the public keys, ``*.pub``, of all clients with which this one takes
        part in sums, its own among them. Others' keys are refused; without it the
        server's word is taken for whose they are.
    min_noise : float, default 0
        How much noise this client adds at least, in multiples of the norm that its
        contribution is clipped to: it takes part in no sum without. Of M clients each
        adds :math:`z / \sqrt{h M}` (:class:`~flwr_fisher.strategies.Privacy`), and who
        adds z is safe whatever the others do.
    state_dir : Path | str, optional
        Where secrets and summands are kept until the sum is open, readable by this user
        alone. Default: as for :class:`FisherClient`.
    state_bytes : int, default 4 GiB
        How much they may take; those of old runs go first.

    Raises
    ------
    ConfigurationError
        If `min_clients` is below 2, or `trusted` holds no keys.
    """

    min_clients: int = 3
    required: bool = False
    identity: Path | str | None = None
    trusted: Path | str | None = None
    min_noise: float = 0.0
    state_dir: Path | str = DEFAULT_STATE_DIR
    state_bytes: int = STATE_BYTES

    def __post_init__(self) -> None:
        check_whole("min_clients", self.min_clients, 2)
        check_whole("state_bytes", self.state_bytes, 1)
        check_range("min_noise", self.min_noise, 0)
        if self.trusted is not None:
            Trusted.of(self.trusted)

    def __call__(
        self, message: Message, context: Context, call_next: ClientAppCallable
    ) -> Message:
        """Answer a request, by itself or through `call_next`.

        Raises
        ------
        ClientError
            If the server asks for what would show this client's summand.
        """
        options = config_of(message)[0]
        stage = options.get("secure")
        if stage is None:
            if self.required:
                raise ClientError(
                    "this client replies to secure sums only (SecureSumsMod(required="
                    "True)): pass secure=SecureSums() to the strategy"
                )
            return call_next(message, context)
        request = _Request(self, message, context, options)
        if stage == "keys":
            return _keys(request)
        if stage not in _STAGES:
            raise ClientError(
                f"unknown stage of a secure sum {str(stage)!r:.40}: install the same "
                "flwr-fisher on both sides"
            )
        return _STAGES[stage](request, _Memory.load(request), call_next)


class _Request:
    """A request of a secure sum, read."""

    def __init__(
        self,
        mod: SecureSumsMod,
        message: Message,
        context: Context,
        options: Mapping[str, Any],
    ) -> None:
        self.mod, self.message, self.context = mod, message, context
        self.options, self.client = options, partition_of(context)
        self.index = whole_number(options, "secure-sum", 0)
        self.weighted_by = str(options.get("secure-weight", NUM_EXAMPLES))
        records = list(message.content.array_records.values())
        if len(records) != 1:
            raise ClientError(f"expected one ArrayRecord, got {len(records)}")
        self.params, self.groups = split_groups(arrays_to_tensors(records[0]))
        self.sent = self.groups.pop(_GROUP, {})

    def tensor(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return what the server sent."""
        value = self.sent.get(name)
        if value is None or value.dtype != dtype or tuple(value.shape) != shape:
            got = "nothing" if value is None else f"{value.dtype} {tuple(value.shape)}"
            raise ClientError(
                f"the server sent {got} for '{name}' of a secure sum, expected {dtype} "
                f"{shape}: install the same flwr-fisher on both sides"
            )
        return value

    def rows(self, name: str, count: int, width: int) -> list[bytes]:
        """Return a matrix of bytes that the server sent, row by row."""
        matrix = self.tensor(name, torch.uint8, count, width).numpy()
        return [row.tobytes() for row in matrix]

    def numbers(self, name: str) -> list[int]:
        """Return a list of clients that the server sent, each once."""
        value = self.sent.get(name)
        if value is None or value.dtype != torch.int64 or value.dim() != 1:
            raise ClientError(f"the server sent no list of clients as '{name}'")
        numbers = [number % 2**64 for number in value.tolist()]
        if len(set(numbers)) < len(numbers):
            raise ClientError(f"the server's list '{name}' has a client twice")
        return numbers

    def bounds(self) -> tuple[float, float]:
        """Return how far a summand is clipped, and its noise's standard deviation."""
        if "bounds" not in self.sent:
            return math.inf, 0.0
        norm, deviation = self.tensor("bounds", torch.float64, 2).tolist()
        return norm, deviation

    def inner(self) -> Message:
        """Return the request as it would be without a secure sum."""
        arrays = tensors_to_arrays({**self.params, **join_groups(self.groups)})
        (own,) = named_options({"secure": None})
        content = RecordDict()
        for name, record in self.message.content.items():
            if isinstance(record, ConfigRecord):
                kept = {k: v for k, v in record.items() if not k.startswith(own)}
                content[name] = ConfigRecord(kept)
            else:
                content[name] = arrays
        self.message.content = content
        return self.message

    def reply(self, tensors: dict[str, Tensor]) -> Message:
        """Return the answer; of the client's metrics it has none."""
        metrics = MetricRecord({NUM_EXAMPLES: 1, self.weighted_by: 1})
        arrays = SecureUpload(tensors).to_arrays()
        content = RecordDict({"arrays": arrays, "metrics": metrics})
        return Message(content, reply_to=self.message)

    def reply_words(self, words: Words, summand: Summand) -> Message:
        """Return masked words, and of which tensors they are."""
        own = {
            WORDS: torch.from_numpy(words),
            LAYOUT: layout_text(summand.layout()),
        }
        return self.reply({**summand.descriptions(), **own})


@dataclass(frozen=True)
class _Memory:
    """What a client remembers from one request of a secure sum to the next.

    Parameters
    ----------
    store : ClientStore
        Where.
    participant : Participant
        Its secrets.
    summand : Summand
        What it adds to the sum under way.
    index : int
        The sum that told how large the summand is; -1: there is none.
    """

    store: ClientStore
    participant: Participant
    summand: Summand
    index: int = -1

    @classmethod
    def new(cls, request: _Request, sums: int) -> tuple["_Memory", bytes]:
        """Begin; return also the number by which it is found again."""
        session = secrets.token_bytes(8)
        store = _store(request.mod, session, request.client)
        return cls(store, Participant.new(request.client, sums), Summand({})), session

    @classmethod
    def load(cls, request: _Request) -> "_Memory":
        """Find what was kept."""
        session = request.tensor("session", torch.uint8, 8).numpy().tobytes()
        store = _store(request.mod, session, request.client)
        saved = store.load_noted(_NAME, 0)
        if saved is None:
            raise ClientError(
                f"the secrets of this secure sum are not in {store.path}: it goes on "
                "without this client"
            )
        tensors, note = saved[0], json.loads(saved[1])
        participant = Participant.from_json(note["participant"])
        if request.index >= len(participant.own):
            raise ClientError(
                f"the server asks for sum {request.index}, and this client has secrets "
                f"for {len(participant.own)}"
            )
        return cls(
            store,
            participant,
            Summand(tensors, note["weight"], note["bound"]),
            int(note["index"]),
        )

    def save(self) -> None:
        """Keep it: a client that was restarted goes on with the same secrets."""
        note = json.dumps(
            {
                "participant": self.participant.to_json(),
                "weight": self.summand.weight,
                "bound": self.summand.bound,
                "index": self.index,
            }
        )
        tensors = self.summand.tensors
        self.store.check_room(sum(value.nbytes for value in tensors.values()))
        self.store.save(_NAME, 0, tensors, note=note)


def _store(mod: SecureSumsMod, session: bytes, client: int) -> ClientStore:
    root = Path(mod.state_dir).expanduser() / "secure"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    run = int.from_bytes(session, "big")
    return ClientStore(root, run, client, max_bytes=mod.state_bytes)


# The stages


def _keys(request: _Request) -> Message:
    """Draw secrets, and send the public keys."""
    sums = whole_number(request.options, "secure-sums", 2)
    if not 1 <= sums <= _MOST_SUMS:
        raise ClientError(f"the server asks for the keys of {sums} sums")
    memory, session = _Memory.new(request, sums)
    memory.save()
    public, signed = memory.participant.public(), UNSIGNED
    if request.mod.identity is not None:
        signed = signature(request.mod.identity, request.client, public)
    return _reply(request, session=[session], keys=public, signature=[signed])


def _shares(request: _Request, memory: _Memory, call_next: object) -> Message:
    """Cut the secrets into shares for the neighbours."""
    participant = memory.participant
    numbers = request.numbers("neighbours")
    width = (1 + len(participant.own)) * PUBLIC
    rows = request.rows("keys", len(numbers), width)
    threshold = int(request.tensor("threshold", torch.int64))
    _check_enough(request, numbers)
    public = {n: _cut(row, PUBLIC) for n, row in zip(numbers, rows, strict=True)}
    if request.mod.trusted is not None:
        signatures = request.rows("signatures", len(numbers), SIGNATURE)
        signers = dict(zip(numbers, signatures, strict=True))
        Trusted.of(request.mod.trusted).check(public, signers)
    letters, commitments = participant.share(public, threshold)
    memory.save()
    order = sorted(numbers)
    digests = [b"".join(a + b for a, b in commitments[n]) for n in order]
    sealed = [letters[n] for n in order if n != participant.number]
    return _reply(request, letters=sealed, commitments=digests)


def _exponents(
    request: _Request, memory: _Memory, call_next: ClientAppCallable
) -> Message:
    """Have the summand computed, keep it, and send how large it is, masked."""
    if "senders" in request.sent:
        _receive(request, memory.participant)
    if memory.index != request.index:
        weighted = request.options.get("secure-weighted") is True
        reply = call_next(request.inner(), request.context)
        if reply.has_error():
            return reply
        summand = Summand.of(reply, request.weighted_by, weighted)
        norm, deviation = request.bounds()
        least = request.mod.min_noise * norm if request.mod.min_noise else 0.0
        if not (norm > 0 and deviation >= least):
            raise ClientError(
                f"the server asks for noise of {deviation:.3g} where contributions are "
                f"up to {norm:.3g}, and this client adds {request.mod.min_noise:g} "
                "times that at least (SecureSumsMod(min_noise=...)): pass a privacy= "
                "to the strategy that asks for it"
            )
        if norm < math.inf:
            summand = summand.bounded(request.params, norm, deviation)
        memory = replace(memory, summand=summand, index=request.index)
    words = memory.participant.exponents(request.index, memory.summand.exponents())
    memory.save()
    return request.reply_words(words, memory.summand)


def _receive(request: _Request, participant: Participant) -> None:
    """Open what the neighbours have sent."""
    senders = request.numbers("senders")
    letters = request.sent.get("letters", torch.empty(0, 0))
    if len(letters) != len(senders):
        raise ClientError(f"{len(letters)} letters of {len(senders)} senders")
    sealed = request.rows("letters", *letters.shape) if senders else []
    width = 2 * DIGEST * len(participant.own)
    commitments = {}
    rows = request.rows("commitments", len(senders), width)
    for sender, row in zip(senders, rows, strict=True):
        parts = _cut(row, DIGEST)
        commitments[sender] = list(zip(parts[::2], parts[1::2], strict=True))
    participant.receive(dict(zip(senders, sealed, strict=True)), commitments)


def _values(request: _Request, memory: _Memory, call_next: object) -> Message:
    """Send the summand, masked."""
    if memory.index != request.index - 1:
        raise ClientError(
            f"sum {request.index} is of what sum {request.index - 1} told the size of, "
            "and this client has no such summand"
        )
    count = len(memory.summand.layout())
    exponents = request.tensor("exponents", torch.int64, count).tolist()
    clients = int(request.tensor("clients", torch.int64))
    fixed = FixedPoint(int(request.tensor("bits", torch.int64)), clients)
    words = memory.summand.words(fixed, exponents)
    masked = memory.participant.mask(request.index, words)
    memory.save()
    return request.reply_words(masked, memory.summand)


def _open(request: _Request, memory: _Memory, call_next: object) -> Message:
    """Send the shares that open a sum, once its set of clients is known."""
    survivors, dropped = request.numbers("survivors"), request.numbers("dropped")
    _check_enough(request, survivors)
    shares = memory.participant.open(request.index, survivors, dropped)
    if memory.index == request.index - 1:  # the summand is in the sum
        memory = replace(memory, summand=Summand({}), index=-1)
    memory.save()
    return _reply(request, shares=[shares[n] for n in (*survivors, *dropped)])


_Stage = Callable[[_Request, _Memory, ClientAppCallable], Message]
_STAGES: dict[object, _Stage] = {
    "shares": _shares,
    "exponents": _exponents,
    "values": _values,
    "open": _open,
}


def _check_enough(request: _Request, numbers: Sequence[int]) -> None:
    if len(numbers) < request.mod.min_clients:
        raise ClientError(
            f"{len(numbers)} clients take part, and this one hides among "
            f"{request.mod.min_clients} at least (SecureSumsMod(min_clients=...))"
        )


def _reply(request: _Request, **parts: Sequence[bytes]) -> Message:
    """Return an answer of matrices of bytes, whose rows have one length."""
    return request.reply(
        {f"{SECURE}{name}": _rows(rows) for name, rows in parts.items()}
    )


def _rows(rows: Sequence[bytes]) -> Tensor:
    data = np.frombuffer(bytearray(b"".join(rows)), np.uint8)
    return torch.from_numpy(data.reshape(len(rows), -1))


def _cut(row: bytes, size: int) -> list[bytes]:
    return [row[i : i + size] for i in range(0, len(row), size)]
