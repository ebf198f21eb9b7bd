"""How long something takes, how much memory, and on which made-up batches."""

import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Work = Callable[[], object]
Clock = Callable[[], float]


def where() -> str:
    """Return what times are measured on."""
    return f"{platform.machine()}, torch {torch.__version__}"


def seconds(
    work: Work, device: torch.device | None = None, clock: Clock = time.perf_counter
) -> float:
    """Return how long something took, the device's queue included."""
    wait: Work = lambda: None  # noqa: E731
    if device and device.type != "cpu":
        wait = torch.get_device_module(device).synchronize
    wait()
    began = clock()
    work()
    wait()
    return clock() - began


def medians(
    todo: Mapping[str, Work],
    repeats: int,
    warm_up: int,
    device: torch.device | None = None,
    clock: Clock = time.perf_counter,
) -> dict[str, float]:
    """Return each one's median seconds; they take turns in random order."""
    shuffled = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in todo}
    for repeat in range(warm_up + repeats):
        for name in shuffled.sample(list(todo), len(todo)):
            took = seconds(todo[name], device, clock)
            if repeat >= warm_up:
                times[name].append(took)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_bytes(work: Work, device: torch.device | None = None) -> int:
    """Return the most that was allocated at once, over the start."""
    if device and device.type != "cpu":
        there = torch.get_device_module(device)
        there.reset_peak_memory_stats(device)
        held = there.memory_allocated(device)
        work()
        return there.max_memory_allocated(device) - held
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        work()
    events = sorted(
        (e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    )
    held = peak = 0
    for event in events:
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@dataclass
class Batches:
    """A loader over tensors that are in memory already."""

    x: Tensor
    y: Tensor
    size: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.x.split(self.size), self.y.split(self.size), strict=True)


def generated(count: int) -> tuple[Tensor, Tensor]:
    """Return images of CIFAR-10's shape, noise around a mean a class, with labels."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(10, (count,), generator=generator)
    means = torch.randn(10, 3, 32, 32, generator=generator)
    return 0.5 * means[y] + torch.randn(count, 3, 32, 32, generator=generator), y
