"""Federations in several processes, each finished one kept on disk."""

import json
import logging
import multiprocessing
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

Cell = TypeVar("Cell", bound=Hashable)
Numbers = dict[str, Any]
# From jobs to their numbers: run_all with all but the jobs filled in.
Run = Callable[[Iterable[Any]], dict[Any, Numbers]]


def run_all(
    jobs: Iterable[Any],
    *,
    federate: Callable[[Any, Path], Numbers],
    data_dir: Path,
    workers: int,
    known: Mapping[Any, Numbers] | None = None,
) -> dict[Any, Numbers]:
    """Run each job once, but those whose numbers are `known`; return those of each.

    A job is a frozen dataclass with two properties: `path`, the file that keeps its
    numbers, and `turn`, by which jobs are sorted before they run.
    """
    asked, known = dict.fromkeys(jobs), known or {}
    order = sorted((job for job in asked if job not in known), key=lambda job: job.turn)
    run = partial(_measured, federate=federate, data_dir=data_dir)
    with multiprocessing.get_context("fork").Pool(workers, quiet) as pool:
        found = dict(zip(order, pool.map(run, order, chunksize=1), strict=True))
    return {job: found[job] if job in found else known[job] for job in asked}


def run_cells(
    cells: Mapping[Cell, Sequence[Any]], run: Run
) -> dict[Cell, list[Numbers]]:
    """Run the jobs of all cells of a table together; return each cell's numbers."""
    found = run(job for jobs in cells.values() for job in jobs)
    return {cell: [found[job] for job in jobs] for cell, jobs in cells.items()}


def quiet() -> None:
    """Use one thread in this process, and log only errors of Flower."""
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)


def _measured(
    job: Any, federate: Callable[[Any, Path], Numbers], data_dir: Path
) -> Numbers:
    """Return a job's numbers, from disk if they are there."""
    if not job.path.exists():
        began = time.perf_counter()
        found = asdict(job) | federate(job, data_dir)
        job.path.parent.mkdir(parents=True, exist_ok=True)
        aside = job.path.with_suffix(".partial")
        aside.write_text(json.dumps(found))
        aside.rename(job.path)
        last, took = np.ravel(found["accuracy"])[-1], time.perf_counter() - began
        print(f"{job.path.stem} {last:.4f} {took:.0f} s", flush=True)
    numbers: Numbers = json.loads(job.path.read_text())
    return numbers
