"""How long something takes."""

import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch

Work = Callable[[], object]


def seconds(work: Work, device: torch.device | None = None) -> float:
    """Return how long something took, the device's queue included."""
    wait = torch.cuda.synchronize if device and device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def medians(todo: Mapping[str, Work], repeats: int, warm_up: int) -> dict[str, float]:
    """Return each one's median seconds; they take turns in random order."""
    shuffled = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in todo}
    for repeat in range(warm_up + repeats):
        for name in shuffled.sample(list(todo), len(todo)):
            took = seconds(todo[name])
            if repeat >= warm_up:
                times[name].append(took)
    return {name: statistics.median(values) for name, values in times.items()}
