"""Seconds and memory of packing and merging, each in a process of its own."""

import ctypes
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness.alone import alone
from harness.size import sized
from harness.timing import seconds

from flwr_fisher.merge import fedfisher
from flwr_fisher.params import shared_state
from flwr_fisher.wire import Codec, FisherUpload, resolve
from studies.size.uploads import BATCH, network, packed, trained

Numbers = dict[str, Any]
MOST_RUNS, ENOUGH = sized(7, 1), 30.0  # seconds
_GB = 1e9


def gradient_pass(name: str) -> float:
    """Return the median seconds of a forward and a backward pass, batch 32."""
    model, x = network(name), torch.randn(BATCH, 3, 32, 32)
    y = torch.randint(10, (BATCH,))
    times = [seconds(lambda: F.cross_entropy(model(x), y).backward()) for _ in range(8)]
    return statistics.median(times[1:])


def codec(name: str, runs: int = 3) -> Numbers:
    """Return the seconds of packing an upload to FedAvg's size, and of unpacking."""
    params, curvature = trained(name, 0)
    upload = FisherUpload(params, curvature)
    chosen = resolve(Codec("fedavg"), params)
    read = partial(FisherUpload.from_arrays, upload.to_arrays(chosen), params, chosen)
    took: dict[str, list[float]] = {"pack": [], "unpack": [], "pass": []}
    for _ in range(runs):
        took["pass"].append(gradient_pass(name))
        took["pack"].append(seconds(lambda: upload.to_arrays(chosen)))
        took["unpack"].append(seconds(read))
    return {key: statistics.median(values) for key, values in took.items()}


def passed(name: str) -> Numbers:
    """Return the seconds of a gradient pass."""
    return {"pass": gradient_pass(name)}


def merging(name: str, count: int, decoded: bool) -> Numbers:
    """Return what a merge takes: seconds, gradient passes, and memory in GB.

    With `decoded`, uploads are unpacked before; else the merge unpacks each layer. The
    passes are timed before and after, in processes of their own: what they leave behind
    is no memory of the merge's.
    """
    before = alone(passed, name)["pass"]
    found = alone(_merging, name, count, decoded)
    each = statistics.mean([before, alone(passed, name)["pass"]])
    return found | {"pass": each, "passes": found["seconds"] / each}


def _merging(name: str, count: int, decoded: bool) -> Numbers:
    params = shared_state(network(name))
    chosen = resolve(Codec("fedavg"), params)
    posteriors = []
    for record in packed(name, count):
        upload = FisherUpload.from_arrays(record, params, chosen)
        if decoded:
            upload = FisherUpload(dict(upload.params), upload.curvature.made())
        posteriors.append(upload.posterior(100.0))
    # What making the uploads left behind is no memory of theirs; Linux has glibc.
    ctypes.CDLL(None).malloc_trim(0)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    took = [seconds(lambda: fedfisher(posteriors))]
    peak = _resident("VmHWM")
    while len(took) < MOST_RUNS and sum(took) < ENOUGH:
        took.append(seconds(lambda: fedfisher(posteriors)))
    numel = sum(value.numel() for value in params.values())
    return {
        "model": name,
        "parameters": numel,
        "clients": count,
        "seconds": statistics.median(took),
        "uploads-gb": before,
        "peak-gb": peak,
        "above-gb": peak - before,
    }


def _resident(field: str) -> float:
    """Return this process's memory in GB; Linux alone tells it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024 / _GB
