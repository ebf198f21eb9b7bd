"""A client's side of a secure sum: a mod around the client app's answer."""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor

from flwr_fisher.client.disk import DEFAULT_STATE_DIR, STATE_BYTES, ClientDisk
from flwr_fisher.client.request import (
    arrays_of,
    config_of,
    partition_of,
    whole_number,
)
from flwr_fisher.errors import ClientError
from flwr_fisher.options import Options, option
from flwr_fisher.secure.crypto import (
    DIGEST,
    PUBLIC,
    SIGNATURE,
    UNSIGNED,
    Trusted,
    from_json,
    pieces,
    signature,
    to_json,
)
from flwr_fisher.secure.fixed_point import FixedPoint, Words
from flwr_fisher.secure.participant import Participant
from flwr_fisher.secure.payload import (
    LAYOUT,
    SECURE,
    WORDS,
    Contribution,
    SecureUpload,
    bytes_in,
    rows_of,
)
from flwr_fisher.wire import (
    NUM_EXAMPLES,
    arrays_to_tensors,
    join_groups,
    named_options,
    split_groups,
    tensors_to_arrays,
)
from flwr_fisher.wire.arrays import description_text, tensor_to_numbers

_NAME = "secure-sum"
_MOST_SUMS = 10_000
_GROUP = "secure"  # prefix of the tensors that are only for the mod


