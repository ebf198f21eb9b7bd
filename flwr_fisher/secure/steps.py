"""The server's steps in each stage of a secure sum, and its state between them.

Long: one step for each stage, and the state.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from flwr.app import MetricRecord
from torch import Tensor

from flwr_fisher.errors import RoundError, WireError, kept_record, listed
from flwr_fisher.log_lines import logger
from flwr_fisher.params import rounded
from flwr_fisher.secure.aggregator import (
    Aggregator,
    Sealed,
    neighbourhoods,
    threshold_of,
)
from flwr_fisher.secure.crypto import (
    DIGEST,
    PUBLIC,
    SHARE,
    check_public,
    from_json,
    pieces,
    to_json,
)
from flwr_fisher.secure.fixed_point import LEVELS, FixedPoint, Words, highest
from flwr_fisher.secure.payload import (
    LAYOUT,
    SecureUpload,
    bytes_in,
    read_layout,
    rows_of,
    sum_words,
)
from flwr_fisher.server.exchange import Exchange, ServerState, Step, Upload, Uploads
from flwr_fisher.server.privacy import Privacy
from flwr_fisher.wire import NUM_EXAMPLES, tensors_to_arrays

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
            record = from_json(tensors.pop("record").numpy().tobytes())
            aggregator, words = record.pop("aggregator"), tensors.pop("words")
            sealed = {n: Sealed(**own) for n, own in aggregator.pop("sealed").items()}
            known = Aggregator(**aggregator, sealed=sealed)
            return cls(known, **record, words=words, descriptions=tensors)

    def after(self, uploads: Uploads[Any], **changes: Any) -> "SecureState":
        """Return the state after an exchange."""
        present = sorted(upload.number for upload in uploads)
        return replace(self, **{"present": present, **changes})

    def into(self, state: ServerState) -> ServerState:
        """Return a run's state that contains this."""
        record = {
            "aggregator": self.aggregator,
            "sessions": self.sessions,
            "signatures": self.signatures,
            "present": self.present,
            "exponents": self.exponents,
        }
        text = rows_of([to_json(record).encode()])[0]
        own = {**self.descriptions, "record": text, "words": self.words}
        return replace(state, groups={**state.groups, GROUP: own})


def without(state: ServerState) -> ServerState:
    """Return a run's state without this, for the strategy."""
    others = {name: group for name, group in state.groups.items() if name != GROUP}
    return replace(state, groups=others)


# --- the stages


