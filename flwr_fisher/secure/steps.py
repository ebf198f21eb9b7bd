"""The server's steps in each stage of a secure sum, and its state between them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from flwr.app import MetricRecord
from torch import Tensor

from flwr_fisher.errors import RoundError, WireError, kept_record, listed
from flwr_fisher.log_lines import logger
from flwr_fisher.params import Params, rounded
from flwr_fisher.secure import crypto
from flwr_fisher.secure.aggregator import Aggregator, Sealed
from flwr_fisher.secure.fixed_point import LEVELS, FixedPoint, Words, highest
from flwr_fisher.secure.payload import LAYOUT, SecureUpload, bytes_in, read_layout
from flwr_fisher.server.exchange import Exchange, ServerState, Step, Upload, Uploads
from flwr_fisher.server.privacy import Privacy
from flwr_fisher.wire import NUM_EXAMPLES, tensors_to_arrays
from flwr_fisher.wire.arrays import bytes_of

GROUP = "secure"  # groups of a state's tensors, and of tensors for clients' mods
_FEWEST = 2


@dataclass(frozen=True)
class SecureState:
    """The state of a round's secure sums: its clients, and the current stage.

    Parameters
    ----------
    aggregator : Aggregator
        Keys, neighbours and sealed shares.
    sessions : Mapping[int, Tensor]
        By client: 8 bytes that identify these sums for it.
    signatures : Mapping[int, bytes]
        By client: its signature under its public keys.
    present : Sequence[int]
        The clients that replied to the last request.
    exponents : Sequence[int]
        The exponents of the contributions' tensors, when they are known.
    words : Tensor
        The sum under masks, until it is opened.
    descriptions : Mapping[str, Tensor]
        The descriptions of the contributions, which are equal for all clients: texts,
        by their keys.
    """

    aggregator: Aggregator
    sessions: Mapping[int, bytes]
    signatures: Mapping[int, bytes]
    present: Sequence[int]
    exponents: Sequence[int] = ()
    words: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint32))
    descriptions: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, state: ServerState) -> "SecureState":
        """Return the state of secure sums in a run's state.

        Raises
        ------
        CheckpointError
            If another version wrote it.
        """
        tensors = dict(state.group(GROUP))
        with kept_record("the run's record of a secure sum"):
            record = crypto.from_json(tensors.pop("record").numpy().tobytes())
            aggregator, words = record.pop("aggregator"), tensors.pop("words")
            sealed = {n: Sealed(**s) for n, s in aggregator.pop("sealed").items()}
            known = Aggregator(**aggregator, sealed=sealed)
            return cls(known, **record, words=words, descriptions=tensors)

    def after(self, uploads: Uploads[Any], **changes: Any) -> "SecureState":
        """Return the state after an exchange."""
        present = sorted(upload.number for upload in uploads)
        return replace(self, **{"present": present, **changes})

    def into(self, state: ServerState) -> ServerState:
        """Return a run's state that contains this."""
        record = dict(vars(self))
        words, descriptions = record.pop("words"), record.pop("descriptions")
        text = bytes_of(crypto.to_json(record))
        group = {**descriptions, "record": text, "words": words}
        return replace(state, groups={**state.groups, GROUP: group})


def present(state: ServerState) -> Sequence[int]:
    """Return the clients that replied to the last request."""
    return SecureState.of(state).present


# --- the stages, in the order in which a round has them
#
# keys, shares: once. Then for each of the round's exchanges: exponents, open, values,
# open. A client that is missing in one stage is in none of the later ones. So the set
# of clients (`present`) only shrinks, and each sum is opened for one set.


