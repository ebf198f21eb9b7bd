"""Federations in several processes, each finished one kept on disk."""

import json
import logging
import multiprocessing
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

__all__ = ["quiet", "run_all"]

Numbers = dict[str, Any]


def run_all(
    order: Iterable[Any],
    federate: Callable[[Any, Path], Numbers],
    data_dir: Path,
    workers: int,
) -> dict[Any, Numbers]:
    """Run jobs, dataclasses with a `path`, in their order; return their numbers."""
    jobs = list(order)
    run = partial(_measured, federate=federate, data_dir=data_dir)
    with multiprocessing.get_context("fork").Pool(workers, quiet) as pool:
        found = pool.map(run, jobs, chunksize=1)
    return dict(zip(jobs, found, strict=True))


def quiet() -> None:
    """Leave this process one thread, and its log errors alone."""
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)


def _measured(
    job: Any, federate: Callable[[Any, Path], Numbers], data_dir: Path
) -> Numbers:
    """Return a job's numbers, from disk if they are there."""
    if not job.path.exists():
        found = asdict(job) | federate(job, data_dir)
        job.path.parent.mkdir(parents=True, exist_ok=True)
        aside = job.path.with_suffix(".partial")
        aside.write_text(json.dumps(found))
        aside.rename(job.path)
        last = found["accuracy"][-1]
        print(f"{job.path.stem} {last:.4f} {found['seconds']:.0f} s", flush=True)
    numbers: Numbers = json.loads(job.path.read_text())
    return numbers