def take_keys(
    degree: Callable[[int], int],
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
    public: dict[int, list[bytes]] = {}
    owners: dict[bytes, str] = {}
    for upload in uploads:
        keys = pieces(upload.payload.data("keys"), PUBLIC)
        if reason := _wrong_keys(keys, 1 + sums, owners):
            logger.warning("aggregate_train: rejected %s: %s", upload.client, reason)
            continue
        owners |= dict.fromkeys(keys, upload.client)
        public[upload.number] = keys
    if len(public) < _FEWEST:
        raise RoundError(
            f"valid keys for a secure sum came from {len(public)} of {len(uploads)} "
            f"clients, but {_FEWEST} are needed: ask more, by fraction_train or "
            "min_train_nodes"
        )
    usable = [upload for upload in uploads if upload.number in public]
    numbers = sorted(public)
    drawn = random.Random(seed).getrandbits(62)
    around = neighbourhoods(numbers, degree(len(numbers)), drawn)
    aggregator = Aggregator(
        {upload.number: upload.client for upload in usable},
        {number: public[number] for number in numbers},
        dict(zip(numbers, around, strict=True)),
        threshold_of(len(around[0]), threshold),
    )
    sessions = {upload.number: upload.payload.data("session") for upload in usable}
    signatures = {upload.number: upload.payload.data("signature") for upload in usable}
    known = SecureState(aggregator, sessions, signatures, numbers)
    return Step(known.into(state), quiet=True)


def _wrong_keys(keys: list[bytes], count: int, owners: Mapping[bytes, str]) -> str:
    """Return why public keys are not valid, or ""."""
    if len(keys) != count or len(set(keys)) < count:
        return f"{len(set(keys))} public keys, expected {count}"
    if copied := sorted({owners[key] for key in keys if key in owners}):
        return f"its public keys are {copied[0]}'s"
    try:
        for key in keys:
            check_public(key)
    except WireError as error:
        return str(error)
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
    for upload in uploads:
        around = known.aggregator.neighbourhoods[upload.number]
        others = [n for n in around if n != upload.number]
        rows = upload.payload.part("secure/sealed-shares")
        digests = upload.payload.part("secure/commitments")
        expected = len(around), 2 * DIGEST * sums
        fits = rows.dim() == 2 and len(rows) == len(others)
        if not fits or tuple(digests.shape) != expected:
            logger.warning(
                "aggregate_train: rejected %s: it must send one share for each of %s "
                "neighbours and %s sums",
                upload.client,
                len(others),
                sums,
            )
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
    total, descriptions = sum_words([upload.payload for upload in uploads])
    new = known.after(uploads, words=torch.from_numpy(total), descriptions=descriptions)
    left = set(known.present) - set(new.present)
    if gone := [known.aggregator.names[n] for n in known.present if n in left]:
        logger.warning(
            "aggregate_train: secure sum, contribution %d: without %s",
            1 + index // 2,
            listed(gone),
        )
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
    count = len(read_layout(known.descriptions[LAYOUT]))
    if len(words) != LEVELS * count:
        raise RoundError(f"{len(words)} words for the exponents of {count} tensors")
    new = known.after(uploads, exponents=highest(words))
    return Step(new.into(state), quiet=True)


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
    mean, weight = _mean(bits, known, words, exchange.additive.weighted)
    texts = {k: v for k, v in known.descriptions.items() if k != LAYOUT}
    read = exchange.additive.read or exchange.read
    name = f"the sum over {len(known.present)} clients"
    try:
        payload = read(tensors_to_arrays({**mean, **texts}), state.params)
    except WireError as error:
        raise RoundError(f"the step cannot use {name}: {error}") from error
    metrics, members = MetricRecord(), list(known.present)
    summed = Upload(0, name, weight, payload, metrics, num_bytes=0, members=members)
    step = exchange.take(without(state), [summed])
    counted = {**step.metrics, "num-summed": len(members)}
    step = replace(step, metrics=counted, summed=summed)
    if last:
        return step
    new = known.after(uploads, words=known.words[:0])
    return replace(step, state=new.into(step.state))


def _mean(
    bits: int, known: SecureState, words: Words, weighted: bool
) -> tuple[dict[str, Tensor], float]:
    """Return the mean, or the sum, in an upload's dtypes, with its weight."""
    layout = read_layout(known.descriptions[LAYOUT])
    sizes = [math.prod(shape) for _, _, shape in layout]
    if sum(sizes) != len(words) or len(layout) != len(known.exponents):
        raise RoundError(f"{len(words)} words for {sum(sizes)} entries")
    fixed = FixedPoint(bits, len(known.aggregator.public))
    parts = np.split(words, np.cumsum(sizes)[:-1])
    values = [fixed.values(*own) for own in zip(parts, known.exponents, strict=True)]
    found = dict(zip((name for name, _, _ in layout), values, strict=True))
    weight = float(found.get(NUM_EXAMPLES, torch.zeros(1)).sum()) if weighted else 1.0
    if not weight > 0:
        raise RoundError("the clients' weights add up to 0")
    mean = {}
    for name, dtype, shape in layout:
        value = found[name].reshape(shape) / weight
        mean[name] = rounded(value, getattr(torch, dtype))
    if weighted:
        del mean[NUM_EXAMPLES]
    return mean, weight


def _opened(index: int, known: SecureState, uploads: Uploads[SecureUpload]) -> Words:
    """Return the opened sum, with its masks removed."""
    shares = {}
    for upload in uploads:
        survivors, dropped = known.aggregator.split(upload.number, known.present)
        rows = pieces(upload.payload.data("shares"), SHARE)
        # In a reply with too few or too many shares, those that do not fit are wrong.
        pairs = zip((*survivors, *dropped), rows, strict=False)
        shares[upload.number] = dict(pairs)
    words: Words = known.words.numpy()
    return known.aggregator.unmask(index, words, known.present, shares)
