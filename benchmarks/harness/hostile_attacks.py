"""What a hostile client of :mod:`hostile_runs` sends, by its name."""

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from hostile import (
    ANY,
    CURVATURE,
    LONG_KEY,
    MANY_RANDOM,
    NETWORK,
    PACKED,
    RANDOM,
    VICTIMS,
    adds,
    both,
    counting,
    edit,
    identity,
    noise,
    raising,
    repacked,
    says,
)

REFINED = "FedFisher, refined", "FedFisher, pretrained"
Attack = Callable[[RecordDict, RecordDict], None]


def extra_metrics(content: RecordDict, sent: RecordDict) -> None:
    """Report a hundred thousand metrics more."""
    (record,) = content.metric_records.values()
    record.update({f"m{i}": 1.0 for i in range(10**5)})


def two_records(content: RecordDict, sent: RecordDict) -> None:
    """Send another record."""
    content["more"] = ArrayRecord({"w": Array(np.zeros(1, np.float32))})


def no_records(content: RecordDict, sent: RecordDict) -> None:
    """Send nothing."""
    content.clear()


def within_the_limits(content: RecordDict, sent: RecordDict) -> None:
    """Say as much as the policy lets anyone say, and the opposite of what is true."""
    (record,) = content.array_records.values()
    (start,) = sent.array_records.values()
    for key in list(record):
        values = record[key].numpy()
        if re.search(ANY, key) and values.dtype.kind == "f":
            same = key in start and start[key].shape == record[key].shape
            at = start[key].numpy() if same else 0.0
            record[key] = Array((at - (values - at)).astype(values.dtype))
    (metrics,) = content.metric_records.values()
    metrics["num-examples"] = 75  # as the median client has


