"""A random subset of a loader's examples, in batches as large as the loader's."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from flwr_fisher.curvature.batches import (
    Pairs,
    check_loader,
    inputs_and_labels,
    unwrapped,
)
from flwr_fisher.randomness import random_stream


def at_most(loader: Iterable[Any], examples: int, seed: int) -> Iterable[Any]:
    """Return a loader of so many random examples; the same one if it has no more.

    Of a ``DataLoader`` only these are read from its data set, in the order in which
    they are drawn, with the repetitions of its sampler. Anything else is read to its
    end.

    Parameters
    ----------
    loader : Iterable
        Batches ``(inputs, labels)``, or bare ``inputs``.
    examples : int
        At least 1.
    seed : int
        Of the choice.

    Examples
    --------
    >>> chosen = at_most([torch.arange(4), torch.arange(4, 8)], 3, seed=0)
    >>> sum(len(batch) for batch in chosen)
    3
    """
    check_loader(loader)
    own = unwrapped(loader)
    batches = _positions(own)
    if batches is None:
        return _of_stream(loader, examples, seed)
    every = sorted(chain.from_iterable(batches))  # by the seed alone, if it shuffles
    if len(every) <= examples:
        return loader
    assert isinstance(own, DataLoader)
    order = random_stream(seed, "examples").permutation(len(every))[:examples]
    size = max(len(batch) for batch in batches)
    chosen = [[every[i] for i in order[k : k + size]] for k in range(0, examples, size)]
    fewer = like_loader(own, chosen)
    return Pairs(fewer, loader.batch_fn) if isinstance(loader, Pairs) else fewer


def like_loader(
    loader: DataLoader[Any], batches: Iterable[Any], num_workers: int | None = None
) -> DataLoader[Any]:
    """Return a loader of the same data set that reads it in these batches.

    Parameters
    ----------
    loader : DataLoader
        Of a data set with positions.
    batches : Iterable[Sequence[int]]
        Positions in the data set.
    num_workers : int, optional
        Default: the loader's.
    """
    options: dict[str, Any] = {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers if num_workers is None else num_workers,
    }
    if options["num_workers"]:
        options["worker_init_fn"] = loader.worker_init_fn
        options["multiprocessing_context"] = loader.multiprocessing_context
    if loader.batch_sampler is None:  # the data set gives batches by itself
        return DataLoader(loader.dataset, sampler=batches, batch_size=None, **options)
    return DataLoader(loader.dataset, batch_sampler=batches, **options)


def sampler_of(loader: DataLoader[Any]) -> Iterable[Any]:
    """Return what makes batches of positions."""
    # Without a batch size, a loader's sampler gives batches, not examples.
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _positions(loader: Iterable[Any]) -> list[list[int]] | None:
    """Return the positions in each of a loader's batches, if it has any."""
    if not isinstance(loader, DataLoader) or isinstance(
        loader.dataset, IterableDataset
    ):
        return None
    batches = list(sampler_of(loader))
    if not all(isinstance(batch, Sequence) for batch in batches):
        return None  # each position is that of a whole batch
    return [list(batch) for batch in batches]


def _of_stream(loader: Iterable[Any], examples: int, seed: int) -> Iterable[Any]:
    """Draw a number for every example, and keep those with the smallest."""
    draw, kept, count = random_stream(seed, "examples"), list[_Drawn](), 0
    for batch in Pairs(loader):
        rows = len(inputs_and_labels(batch)[0])
        count += rows
        kept.append(_Drawn(batch, torch.from_numpy(draw.random(rows))))
        if sum(len(each.numbers) for each in kept) > 2 * examples:
            kept = _smallest(kept, examples)
    if count <= examples and not isinstance(unwrapped(loader), Iterator):
        return loader
    return [each.batch for each in _smallest(kept, examples)]


@dataclass(frozen=True)
class _Drawn:
    """A batch, and the number that each of its examples drew."""

    batch: Any
    numbers: Tensor

    def rows(self, chosen: Tensor) -> "_Drawn":
        batch, n = self.batch, len(self.numbers)
        if isinstance(batch, Tensor):
            return _Drawn(batch[chosen], self.numbers[chosen])
        parts = [
            part[chosen] if isinstance(part, Tensor) and len(part) == n else part
            for part in batch
        ]
        return _Drawn(parts, self.numbers[chosen])


def _smallest(kept: Sequence[_Drawn], examples: int) -> list[_Drawn]:
    """Return the examples with the smallest numbers, batch by batch."""
    numbers = torch.cat([each.numbers for each in kept]) if kept else torch.zeros(0)
    if len(numbers) <= examples:
        return list(kept)
    last = numbers.kthvalue(examples).values
    parts = [each.rows(each.numbers <= last) for each in kept]
    return [part for part in parts if len(part.numbers)]
