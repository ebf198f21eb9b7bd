"""A client's side of a secure sum: a mod around the client app's answer."""

import math
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor

from flwr_fisher.client.disk import DEFAULT_STATE_DIR, ClientDisk
from flwr_fisher.client.request import arrays_of, config_of, partition_of, whole_number
from flwr_fisher.errors import ClientError, check_known, check_range
from flwr_fisher.options import Options, option
from flwr_fisher.secure import crypto, payload
from flwr_fisher.secure.fixed_point import FixedPoint, Words
from flwr_fisher.secure.participant import Participant
from flwr_fisher.secure.payload import Contribution, SecureUpload
from flwr_fisher.wire import NUM_EXAMPLES, arrays_to_tensors, tensors_to_arrays
from flwr_fisher.wire.arrays import description_text, tensor_to_numbers
from flwr_fisher.wire.options import join_groups, named_options, split_groups

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
        self.params, self.groups = split_groups(arrays_to_tensors(arrays_of(message)))
        self.sent = self.groups.pop(_GROUP, {})

    def tensor(self, name: str, dtype: torch.dtype, *shape: int | None) -> Tensor:
        """Return a tensor of the request, after a check of its shape and dtype.

        None in the shape stands for any size.
        """
        value = self.sent.get(name)
        if value is not None and value.dtype == dtype and value.dim() == len(shape):
            sizes = zip(value.shape, shape, strict=True)
            if all(expected in (None, size) for size, expected in sizes):
                return value
        raise ClientError(
            f"the server's '{name}' of a secure sum is not a tensor of {dtype} with "
            f"the shape {shape}: install the same flwr-fisher on both sides"
        )

    def number(self, name: str) -> int:
        """Return an integer of the request."""
        return int(self.tensor(name, torch.int64))

    def rows(self, name: str, of: list[int], width: int | None) -> dict[int, bytes]:
        """Return the rows of a matrix of bytes in the request, one for each client."""
        matrix = self.tensor(name, torch.uint8, len(of), width)
        return dict(zip(of, payload.bytes_in(matrix), strict=True))

    def numbers(self, name: str) -> list[int]:
        """Return a list of clients in the request."""
        return tensor_to_numbers(self.tensor(name, torch.int64, None))

    def answered(self) -> Message:
        """Return the app's reply, as it would be without a secure sum."""
        arrays = tensors_to_arrays({**self.params, **join_groups(self.groups)})
        job = named_options({"job": str(self.options.get("secure-job", "train"))})
        content = RecordDict()
        for name, record in self.message.content.items():
            if isinstance(record, ConfigRecord):
                content[name] = ConfigRecord({**record, **job})
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
        layout = description_text(contribution.layout())
        masked = {payload.WORDS: torch.from_numpy(words), payload.LAYOUT: layout}
        return self.reply({**contribution.descriptions(), **masked})

    def reply_rows(self, **parts: Sequence[bytes]) -> Message:
        """Return a reply with matrices of bytes, from rows of equal length."""
        keys = {part: payload.SECURE + part.replace("_", "-") for part in parts}
        return self.reply({keys[k]: payload.rows_of(v) for k, v in parts.items()})


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
    """

    disk: ClientDisk
    participant: Participant
    contribution: Contribution

    @classmethod
    def load(cls, disk: ClientDisk, index: int) -> "SumMemory":
        """Load the memory, and check that it knows the sum.

        Raises
        ------
        ClientError
            If there is no memory.
        ConfigurationError
            If it has no secrets for that sum.
        """
        if (saved := disk.load(_NAME)) is None:
            raise ClientError(
                f"the secrets of this secure sum are not in {disk.path}, so the sum "
                "continues without this client"
            )
        note = crypto.from_json(saved.note)
        participant = Participant(**note["participant"])
        # A negative index would be another name for a later sum's secrets.
        check_range("secure-sum", index, 0, participant.sums - 1)
        contribution = Contribution(saved.tensors, **note["contribution"])
        return cls(disk, participant, contribution)

    def save(self) -> None:
        """Save the memory; a restarted client continues with the same secrets."""
        contribution = dict(vars(self.contribution))
        tensors = contribution.pop("tensors")
        note = {"participant": self.participant, "contribution": contribution}
        self.disk.save(_NAME, tensors, note=crypto.to_json(note))


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
        r"clients adds :math:`z / \sqrt{\lceil h M \rceil}` (``Privacy``). A client "
        "that adds z is safe whatever the others do.",
        low=0,
    )
    state_dir: Path | str = option(
        DEFAULT_STATE_DIR,
        "Where secrets and contributions are kept until the sum is open. Only this "
        "user can read them. By default as for :class:`FisherClient`.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trusted is not None:
            crypto.trusted_keys(self.trusted)

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
        check_known("stage of a secure sum", stage, _STAGES)
        (session,) = payload.bytes_in(request.tensor("session", torch.uint8, 8)[None])
        disk = self.disk(session, request.client)
        return _STAGES[stage](self, request, SumMemory.load(disk, request.index))

    def disk(self, session: bytes, client: int) -> ClientDisk:
        """Return the disk entry with the secrets of a session."""
        return ClientDisk(Path(self.state_dir), "secure", client, session.hex())


# --- the stages


def _keys(mod: SecureSumsMod, request: SumRequest) -> Message:
    """Draw secrets, and send the public keys."""
    sums = whole_number(request.options, "secure-sums", 2)
    check_range("secure-sums", sums, 1, _MOST_SUMS)
    session = secrets.token_bytes(8)
    participant = Participant.new(request.client, sums)
    SumMemory(mod.disk(session, request.client), participant, Contribution({})).save()
    public, signed = participant.public(), crypto.UNSIGNED
    if mod.identity is not None:
        signed = crypto.signature(mod.identity, request.client, public)
    return request.reply_rows(session=[session], keys=public, signature=[signed])


def _shares(mod: SecureSumsMod, request: SumRequest, memory: SumMemory) -> Message:
    """Split the secrets into shares for the neighbours."""
    participant = memory.participant
    numbers = request.numbers("neighbours")
    rows = request.rows("keys", numbers, (1 + participant.sums) * crypto.PUBLIC)
    public = {n: crypto.pieces(row, crypto.PUBLIC) for n, row in rows.items()}
    _check_enough(mod, public)
    if mod.trusted is not None:
        signatures = request.rows("signatures", numbers, crypto.SIGNATURE)
        crypto.check_signatures(crypto.trusted_keys(mod.trusted), public, signatures)
    shares, commitments = participant.share(public, request.number("threshold"))
    memory.save()
    order = sorted(numbers)
    sealed = [shares[n] for n in order if n in shares]
    digests = [commitments[n] for n in order]
    return request.reply_rows(sealed_shares=sealed, commitments=digests)


def _exponents(mod: SecureSumsMod, request: SumRequest, memory: SumMemory) -> Message:
    """Compute and keep the contribution; send its masked exponents."""
    if "senders" in request.sent:
        senders = request.numbers("senders")
        sealed = request.rows("sealed-shares", senders, None)
        memory.participant.receive(sealed, request.rows("commitments", senders, None))
    # If the server asks again, the client sends what it has computed before.
    if memory.contribution.index != request.index:
        reply = request.answered()
        if reply.has_error():
            return reply
        metric = request.weighted_by if request.options.get("secure-weighted") else None
        contribution = Contribution.of(reply, metric, request.params)
        norm, deviation = math.inf, 0.0
        if "bounds" in request.sent:
            norm, deviation = request.tensor("bounds", torch.float64, 2).tolist()
        noise = deviation / norm if norm > 0 else -1.0
        _check_noise(mod, noise)
        if norm < math.inf:
            contribution = contribution.bounded(request.params, norm, deviation)
        contribution = replace(contribution, index=request.index, noise=noise)
        memory = replace(memory, contribution=contribution)
    words = memory.participant.exponents(request.index, memory.contribution.exponents())
    memory.save()
    return request.reply_words(words, memory.contribution)


def _values(mod: SecureSumsMod, request: SumRequest, memory: SumMemory) -> Message:
    """Send the masked contribution."""
    if memory.contribution.index != request.index - 1:
        raise ClientError(
            f"this client has no contribution for sum {request.index}, because it did "
            f"not take part in sum {request.index - 1}"
        )
    _check_noise(mod, memory.contribution.noise)  # it may be of before a restart
    count = len(memory.contribution.layout())
    exponents = request.tensor("exponents", torch.int64, count).tolist()
    fixed = FixedPoint(request.number("bits"), request.number("clients"))
    words = memory.contribution.words(fixed, exponents)
    masked = memory.participant.mask(request.index, words)
    memory.save()
    return request.reply_words(masked, memory.contribution)


def _open(mod: SecureSumsMod, request: SumRequest, memory: SumMemory) -> Message:
    """Send the shares that open a sum, after its set of clients is fixed."""
    survivors, dropped = request.numbers("survivors"), request.numbers("dropped")
    _check_enough(mod, survivors)
    shares = memory.participant.open(request.index, survivors, dropped)
    if memory.contribution.index == request.index - 1:  # the sum has it
        memory = replace(memory, contribution=Contribution({}))
    memory.save()
    return request.reply_rows(shares=[shares[n] for n in (*survivors, *dropped)])


_STAGES: dict[str, Callable[[SecureSumsMod, SumRequest, SumMemory], Message]] = {
    "shares": _shares,
    "exponents": _exponents,
    "values": _values,
    "open": _open,
}


def _check_noise(mod: SecureSumsMod, noise: float) -> None:
    if not noise * (1 + 1e-12) >= mod.min_noise:  # a quotient is rounded
        raise ClientError(
            f"the noise is {noise:.3g} times the clipping norm, but this client wants "
            f"SecureSumsMod(min_noise={mod.min_noise:g}): pass privacy= with more noise"
        )


def _check_enough(mod: SecureSumsMod, numbers: Collection[int]) -> None:
    if len(numbers) < mod.min_clients:
        raise ClientError(
            f"{len(numbers)} clients share secrets here, but this client requires at "
            f"least {mod.min_clients} (SecureSumsMod(min_clients=...)): ask more "
            "clients"
        )