GENERAL = {
    "NaN": edit(ANY, lambda a: a * np.nan),
    "infinite": edit(ANY, lambda a: a + np.inf),
    "1e30": edit(ANY, lambda a: a * 0 + 1e30),
    "scaled by 1e4": edit(ANY, lambda a: 1e4 * a),
    "scaled by -1e4": edit(ANY, lambda a: -1e4 * a),
    "scaled by 20": edit(ANY, lambda a: 20 * a),
    "sign flipped": edit(ANY, lambda a: -a),
    "random": RANDOM,
    "zeros": edit(ANY, lambda a: 0 * a),
    "2^62 examples": says(num_examples=2**62),
    "2^62 examples, random": both(RANDOM, says(num_examples=2**62)),
    "2^62 examples, sign flipped": both(
        edit(ANY, lambda a: -a), says(num_examples=2**62)
    ),
    "1e9 examples": says(num_examples=10**9),
    "1e9 examples, random": MANY_RANDOM,
    "1e9 examples, sign flipped": both(
        edit(ANY, lambda a: -a), says(num_examples=10**9)
    ),
    "1e-30 examples": says(num_examples=1e-30),
    "-192 examples": says(num_examples=-192),
    "a list of examples": says(num_examples=[1, 2]),
    "100 000 keys": adds(10**5),
    "100 000 metrics": extra_metrics,
    "a key of a megabyte": adds(1, LONG_KEY),
    "an error of a megabyte": raising,
    "two ArrayRecords": two_records,
    "no record": no_records,
    "another metric": says(more=1.0),
    "a NaN metric": says(train_loss=math.nan),
}
OF_CURVATURE = {
    "F x 1e30": edit(CURVATURE, lambda a: a * 1e15 * 1e15),
    "F = 1e30 I": edit(CURVATURE, lambda a: 1e30 * identity(a)),
    "F x 1e6": edit(CURVATURE, lambda a: a * 1e6),
    "F x 1e6, random": both(edit(NETWORK, noise), edit(CURVATURE, lambda a: a * 1e6)),
    "F x 1e6, sign flipped": both(
        edit(NETWORK, lambda a: -a), edit(CURVATURE, lambda a: a * 1e6)
    ),
    "F x 1e16, random": both(edit(NETWORK, noise), edit(CURVATURE, lambda a: a * 1e8)),
    "F x 1e-20": edit(CURVATURE, lambda a: a * 1e-20),
    "F = 0": edit(CURVATURE, lambda a: a * 0),
    "F negative": edit(CURVATURE, lambda a: -a),
    "F x 1e-6, random": both(edit(NETWORK, noise), edit(CURVATURE, lambda a: a * 1e-6)),
}
OF_TCT = {
    "means of 1e300": edit(r"^tct/sum$", lambda a: a * 0 + 1e300),
    "means of 1e15": edit(r"^tct/sum$", lambda a: a * 0 + 1e15),
    "no deviation": edit(r"^tct/squares$", lambda a: a * 0),
    "deviation x 1e12": edit(r"^tct/squares$", lambda a: a * 1e12),
    "eigenvalue 1e300": edit(r"^tct/largest", lambda a: a * 0 + 1e300),
    "eigenvalue 1e9": edit(r"^tct/largest", lambda a: a * 0 + 1e9),
    "eigenvalue 0": edit(r"^tct/largest", lambda a: a * 0),
    "30 000 examples": says(num_examples=30_000),
}
OF_SUMS = {
    f"{which} {what}": edit(f"^head/{key}$", change)
    for which, key in {"moments": "gram", "labels": "cross", "both": ".*"}.items()
    for what, change in {
        "x -1": lambda a: -a,
        "x 20": lambda a: 20 * a,
        "x 1e4": lambda a: 1e4 * a,
        "x -1e4": lambda a: -1e4 * a,
        "of 1e30": lambda a: a * 0 + 1e30,
        "of 1e300": lambda a: a * 0 + 1e300,
        "random": noise,
        "of zero": lambda a: 0 * a,
    }.items()
}
OF_LOSSES = {
    f"losses {what}": edit("^loss(es)?$", change)
    for what, change in {
        "x -1": lambda a: -a,
        "x 1e4": lambda a: 1e4 * a,
        "of 1e30": lambda a: a * 0 + 1e30,
        "in reverse": lambda a: a[::-1] if a.ndim else a,
        "of zero": lambda a: 0 * a,
    }.items()
}
OF_STATISTICS = {
    "negative variance": edit("running_var", lambda a: -100 * a),
    "one variance below zero": edit(
        "running_var", lambda a: np.where(a == a.min(), a - 10, a)
    ),
    "-37 batches": counting(-37),
    "2^62 batches": counting(2**62),
    "variance of 1e30": edit("running_var", lambda a: a * 0 + 1e30),
    "variance of 1e6": edit("running_var", lambda a: a * 0 + 1e6),
    "means of 1e6": edit("running_mean", lambda a: a * 0 + 1e6),
}


OF_EVALUATION = {
    "-192 examples": says(num_examples=-192),
    "2^62 examples": says(num_examples=2**62),
    "1e9 examples": says(num_examples=10**9),
    "a list as loss": says(loss=[1.0, 2.0]),
    "a NaN loss": says(loss=math.nan),
    "a loss of 1e300": says(loss=1e300),
    "another metric": says(more=1.0),
    "100 000 metrics": extra_metrics,
    "an error of a megabyte": raising,
    "no record": no_records,
}
OF_QUERIES = {
    "partition -5": says(partition_id=-5),
    "partition 2^62": says(partition_id=2**62),
    "a list of partitions": says(partition_id=[1, 2]),
    "100 000 metrics": extra_metrics,
    "an error of a megabyte": raising,
    "no record": no_records,
}


def cases() -> list[tuple[str, str, str, Attack]]:
    """Every strategy and kind of reply with every attack that means something to it."""
    every = []
    for name in VICTIMS:
        attacks = dict(GENERAL)
        if name.startswith("FedFisher") or name == "FedFish":
            attacks |= OF_CURVATURE
        if name == "TCT":
            attacks |= OF_TCT
        if name == "AFL" or name in REFINED:
            attacks |= OF_SUMS
        if name in REFINED:
            attacks |= OF_LOSSES
        if "batch norm" in name:
            attacks |= OF_STATISTICS
        if name == PACKED:
            attacks = {k: repacked(v) for k, v in attacks.items()}
        kinds = {"train": attacks, "evaluate": OF_EVALUATION, "query": OF_QUERIES}
        every += [
            (name, kind, attack, act)
            for kind, table in kinds.items()
            for attack, act in table.items()
        ]
    return every
