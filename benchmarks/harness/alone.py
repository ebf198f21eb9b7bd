"""Measuring in a process of its own: what ran before has no part in it."""

import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

import torch

Numbers = dict[str, Any]


def alone(work: Callable[..., Numbers], *args: Any) -> Numbers:
    """Return what a function returns in a fresh process, with two threads."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_with_two_threads, (work, args, list(sys.path)))


def _with_two_threads(
    work: Callable[..., Numbers], args: tuple[Any, ...], path: list[str]
) -> Numbers:
    sys.path[:] = path
    torch.set_num_threads(2)
    return work(*args)
