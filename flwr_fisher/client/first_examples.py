"""A few of a client's training examples, read before it trains, at no one's cost."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.curvature.batches import inputs_and_labels
from flwr_fisher.curvature.subset import like_loader
from flwr_fisher.errors import FlwrFisherError
from flwr_fisher.log_lines import logger


def first_examples(
    problem: LocalProblem, count: int | None
) -> tuple[Tensor, Any] | None:
    """Return some of the training examples, as a batch of the loader is.

    The loader is not iterated: that could start workers, draw an order, or take from a
    stream what comes once. Of a data set with positions, examples are read and collated
    here; of a list of batches, the first is taken, and of what had to be read to be
    counted, what came first then.

    Parameters
    ----------
    problem : LocalProblem
        The client's.
    count : int, optional
        At most so many; by default a batch of them.

    Returns
    -------
    tuple[Tensor, Any] | None
        Inputs and labels; None of a stream, and where reading fails, since what it
        fails of may be that it is done here.

    Raises
    ------
    DataError
        If the batch has a form that this library does not read.
    """
    try:
        batch = _batch(problem, count)
        if batch is None:
            return None
        inputs, labels = inputs_and_labels(problem.train_pairs.pair(batch))
    except FlwrFisherError:
        raise
    except Exception as error:
        logger.info("No example can be tried before training: %r", error)
        return None
    n = len(inputs)
    if isinstance(labels, Tensor) and labels.dim() and len(labels) == n:
        labels = labels[:count]
    return inputs[:count], labels


def _batch(problem: LocalProblem, count: int | None) -> Any:
    loader: Any = problem.trainloader
    if isinstance(loader, (list, tuple)) and loader:
        return loader[0]
    plain = type(loader).__iter__ is DataLoader.__iter__
    if not plain or isinstance(loader.dataset, IterableDataset):
        return problem.first_batch
    positions = _of_loader(loader, count)
    return next(iter(like_loader(loader, [positions], num_workers=0)))


def _of_loader(loader: DataLoader[Any], count: int | None) -> Any:
    """Return positions in the data set, as the loader's sampler gives a batch of."""
    batches: Any = loader.batch_sampler
    if batches is None:  # the sampler's positions are whole batches, or lists of them
        sampler: Any = loader.sampler
        if isinstance(sampler, BatchSampler):
            batches = sampler
        elif isinstance(sampler, Sequence) and isinstance(sampler[0], Sequence):
            return list(islice(sampler[0], count))
        else:
            return _of_sampler(sampler, loader.dataset, 1)[0]
    if isinstance(batches, Sequence):
        return list(islice(batches[0], count))
    size = getattr(batches, "batch_size", None) or 1
    sampler = getattr(batches, "sampler", None)
    return _of_sampler(sampler, loader.dataset, size if count is None else count)


def _of_sampler(sampler: Any, dataset: Any, count: int) -> list[Any]:
    """Return some positions that a sampler may give, without asking it for any."""
    if isinstance(sampler, SubsetRandomSampler):
        return list(sampler.indices[:count])
    if isinstance(sampler, WeightedRandomSampler):
        drawn: list[int] = torch.as_tensor(sampler.weights).nonzero().flatten().tolist()
        return drawn[:count]
    if isinstance(sampler, Sequence):
        return list(sampler[:count])
    return list(range(min(count, len(dataset))))