def take_keys(
    threshold: float,
    sums: int,
    seed: str,
    state: ServerState,
    uploads: Uploads[SecureUpload],
) -> Step:
    """Read the clients' public keys, and draw their neighbours.

    Raises
    ------
    RoundError
        If fewer than two clients have sent keys that can be used.
    """
    # A client may send anything. Who sends no keys of its own is left out, because with
    # another client's keys its masks would not cancel.
    names: dict[int, str] = {}
    public: dict[int, list[bytes]] = {}
    sessions: dict[int, bytes] = {}
    signatures: dict[int, bytes] = {}
    owners: dict[bytes, str] = {}
    for upload in sorted(uploads, key=lambda upload: upload.number):
        number, payload = upload.number, upload.payload
        keys = crypto.pieces(payload.data("keys"), crypto.PUBLIC)
        if reason := _wrong_keys(keys, 1 + sums, owners):
            logger.warning("aggregate_train: rejected %s: %s", upload.client, reason)
            continue
        owners |= dict.fromkeys(keys, upload.client)
        names[number], public[number] = upload.client, keys
        sessions[number] = payload.data("session")
        signatures[number] = payload.data("signature")
    if len(public) < _FEWEST:
        raise RoundError(
            f"valid keys for a secure sum came from {len(public)} of {len(uploads)} "
            f"clients, but {_FEWEST} are needed: ask more, by fraction_train or "
            "min_train_nodes"
        )
    aggregator = Aggregator.of(names, public, threshold, seed)
    known = SecureState(aggregator, sessions, signatures, list(public))
    return Step(known.into(state), quiet=True)


def _wrong_keys(keys: list[bytes], count: int, owners: Mapping[bytes, str]) -> str:
    """Return why public keys are not valid, or ""."""
    if len(keys) != count or len(set(keys)) < count:
        return f"{len(set(keys))} public keys, expected {count}"
    if copied := sorted({owners[key] for key in keys if key in owners}):
        return f"its public keys are {copied[0]}'s"
    try:
        for key in keys:
            crypto.public_key(key)
    except ValueError as error:
        return f"not a public key: {error}"
    return ""


def take_shares(state: ServerState, uploads: Uploads[SecureUpload]) -> Step:
    """Keep the sealed shares, to pass them on.

    Raises
    ------
    RoundError
        If too few neighbours of a client have sent their shares.
    """
    known = SecureState.of(state)
    sums = len(next(iter(known.aggregator.public.values()))) - 1
    sealed: dict[int, Sealed] = {}
    # The server cannot read the shares. It only counts them, so that each neighbour
    # gets its own.
    for upload in uploads:
        around = known.aggregator.neighbourhoods[upload.number]
        others = [n for n in around if n != upload.number]
        rows = upload.payload.part("secure/sealed-shares")
        digests = upload.payload.part("secure/commitments")
        fits = rows.dim() == 2 and len(rows) == len(others)
        if not fits or tuple(digests.shape) != (len(around), 2 * crypto.DIGEST * sums):
            text = "aggregate_train: rejected %s: it must send one share for each of "
            text += "%s neighbours and %s sums"
            logger.warning(text, upload.client, len(others), sums)
            continue
        sealed[upload.number] = Sealed(
            dict(zip(others, bytes_in(rows), strict=True)),
            dict(zip(around, bytes_in(digests), strict=True)),
        )
    aggregator = known.aggregator.shared(sealed)
    new = known.after(uploads, aggregator=aggregator, present=sorted(sealed))
    return Step(new.into(state), quiet=True)


