"""Fuzzing of the wire: each corrupt upload is read, or refused with a WireError.

    python tools/fuzz_wire.py --count 100000 --seed 0

Each upload of a curvature starts as a valid one, and is corrupted at random on one of
its levels: the record's arrays and their announced forms, the bytes of an array, a
container's header, an entry's head or its bytes. Reading it must give a WireError, or
finite numbers, variances >= 0 and symmetric factors. It must take no more memory than a
small multiple of the largest upload of that model.
"""

import argparse
import json
import random
import resource
import struct
import sys
import time
import tracemalloc
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from safetensors.torch import load, save
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flwr_fisher.errors import WireError
from flwr_fisher.wire import LOSSLESS, Codec, FisherUpload, curvature_to_tensors
from flwr_fisher.wire.budget import byte_limit
from flwr_fisher.wire.codec import PACKED

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from uploads import upload_of

TIMES = 8  # memory may be this many times an upload's size plus what it is decoded to
FRAME = 1 << 18  # bytes of Python's own: objects, messages, caches
CAP = 1 << 29  # bytes beyond what the process has when the full run begins

WIDE = Codec("fedavg", budget=30.0)
SOURCES = [
    (name, structure, codec)
    for name in ("mlp", "cnn", "odd")
    for structure in ("kfac", "diagonal")
    for codec in (
        LOSSLESS,
        WIDE,
        Codec("fedavg"),
        *([Codec(budget=0.9)] if structure == "kfac" else []),
    )
]
WORDS = [
    *(b"\0", b"\xff", b"\x01", b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff" * 8, b"\x80"),
    *(struct.pack("<f", v) for v in (float("nan"), float("inf"), -1.0, 3e38, 1e-45)),
    *(struct.pack("<I", v) for v in (1, 2**31, 2**32 - 1, 10**6)),
    *(b"(", b"-1", b"'<f8'", b"'|O'", b"99999999999", b"L", b"\n", b"{", b"]", b'"'),
    *(b'"U8"', b'"F64"', b"[0,0]", b"[9]", b"null", b"1e999", b"NaN", b"\\u0000"),
]
INF = float("inf")
FLOATS = (float("nan"), INF, -INF, -1.0, -1e-9, 3e38, 1e30, 0.0, 1e-45)
NUMBERS = [0, 1, 2, 3, 7, 8, 16, 17, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1]


@dataclass(frozen=True)
class Good:
    """A payload as it should be, and what it may take to read it."""

    record: ArrayRecord
    like: dict[str, Tensor]
    codec: Codec
    structure: str
    memory: int


@cache
def good(name: str, structure: str, codec: Codec) -> Good:
    sent = upload_of(name, structure)
    record = sent.to_arrays(codec)
    size = sum(len(array.data) for array in record.values())
    if codec != LOSSLESS:
        size = max(size, byte_limit(sent.params, codec))
    floats = [v for v in sent.params.values() if v.is_floating_point()]
    total = sum(v.numel() for v in floats)
    decoded = 4 * total * 2
    for weight in floats:  # factors, of as many groups as there can be
        if weight.dim() > 1:
            groups = weight.shape[0] if weight.dim() > 2 else 1
            inputs = weight.shape[1:].numel() + 1
            decoded += 4 * (groups * inputs**2 + weight.shape[0] ** 2)
    return Good(record, sent.params, codec, structure, TIMES * (size + decoded))


# --- how it is spoiled ----------------------------------------------------------------


def spoil_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip, write over, insert, drop, cut or replace."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(changed) + 1)
        if rng.random() < 0.4:  # heads and scales are where most information is
            at = min(at, rng.randrange(48))
        word = rng.choice(WORDS) if rng.random() < 0.6 else rng.randbytes(4)
        match rng.randrange(7):
            case 0 | 1 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 2:
                changed[at : at + len(word)] = word
            case 3:
                changed[at:at] = word
            case 4:
                del changed[at : at + rng.choice((1, 4, 40))]
            case 5:
                del changed[at:]
            case 6 if rng.random() < 0.2:
                changed[:] = rng.randbytes(rng.choice((0, 3, 30, len(data))))
    return bytes(changed)


def spoil_head(entry: bytes, rng: random.Random) -> bytes:
    """Say something else in an entry's first bytes."""
    head, fields = bytearray(entry[:14].ljust(14, b"\0")), rng.randrange(1, 4)
    for _ in range(fields):
        match rng.randrange(3):
            case 0:
                head[0] = rng.choice((*range(8), 255))
            case 1:
                head[1] = rng.choice((*range(19), 255))
            case 2:
                number = rng.choice((*NUMBERS, *range(24)))
                struct.pack_into("<I", head, rng.choice((2, 6, 10, 0, 4, 8)), number)
    return bytes(head) + entry[14:]


def spoil_floats(entry: bytes, rng: random.Random) -> bytes:
    """Put odd floats where scales, norms and values may be."""
    changed = bytearray(entry)
    for _ in range(rng.choice((1, 1, 3))):
        places = range(rng.choice((0, 2, 12, 14)), len(entry) - 3, 4)
        if places:
            place = rng.choice((places[0], rng.choice(places)))
            struct.pack_into("<f", changed, place, rng.choice(FLOATS))
    return bytes(changed)


def invented(rng: random.Random) -> bytes:
    """An entry that is consistent in itself, though it may not fit the model."""
    form, bits = rng.randrange(1, 6), rng.choice((4, 4, 8, 8, 8, 16, 11))
    groups, n = rng.choice((1, 1, 2, 4, 8, 3)), rng.choice((1, 1, *range(25), 168, 365))
    rank = rng.choice((0, 0, 1, n, n + 1))
    if rng.random() < 0.1:
        groups = rng.choice(NUMBERS)
    head = struct.pack("<BBIII", form, bits, groups, n, rank)
    scales, codes = {
        1: (1, groups * n),
        2: (-(-groups * n // 256), groups * n),
        3: (groups * n, groups * n * (n + 1) // 2),
        4: (groups * (rank + 1), groups * n * rank),
        5: (0, groups * n * rank),
    }[form]
    if (size := -(-codes * bits // 8)) + 4 * scales > 1 << 16:
        return head
    usual, odd = (0.0, 1.0, 1e-20, 1e10), rng.random() < 0.3
    floats = [rng.choice(FLOATS if odd else usual) for _ in range(scales)]
    return head + struct.pack(f"<{scales}f", *floats) + rng.randbytes(size)


def spoil_entries(data: bytes, rng: random.Random) -> bytes:
    """Spoil a container's entries; as a file it stays a good one."""
    entries = {k: v.numpy().tobytes() for k, v in load(data).items()}
    for _ in range(rng.choice((1, 1, 2, 4))):
        key, other = rng.choice(sorted(entries)), rng.choice(sorted(entries))
        match rng.randrange(12):
            case 0 | 1:
                entries[key] = spoil_bytes(entries[key], rng)
            case 2 | 3:
                entries[key] = spoil_head(entries[key], rng)
            case 4 | 9:
                entries[key] = spoil_floats(entries[key], rng)
            case 10:
                entries[rng.choice(sorted(entries))] = invented(rng)
            case 11:
                entries[other_key(key, rng)] = invented(rng)
            case 5:
                entries[key], entries[other] = entries[other], entries[key]
            case 6 if len(entries) > 1:
                del entries[key]
            case 7:
                entries[other_key(key, rng)] = entries[other]
            case 8:
                entries[key] = rng.randbytes(len(entries[key]))
    return save({k: tensor_of(v) for k, v in entries.items()})


def other_key(key: str, rng: random.Random) -> str:
    kinds = ("kfac", "diagonal", "format", "lowrank")
    name = key.split("/")[2] if key.count("/") > 1 else key
    endings = ("", "/A", "/G", "/S", ",0.weight", ",1.bias,2.weight", "/B")
    return rng.choice(
        (
            f"curvature/{rng.choice(kinds)}/{name}{rng.choice(endings)}",
            f"{key}x",
            key[:-1] + rng.choice("AGSx"),
            "",
            "x" * 300,
        )
    )


def tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]


def spoil_header(data: bytes, rng: random.Random) -> bytes:
    """Spoil a container's JSON, mostly so that its length is still right."""
    (length,) = struct.unpack("<Q", data[:8])
    head, body = data[8 : 8 + length], data[8 + length :]
    if rng.random() < 0.5:
        fields = json.loads(head)
        key = rng.choice(sorted(fields))
        match rng.randrange(5):
            case 0:
                fields[key]["shape"] = [rng.choice(NUMBERS) for _ in range(3)]
            case 1:
                fields[key]["data_offsets"] = rng.sample(NUMBERS, 2)
            case 2:
                fields[key]["dtype"] = rng.choice(("F32", "BOOL", "U16", "x", None))
            case 3:
                fields[other_key(key, rng)] = fields.pop(key)
            case 4:
                fields["__metadata__"] = {"a": rng.choice(("b", 1, None))}
        head = json.dumps(fields).encode()
    else:
        head = spoil_bytes(head, rng)
    if rng.random() < 0.9:
        length = len(head)
    elif rng.random() < 0.5:
        length = rng.choice((*NUMBERS, 2**63, 2**64 - 1))
    return struct.pack("<Q", length) + head + body


DTYPES = ("float32", "float64", "int64", "uint8", "object", "x", "", ">f4", "complex64")
SHAPES: tuple[Any, ...] = (
    (),
    (0,),
    (1,),
    (-1,),
    (2**40,),
    (3, 3),
    (2**31, 2**31, 2**31),
)


def spoil_array(array: Array, rng: random.Random) -> Array:
    """Spoil what an array declares, or which values it holds."""
    dtype, shape, stype, data = array.dtype, array.shape, array.stype, array.data
    match rng.randrange(5):
        case 0:
            dtype = rng.choice(DTYPES)
        case 1:
            shape = rng.choice(SHAPES)
        case 2:
            stype = rng.choice(("torch.tensor", "", "numpy.ndarray ", "pickle"))
        case 3:
            values = np.frombuffer(rng.randbytes(array_size(array)), np.uint8)
            kind = rng.choice(("u1", "f4", "f2", "i8", "?", "f8"))
            size = len(values) - len(values) % np.dtype(kind).itemsize
            with np.errstate(all="ignore"):
                return Array(values[:size].view(kind))
        case 4:
            values = array.numpy().copy()
            if values.dtype.kind == "f" and values.size:
                values.reshape(-1)[rng.randrange(values.size)] = rng.choice(FLOATS)
            else:
                values = values.reshape(-1)
            return Array(values)
    return Array(dtype, shape, stype, data)


def array_size(array: Array) -> int:
    return max(len(array.data) - 128, 0)


def spoil(record: ArrayRecord, packed: bool, rng: random.Random) -> ArrayRecord:
    """Return another record; the first is left as it is."""
    arrays = dict(record)
    key = rng.choice(list(arrays))
    array = arrays[key]
    level = rng.random()
    if packed and level < 0.75:
        start = len(array.data) - int(np.prod(array.shape))
        inside = array.data[start:]
        inside = (spoil_entries if level < 0.6 else spoil_header)(inside, rng)
        arrays[key] = Array(np.frombuffer(inside, np.uint8))
    elif level < 0.85:
        arrays[key] = Array(
            array.dtype, array.shape, array.stype, spoil_bytes(array.data, rng)
        )
    elif level < 0.94:
        arrays[key] = spoil_array(array, rng)
    elif level < 0.97:
        other = rng.choice(list(arrays))
        arrays[key], arrays[other] = arrays[other], arrays[key]
    else:
        arrays[rng.choice((other_key(key, rng), "packed2"))] = arrays.pop(key)
    return ArrayRecord(arrays)


# --- what may come of it --------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the largest storage that torch has made."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor) and not tensor.is_meta:  # of no memory
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return made


def check(record: ArrayRecord, of: Good, *, requested: bool = True) -> str:
    """Read a record; return "read" or "refused", and raise at anything else."""
    structure = of.structure if requested else None
    try:
        got = FisherUpload.from_arrays(record, of.like, of.codec, structure=structure)
    except WireError as error:
        if f"'{error.field}': {error.reason}" not in str(error):
            raise AssertionError("a WireError that names no field") from error
        return "refused"
    assert list(got.params) == list(of.like)
    for key, value in got.params.items():
        assert (value.shape, value.dtype) == (of.like[key].shape, of.like[key].dtype)
        assert value.isfinite().all(), key
    for key, value in curvature_to_tensors(got.curvature).items():
        assert value.isfinite().all(), key
        if "/diagonal/" in key:
            assert (value >= 0).all(), key
        elif value.numel():
            largest = value.abs().max()
            lossless = PACKED not in record  # whose senders round by themselves
            allowed = 1e-4 * largest if lossless else 0
            assert (value - value.mT).abs().max() <= allowed, key
            assert (value.diagonal(dim1=-2, dim2=-1) >= 0).all(), key
    return "read"


def check_memory(record: ArrayRecord, of: Good, *, requested: bool = True) -> str:
    """Do the same, and look at what it allocates."""
    arrived = sum(len(array.data) for array in record.values())
    allowed = of.memory + TIMES * arrived + FRAME
    tracemalloc.start()
    try:
        with Largest() as torch_made:
            result = check(record, of, requested=requested)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= allowed, f"{peak} bytes for {arrived}, {allowed} allowed"
    assert torch_made.nbytes <= allowed, f"a tensor of {torch_made.nbytes} bytes"
    return result


@cache
def load_what_is_loaded_once() -> None:
    """Let torch import what its modes need, which is no payload's memory."""
    of = good(*SOURCES[0])
    with Largest():
        check(of.record, of)


def fuzz(count: int, seed: int, every: int = 1) -> Counter[str]:
    """Read `count` spoiled payloads; return how many were read, and how many refused.

    The same seed gives the same payloads. Of every `every`-th, memory is looked at.
    """
    counts: Counter[str] = Counter()
    load_what_is_loaded_once()
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        of = good(*rng.choice(SOURCES))
        record = spoil(of.record, of.codec != LOSSLESS, rng)
        requested = rng.random() < 0.5
        try:
            run = check if number % every else check_memory
            counts[run(record, of, requested=requested)] += 1
        except BaseException as error:
            error.add_note(
                f"payload {number} of seed {seed}, {of.codec}, {of.structure}"
            )
            raise
    return counts


def main() -> None:
    """Run the whole count, with a cap on memory where the system knows one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    load_what_is_loaded_once()
    for source in SOURCES:  # so that what is loaded and made once does not count
        of = good(*source)
        check_memory(of.record, of)
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        limit = pages * resource.getpagesize() + CAP
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    counts = fuzz(args.count, args.seed, every=10)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(
        f"{args.count} payloads: {counts['read']} read, {counts['refused']} refused, "
        f"{time.monotonic() - start:.0f} s, peak memory grew by {grown >> 10} MiB"
    )


if __name__ == "__main__":
    main()
