"""Federations in several processes, each finished one kept on disk."""

import json
import logging
import multiprocessing
import time
from argparse import Namespace
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

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


def kept(path: Path, find: Callable[[], Any]) -> Any:
    """Return what a file has of numbers; find and keep them where there is none."""
    if not path.exists():
        began, found = time.perf_counter(), find()
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".partial")
        aside.write_text(json.dumps(found))
        aside.rename(path)
        print(f"{path.stem} {time.perf_counter() - began:.0f} s", flush=True)
    return json.loads(path.read_text())


def all_kept(jobs: Iterable[tuple[Path, Callable[[], Any]]], workers: int) -> list[Any]:
    """Return what each file has of numbers; find those that are in none, at once."""
    with multiprocessing.get_context("fork").Pool(workers, quiet) as pool:
        return pool.starmap(kept, jobs, chunksize=1)


def kept_by_seed(
    folder: Path,
    find: Callable[[str, int, Path], Any],
    names: Iterable[str],
    seeds: Sequence[int],
    options: Namespace,
) -> dict[str, list[Any]]:
    """Return what is found for each name and seed, by name; finished ones are kept."""
    names = list(names)
    jobs = [
        (folder / f"{name}-s{seed}.json", partial(find, name, seed, options.data_dir))
        for name, seed in product(names, seeds)
    ]
    found = iter(all_kept(jobs, options.workers))
    return {name: [next(found) for _ in seeds] for name in names}


def _measured(
    job: Any, federate: Callable[[Any, Path], Numbers], data_dir: Path
) -> Numbers:
    """Return a job's numbers, from disk if they are there."""
    numbers: Numbers = kept(job.path, lambda: asdict(job) | federate(job, data_dir))
    return numbers