def take_words(
    index: int,
    privacy: Privacy | None,
    state: ServerState,
    uploads: Uploads[SecureUpload],
) -> Step:
    """Keep the sum of the masked words.

    Raises
    ------
    RoundError
        If so few clients are left that their noise is too small.
    """
    known = SecureState.of(state)
    clients = len(known.aggregator.public)
    if privacy is not None and len(uploads) < (fewest := privacy.fewest(clients)):
        raise RoundError(
            f"only {len(uploads)} of {clients} clients are left, but the noise needs "
            f"at least {fewest} (Privacy(honest={privacy.honest:g})), so the sum is "
            "not opened"
        )
    # All uploads that are left have the same layout. The masks are still in the sum,
    # also those of clients that have left after the shares; the next stage opens it for
    # exactly these clients.
    total, descriptions = SecureUpload.total([upload.payload for upload in uploads])
    new = known.after(uploads, words=torch.from_numpy(total), descriptions=descriptions)
    left = set(known.present) - set(new.present)
    if gone := [known.aggregator.names[n] for n in left]:
        text = "aggregate_train: secure sum, contribution %d: without %s"
        logger.warning(text, 1 + index // 2, listed(gone))
    return Step(new.into(state), quiet=True)


def open_exponents(
    index: int, state: ServerState, uploads: Uploads[SecureUpload]
) -> Step:
    """Open the sum of exponents.

    Raises
    ------
    RoundError
        If the sum cannot be opened, or is not the requested one.
    """
    known = SecureState.of(state)
    words = _opened(index, known, uploads)
    # A word for each tensor and each level: the highest level that is not 0 is the
    # largest exponent of all clients.
    count = len(read_layout(known.descriptions[LAYOUT]))
    if len(words) != LEVELS * count:
        raise RoundError(f"{len(words)} words for the exponents of {count} tensors")
    return Step(known.after(uploads, exponents=highest(words)).into(state), quiet=True)


def open_values(
    index: int,
    bits: int,
    exchange: Exchange[Any],
    last: bool,
    state: ServerState,
    uploads: Uploads[SecureUpload],
) -> Step:
    """Open the sum of values, and take the exchange's own step with it.

    Raises
    ------
    RoundError
        If the sum cannot be opened, or no step can be taken with it.
    """
    known = SecureState.of(state)
    words = _opened(index, known, uploads)
    assert exchange.additive is not None
    sent = exchange.start(state)
    if exchange.additive.privacy is not None:  # the strategy itself adds the steps
        sent = {name: torch.zeros_like(value) for name, value in sent.items()}
    mean, weight = _mean(bits, known, words, exchange.additive.weighted, sent)
    texts = {k: v for k, v in known.descriptions.items() if k != LAYOUT}
    read = exchange.additive.read or exchange.read
    name = f"the sum over {len(known.present)} clients"
    try:
        payload = read(tensors_to_arrays({**mean, **texts}), state.params)
    except WireError as error:
        raise RoundError(f"the step cannot use {name}: {error}") from error
    # From here on the sum is like one client's upload, with the weight of all.
    metrics, members = MetricRecord(), list(known.present)
    summed = Upload(0, name, weight, payload, metrics, num_bytes=0, members=members)
    # The strategy's own state is without this file's group.
    step = exchange.take(replace(state, groups=state.without(GROUP)), [summed])
    counted = {**step.metrics, "num-summed": len(members)}
    step = replace(step, metrics=counted, summed=step.summed or summed)
    # The next exchange uses the same keys and shares. After the last, nothing is kept.
    if last:
        return step
    new = known.after(uploads, words=known.words[:0])
    return replace(step, state=new.into(step.state))


def _mean(
    bits: int, known: SecureState, words: Words, weighted: bool, sent: Params
) -> tuple[dict[str, Tensor], float]:
    """Return the mean, or the sum, in an upload's dtypes, with its weight.

    In a mean, clients' integers are steps from those that were `sent`.
    """
    integers = {(k, v.shape): v for k, v in sent.items() if not v.is_floating_point()}
    layout = read_layout(known.descriptions[LAYOUT])
    sizes = [math.prod(shape) for _, _, shape in layout]
    if sum(sizes) != len(words) or len(layout) != len(known.exponents):
        raise RoundError(f"{len(words)} words for {sum(sizes)} entries")
    # Clients have used the same format: for as many clients as have sent keys.
    fixed = FixedPoint(bits, len(known.aggregator.public))
    parts = np.split(words, np.cumsum(sizes)[:-1])
    values = [fixed.values(*part) for part in zip(parts, known.exponents, strict=True)]
    sums = dict(zip((name for name, _, _ in layout), values, strict=True))
    weight = float(sums.get(NUM_EXAMPLES, torch.zeros(1)).sum()) if weighted else 1.0
    if not weight > 0:
        raise RoundError("the clients' weights add up to 0")
    mean = {}
    for name, dtype, shape in layout:
        value, wanted = sums[name].reshape(shape) / weight, getattr(torch, dtype)
        like = integers.get((name, torch.Size(shape)))
        if weighted and dtype == "int64" and like is not None:
            value, wanted = value + like.double(), like.dtype
        mean[name] = rounded(value, wanted)
    if weighted:
        del mean[NUM_EXAMPLES]
    return mean, weight


def _opened(index: int, known: SecureState, uploads: Uploads[SecureUpload]) -> Words:
    """Return the opened sum, with its masks removed."""
    shares = {}
    for upload in uploads:
        survivors, dropped = known.aggregator.split(upload.number, known.present)
        rows = crypto.pieces(upload.payload.data("shares"), crypto.SHARE)
        # In a reply with too few or too many shares, those that do not fit are wrong.
        shares[upload.number] = dict(zip((*survivors, *dropped), rows, strict=False))
    return known.aggregator.unmask(index, known.words.numpy(), known.present, shares)