class SumRequest:
    """A request of a secure sum, read and checked."""

    def __init__(
        self, message: Message, context: Context, call_next: ClientAppCallable
    ) -> None:
        self.message, self.context, self.call_next = message, context, call_next
        self.options, _ = config_of(message)
        options, self.client = self.options, partition_of(context)
        self.index = whole_number(options, "secure-sum", 0)
        self.weighted_by = str(options.get("secure-weight", NUM_EXAMPLES))
        sent = arrays_to_tensors(arrays_of(message))
        self.params, self.groups = split_groups(sent)
        self.sent = self.groups.pop(_GROUP, {})

    def tensor(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return a tensor of the request, after a check of its shape and dtype."""
        value = self.sent.get(name)
        if value is None or value.dtype != dtype or tuple(value.shape) != shape:
            got = "nothing" if value is None else f"{value.dtype} {tuple(value.shape)}"
            raise ClientError(
                f"the server sent {got} for '{name}' of a secure sum, expected {dtype} "
                f"{shape}: install the same flwr-fisher on both sides"
            )
        return value

    def rows(self, name: str, count: int, width: int) -> list[bytes]:
        """Return the rows of a matrix of bytes in the request."""
        return bytes_in(self.tensor(name, torch.uint8, count, width))

    def numbers(self, name: str) -> list[int]:
        """Return a list of clients in the request, each of them once."""
        value = self.sent.get(name)
        if value is None or value.dtype != torch.int64 or value.dim() != 1:
            raise ClientError(f"the server's '{name}' is not a list of clients")
        numbers = tensor_to_numbers(value)
        if len(set(numbers)) < len(numbers):
            raise ClientError(f"the server's list '{name}' has a client twice")
        return numbers

    def session(self) -> bytes:
        """Return the session's number, under which this client keeps its secrets."""
        return self.tensor("session", torch.uint8, 8).numpy().tobytes()

    def bounds(self) -> tuple[float, float]:
        """Return the clipping norm, and the noise's standard deviation."""
        if "bounds" not in self.sent:
            return math.inf, 0.0
        norm, deviation = self.tensor("bounds", torch.float64, 2).tolist()
        return norm, deviation

    def answered(self) -> Message:
        """Return the app's reply, as it would be without a secure sum."""
        arrays = tensors_to_arrays({**self.params, **join_groups(self.groups)})
        (prefix,) = named_options({"secure": None})
        job = named_options({"job": str(self.options.get("secure-job", "train"))})
        content = RecordDict()
        for name, record in self.message.content.items():
            if isinstance(record, ConfigRecord):
                users = {k: v for k, v in record.items() if not k.startswith(prefix)}
                content[name] = ConfigRecord({**users, **job})
            else:
                content[name] = arrays
        self.message.content = content
        return self.call_next(self.message, self.context)

    def reply(self, tensors: dict[str, Tensor]) -> Message:
        """Return the answer, without the client's metrics."""
        metrics = MetricRecord({NUM_EXAMPLES: 1, self.weighted_by: 1})
        arrays = SecureUpload(tensors).to_arrays()
        content = RecordDict({"arrays": arrays, "metrics": metrics})
        return Message(content, reply_to=self.message)

    def reply_words(self, words: Words, contribution: Contribution) -> Message:
        """Return a reply with masked words and their layout."""
        masked = {
            WORDS: torch.from_numpy(words),
            LAYOUT: description_text(contribution.layout()),
        }
        return self.reply({**contribution.descriptions(), **masked})

    def reply_rows(self, **parts: Sequence[bytes]) -> Message:
        """Return a reply with matrices of bytes, from rows of equal length."""
        named = {k.replace("_", "-"): rows_of(rows) for k, rows in parts.items()}
        return self.reply({f"{SECURE}{k}": rows for k, rows in named.items()})


@dataclass(frozen=True)
class SumMemory:
    """A client's memory from one request of a secure sum to the next.

    Parameters
    ----------
    disk : ClientDisk
        Where the memory is kept.
    participant : Participant
        The client's secrets.
    contribution : Contribution
        What the client adds to the current sum.
    index : int
        The sum that revealed the size of the contribution, or -1.
    """

    disk: ClientDisk
    participant: Participant
    contribution: Contribution
    index: int = -1

    @classmethod
    def load(cls, disk: ClientDisk, index: int) -> "SumMemory":
        """Load the memory, and check that it knows the sum.

        Raises
        ------
        ClientError
            If there is no memory, another version wrote it, or it has no secrets for
            that sum.
        """
        saved = disk.load(_NAME)
        if saved is None:
            raise ClientError(
                f"the secrets of this secure sum are not in {disk.path}, so the sum "
                "continues without this client"
            )
        try:
            note = from_json(saved.note)
            participant = Participant(**note["participant"])
            contribution = Contribution(saved.tensors, note["weight"], note["bound"])
            last = note["index"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ClientError(
                f"the secrets of this secure sum in {disk.path} are not in this "
                f"version's format ({type(error).__name__}: {error}), so the sum "
                "continues without this client"
            ) from error
        if index >= len(participant.self_masks):
            raise ClientError(
                f"the server requests sum {index}, but this client has secrets "
                f"for {len(participant.self_masks)} sums only"
            )
        return cls(disk, participant, contribution, last)

    def save(self) -> None:
        """Save the memory; a restarted client continues with the same secrets."""
        contribution = self.contribution
        note = {
            "participant": self.participant,
            "weight": contribution.weight,
            "bound": contribution.bound,
            "index": self.index,
        }
        self.disk.save(_NAME, contribution.tensors, note=to_json(note))


class SecureSumsMod(Options):
    r"""A mod that takes part in secure sums, and refuses requests for other uploads.

    A client that takes part needs it as one of its mods::

        app = make_client_app(client_fn, mods=[SecureSumsMod()])

    With another ``ClientApp``, it works for strategies whose uploads are averaged, such
    as :class:`~flwr_fisher.strategies.FedAvg`.

    It answers the requests of the sum's protocol. If a request needs a contribution, it
    masks the reply: no number and no metric leaves this machine without a mask. It
    records on its disk what it has masked, and for which clients it was opened, so that
    nothing is masked in two ways.

    Raises
    ------
    ConfigurationError
        If a number is out of range (`min_clients` is at least 2), or `trusted` holds no
        keys.
    """

    min_clients: int = option(
        3,
        "The smallest number of clients in a sum. A sum over two shows each client's "
        "part to the other.",
        low=2,
    )
    required: bool = option(
        False,
        "Refuse to train without a secure sum. By default, a server gets single "
        "uploads if it requests them. Clients whose uploads must never be seen must "
        "set this.",
    )
    identity: Path | str | None = option(
        None,
        "An ECDSA private key, such as the SuperNode's. This client signs with it what "
        "it sends to its neighbours.",
    )
    trusted: Path | str | None = option(
        None,
        "A folder with the public keys, ``*.pub``, of all clients in this client's "
        "sums, this client included. Other clients' keys are refused. Without this "
        "folder, the client must trust the server to pass on the right keys.",
    )
    min_noise: float = option(
        0.0,
        "The least noise that this client adds, in multiples of the norm to which its "
        "contribution is clipped. It takes part in no sum with less noise. Each of M "
        r"clients adds :math:`z / \sqrt{h M}` (:class:`~flwr_fisher.strategies.Privacy`"
        "). A client that adds z is safe whatever the others do.",
        low=0,
    )
    state_dir: Path | str = option(
        DEFAULT_STATE_DIR,
        "Where secrets and contributions are kept until the sum is open. Only this "
        "user can read them. By default as for :class:`FisherClient`.",
    )
    state_bytes: int = option(
        STATE_BYTES,
        "How much space they may take. Those of old runs are deleted first.",
        low=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trusted is not None:
            Trusted.of(self.trusted)

    def __call__(
        self, message: Message, context: Context, call_next: ClientAppCallable
    ) -> Message:
        """Answer a request, by the mod itself or through `call_next`.

        Raises
        ------
        ClientError
            If the server asks for what would show this client's contribution.
        """
        stage = config_of(message)[0].get("secure")
        if stage is None:
            if self.required:
                raise ClientError(
                    "this client replies only to secure sums (SecureSumsMod(required="
                    "True)): pass secure=SecureSums() to the strategy"
                )
            return call_next(message, context)
        request = SumRequest(message, context, call_next)
        if stage == "keys":
            return _keys(self, request)
        if stage not in _STAGES:
            raise ClientError(
                f"unknown stage of a secure sum {str(stage)!r:.40}: install the same "
                "flwr-fisher on both sides"
            )
        disk = self.disk(request.session(), request.client)
        memory = SumMemory.load(disk, request.index)
        return _STAGES[stage](self, request, memory)

    def disk(self, session: bytes, client: int) -> ClientDisk:
        """Return the disk entry with the secrets of a session."""
        return ClientDisk(
            Path(self.state_dir),
            "secure",
            client,
            session.hex(),
            self.state_bytes,
        )


# --- the stages


def _keys(mod: SecureSumsMod, request: SumRequest) -> Message:
    """Draw secrets, and send the public keys."""
    sums = whole_number(request.options, "secure-sums", 2)
    if not 1 <= sums <= _MOST_SUMS:
        raise ClientError(
            f"the server requests keys for {sums} sums, but a client makes them for 1 "
            f"to {_MOST_SUMS}"
        )
    session = secrets.token_bytes(8)
    participant = Participant.new(request.client, sums)
    disk = mod.disk(session, request.client)
    SumMemory(disk, participant, Contribution({})).save()
    public, signed = participant.public(), UNSIGNED
    if mod.identity is not None:
        signed = signature(mod.identity, request.client, public)
    return request.reply_rows(session=[session], keys=public, signature=[signed])


def _shares(mod: SecureSumsMod, request: SumRequest, memory: SumMemory) -> Message:
    """Split the secrets into shares for the neighbours."""
    participant = memory.participant
    numbers = request.numbers("neighbours")
    width = (1 + len(participant.self_masks)) * PUBLIC
    rows = request.rows("keys", len(numbers), width)
    threshold = int(request.tensor("threshold", torch.int64))
    _check_enough(mod, numbers)
    public = {n: pieces(row, PUBLIC) for n, row in zip(numbers, rows, strict=True)}
    if mod.trusted is not None:
        signatures = request.rows("signatures", len(numbers), SIGNATURE)
        signers = dict(zip(numbers, signatures, strict=True))
        Trusted.of(mod.trusted).check(public, signers)
    shares, commitments = participant.share(public, threshold)
    memory.save()
    order = sorted(numbers)
    sealed = [shares[n] for n in order if n in shares]
    return request.reply_rows(
        sealed_shares=sealed, commitments=[commitments[n] for n in order]
    )


def _exponents(mod: SecureSumsMod, request: SumRequest, memory: SumMemory) -> Message:
    """Compute and keep the contribution; send its masked exponents."""
    if "senders" in request.sent:
        _receive(request, memory.participant)
    if memory.index != request.index:
        weighted = request.options.get("secure-weighted") is True
        reply = request.answered()
        if reply.has_error():
            return reply
        contribution = Contribution.of(reply, request.weighted_by, weighted)
        norm, deviation = request.bounds()
        least = mod.min_noise * norm if mod.min_noise else 0.0
        if not (norm > 0 and deviation >= least):
            raise ClientError(
                f"the server requests noise of {deviation:.3g} for contributions up to "
                f"{norm:.3g}, but this client adds at least {mod.min_noise:g} times "
                "that (SecureSumsMod(min_noise=...)): pass the strategy a privacy= "
                "with more noise"
            )
        if norm < math.inf:
            contribution = contribution.bounded(request.params, norm, deviation)
        memory = replace(memory, contribution=contribution, index=request.index)
    words = memory.participant.exponents(request.index, memory.contribution.exponents())
    memory.save()
    return request.reply_words(words, memory.contribution)


def _receive(request: SumRequest, participant: Participant) -> None:
    """Open the neighbours' shares."""
    senders = request.numbers("senders")
    texts = request.sent.get("sealed-shares", torch.empty(0, 0))
    if len(texts) != len(senders):
        raise ClientError(
            f"the server sent {len(texts)} sealed shares for {len(senders)} senders"
        )
    sealed = request.rows("sealed-shares", *texts.shape) if senders else []
    width = 2 * DIGEST * len(participant.self_masks)
    digests = request.rows("commitments", len(senders), width)
    participant.receive(
        dict(zip(senders, sealed, strict=True)),
        dict(zip(senders, digests, strict=True)),
    )


def _values(mod: SecureSumsMod, request: SumRequest, memory: SumMemory) -> Message:
    """Send the masked contribution."""
    if memory.index != request.index - 1:
        raise ClientError(
            f"this client has no contribution for sum {request.index}, because it did "
            f"not take part in sum {request.index - 1}"
        )
    count = len(memory.contribution.layout())
    exponents = request.tensor("exponents", torch.int64, count).tolist()
    clients = int(request.tensor("clients", torch.int64))
    fixed = FixedPoint(int(request.tensor("bits", torch.int64)), clients)
    words = memory.contribution.words(fixed, exponents)
    masked = memory.participant.mask(request.index, words)
    memory.save()
    return request.reply_words(masked, memory.contribution)


def _open(mod: SecureSumsMod, request: SumRequest, memory: SumMemory) -> Message:
    """Send the shares that open a sum, after its set of clients is fixed."""
    survivors, dropped = request.numbers("survivors"), request.numbers("dropped")
    _check_enough(mod, survivors)
    shares = memory.participant.open(request.index, survivors, dropped)
    if memory.index == request.index - 1:  # the sum has the contribution
        memory = replace(memory, contribution=Contribution({}), index=-1)
    memory.save()
    return request.reply_rows(shares=[shares[n] for n in (*survivors, *dropped)])


_STAGES: dict[object, Callable[[SecureSumsMod, SumRequest, SumMemory], Message]] = {
    "shares": _shares,
    "exponents": _exponents,
    "values": _values,
    "open": _open,
}


def _check_enough(mod: SecureSumsMod, numbers: Sequence[int]) -> None:
    if len(numbers) < mod.min_clients:
        raise ClientError(
            f"{len(numbers)} clients share secrets here, but this client requires at "
            f"least {mod.min_clients} (SecureSumsMod(min_clients=...)): ask more "
            "clients, or raise SecureSums(neighbours=...) if it is set"
        )
