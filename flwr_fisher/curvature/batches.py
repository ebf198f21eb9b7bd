"""Reading a loader: its batches on the model's device, all or some of its examples.

Long: this file alone reads loaders, to their end or for some examples.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from itertools import islice
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from flwr_fisher.curvature.batch import Batch, BatchFn, OutputFn, form_of, read
from flwr_fisher.curvature.loader_state import loader_kept
from flwr_fisher.errors import DataError
from flwr_fisher.log_lines import advance
from flwr_fisher.randomness import random_stream, seeded

# For loaders that are no Pairs, while a client's loop runs: see `default_reading`.
_defaults: ContextVar[tuple[BatchFn | None, OutputFn | None]] = ContextVar(
    "defaults", default=(None, None)
)
_first_batch_checks: ContextVar[list[Callable[[Batch], object]]] = ContextVar(
    "first_batch_checks"
)

# Modules of iterators that cannot be read again.
_READ_ONCE = ("builtins", "itertools", "torch.utils.data.dataloader")


class Pairs(Iterable[Any]):
    """A loader with two functions, which read its batches and a model's outputs.

    It yields what `batch_fn` makes from the loader's batches. All functions that read
    batches for a model, such as :func:`~flwr_fisher.curvature.fisher` or ``LocalSGD``,
    follow these rules by default:

    - A tensor is the model's one input, without labels.
    - In a tuple or list, the last part is the labels, and the parts before it are the
      inputs, by position: ``(x, y)``, ``(left, right, y)``; also ``((left, right), y)``
      and ``({"left": ..., "right": ...}, y)``. A named tuple with its labels in another
      place is read by its names, as a mapping.
    - In a mapping, the labels are the one entry named ``label``, ``labels``,
      ``label_ids``, ``y``, ``target``, ``targets`` or ``fine_label``. Tensors whose
      names are arguments of the model's ``forward`` are passed by name, and tensors
      that it cannot take are left out, as in transformers' ``Trainer``. If there is
      only one tensor, with any other name, it is the model's first argument.
    - Labels that are integers are read as int64, as PyTorch's losses require.
    - A batch that is None is skipped: a collate function may leave out all examples.
    - For a causal language model of transformers, which shifts labels by itself, the
      labels are shifted by one. An encoder-decoder makes its decoder's inputs of them.
    - A model's outputs are the tensor that it returns, or the entry that it names
      ``logits``, or the only floating-point tensor of several entries.

    Parameters
    ----------
    loader : Iterable
        Batches of any form.
    batch_fn : Callable, optional
        Makes ``(inputs, labels)`` from a batch. The inputs are a tensor, a tuple or a
        mapping of tensors; the model gets them by position or by name.
    output_fn : Callable, optional
        Returns the one tensor of outputs from what the model returns.

    Raises
    ------
    DataError
        If the loader is one batch, and no batches.

    Examples
    --------
    >>> from flwr_fisher.curvature import fisher
    >>> batch = {"left": torch.ones(2, 3), "right": torch.ones(2, 3), "class": None}
    >>> loader = Pairs([batch], lambda b: (b["left"] - b["right"], b["class"]))
    >>> fisher(nn.Linear(3, 2, bias=False), loader, structure="diagonal").trace()
    0.0
    """

    def __init__(
        self,
        loader: Iterable[Any],
        batch_fn: BatchFn | None = None,
        output_fn: OutputFn | None = None,
    ) -> None:
        self.loader: Iterable[Any] = unwrapped(loader)
        _check_is_no_batch(self.loader)
        self.batch_fn, self.output_fn = batch_fn, output_fn
        if isinstance(loader, Pairs):
            self.batch_fn = batch_fn or loader.batch_fn
            self.output_fn = output_fn or loader.output_fn

    def __iter__(self) -> Iterator[Any]:
        if self.batch_fn is None:
            yield from self.loader
        else:
            yield from map(self.batch_fn, self.loader)

    def __len__(self) -> int:
        loader: Any = self.loader
        return len(loader)

    def read(self, batch: Any, model: nn.Module) -> Batch:
        """Return one of the loader's batches in the form that the model takes."""
        return read(batch, model, self.batch_fn, self.output_fn)


def unwrapped(loader: Iterable[Any]) -> Iterable[Any]:
    """Return the loader inside a :class:`Pairs`, or the loader itself."""
    return loader.loader if isinstance(loader, Pairs) else loader


@contextmanager
def default_reading(
    batch_fn: BatchFn | None, output_fn: OutputFn | None
) -> Iterator[None]:
    """Set, within a ``with`` block, how loaders that are no :class:`Pairs` are read.

    So a client's own loop receives its own loader, and may pass it to ``LocalSGD``.
    """
    token = _defaults.set((batch_fn, output_fn))
    try:
        yield
    finally:
        _defaults.reset(token)


@contextmanager
def checking_first_batch(checks: list[Callable[[Batch], object]]) -> Iterator[None]:
    """Make checks of the first batch that :func:`batches_of` reads in a ``with`` block.

    Parameters
    ----------
    checks : list[Callable[[Batch], object]]
        Called with the batch, before it is yielded; afterwards the list is empty.
    """
    token = _first_batch_checks.set(checks)
    try:
        yield
    finally:
        _first_batch_checks.reset(token)
        checks.clear()


def batches_of(
    loader: Iterable[Any],
    model: nn.Module,
    device: torch.device | None,
    *,
    labelled: bool = False,
    report: bool = True,
    keep: bool = True,
) -> Iterator[Batch]:
    """Yield a loader's batches on a device, without those that are empty, or None.

    Parameters
    ----------
    loader : Iterable
        Batches of any form, or :class:`Pairs` of it.
    model : nn.Module
        The model that will be called.
    device : torch.device | None
        Where tensors are moved to; with None they stay where they are.
    labelled : bool, default False
        Whether a batch without labels is an error.
    report : bool, default True
        Whether the examples that are read count as progress of the work in the log.
    keep : bool, default True
        Whether the loader is afterwards as it was: see :func:`loader_kept`.

    Raises
    ------
    DataError
        If the loader is one batch, a batch's form is not clear, or a batch lacks
        labels.
    """
    own, first_batch_checks = pairs_of(loader), _first_batch_checks.get([])
    with loader_kept(own.loader) if keep else nullcontext():
        for batch in own.loader:
            if batch is None:
                continue
            made = own.read(batch, model)
            if labelled and not hasattr(made.labels, "to"):
                made.tensor_labels(f"is {form_of(batch)}")  # raises an error
            if len(made):
                while first_batch_checks:
                    first_batch_checks.pop(0)(made)
                yield made if device is None else made.to(device)
                if report:
                    advance(len(made))


def pairs_of(loader: Iterable[Any]) -> Pairs:
    """Return a loader as :class:`Pairs`, with its own functions or the default ones.

    Raises
    ------
    DataError
        If the loader is one batch, and no batches.
    """
    return loader if isinstance(loader, Pairs) else Pairs(loader, *_defaults.get())


def _check_is_no_batch(loader: Iterable[Any]) -> None:
    """Raise :class:`DataError` for a batch in place of a loader of batches."""
    if isinstance(loader, Tensor):
        raise DataError(
            "the loader must yield batches, but it is a tensor: pass the list [inputs]"
        )
    parts = list(loader) if type(loader) in (list, tuple) else []
    if not all(isinstance(part, Tensor) for part in parts):
        return
    if len({(part.dim(), part.dtype) for part in parts}) > 1:
        raise DataError(
            "the loader must yield batches, but its parts are tensors of unlike kinds, "
            f"such as inputs and labels: {[tuple(part.shape) for part in parts[:4]]}. "
            "Pass DataLoader(TensorDataset(inputs, labels), batch_size=32), or the "
            "list [(inputs, labels)]"
        )


def can_be_read_again(loader: Iterable[Any]) -> bool:
    """Return whether a loader is no iterator of Python's or PyTorch's own.

    Iterators of other classes may begin anew, as those of some libraries do.
    """
    loader = unwrapped(loader)
    return not isinstance(loader, Iterator) or type(loader).__module__ not in _READ_ONCE


def check_can_be_read_again(loader: Iterable[Any], reader: str) -> None:
    """Raise :class:`DataError` if a loader cannot be read again, and `reader` does.

    A dict, of loaders for example, would give its keys.
    """
    if isinstance(unwrapped(loader), Mapping):
        raise DataError(
            f"{reader}, but it is {form_of(unwrapped(loader))}: pass one loader, and "
            "keep the others in your own train_fn"
        )
    if not can_be_read_again(loader):
        raise DataError(
            f"{reader}, but it is a {type(unwrapped(loader)).__name__}, which can be "
            "read only once: pass a DataLoader, or a list of batches"
        )


def count_of(loader: Any) -> int | None:
    """Return how many examples a loader has, or None if it must be read to know.

    If the batch sampler is of a user's own class, this counts the positions of a copy.
    If that fails, it returns the data set's length. It is not known of a stream, of a
    data set that gives batches, and of a loader of a user's own class that has another
    number of batches than its batch sampler.

    Examples
    --------
    >>> count_of([("inputs", "labels")]) is None
    True
    """
    loader = unwrapped(loader)
    torchs = isinstance(loader, DataLoader)
    batches: Any = (
        sampler_of(loader) if torchs else getattr(loader, "batch_sampler", None)
    )
    own = type(loader) is not DataLoader
    if own and length_of(loader) not in (None, length_of(batches)):
        return None
    if isinstance(batches, list) and all(hasattr(b, "__len__") for b in batches):
        return sum(map(len, batches))
    try:
        n = len(loader.dataset)
    except (TypeError, AttributeError):  # there is no data set, or it is a stream
        n = None
    if type(batches) is BatchSampler:
        positions = length_of(batches.sampler)
        n = n if positions is None else positions
        return n - n % batches.batch_size if n and batches.drop_last else n
    if torchs and loader.batch_sampler is None:
        return _drawn(batches, loader.dataset, None)
    return n if n is None else _drawn(batches, loader.dataset, n)


def length_of(loader: Any) -> int | None:
    """Return how many batches a loader says that it has, or None for a stream."""
    try:
        return len(loader)
    except TypeError:
        return None


def _drawn(batches: Any, dataset: Any, otherwise: int | None) -> int | None:
    """Return how many positions a batch sampler draws an epoch, counted on a copy."""
    try:
        copied = copy.deepcopy(batches, {id(dataset): dataset})
        with seeded(0):
            return sum(len(batch) for batch in islice(copied, len(batches)))
    except Exception:  # a user's class raises anything, or has no length
        return otherwise


def at_most(
    loader: Iterable[Any],
    model: nn.Module,
    examples: int,
    seed: int,
    at_random: bool = False,
) -> Pairs:
    """Return at most `examples` of a loader's examples, at random if possible.

    - From a plain ``DataLoader`` with a batch size and without workers, which reads a
      data set in order or shuffled, only the chosen examples are read.
    - Any other loader that shuffles, or has no length, is read until there are enough
      examples. So is a ``DataLoader`` with ``batch_size=None`` whose sampler yields
      lists of positions in random order.
    - All other loaders are read to the end that ``len`` gives, and a random choice of
      all examples is kept.

    Parameters
    ----------
    loader : Iterable
        Batches of any form, or :class:`Pairs` of it.
    model : nn.Module
        The model that will be called.
    examples : int
        At least 1.
    seed : int
        The seed of the choice.
    at_random : bool, default False
        Whether the examples of a plain ``DataLoader`` come in random order even if none
        is left out.

    Examples
    --------
    >>> batches = [torch.zeros(4, 2), torch.zeros(4, 2)]
    >>> sum(map(len, at_most(batches, nn.Linear(2, 2), 3, seed=0)))
    3
    """
    whole = pairs_of(loader)
    positions = _positions(whole.loader)
    if positions is not None:
        if len(positions) <= examples and not at_random:
            return whole
        order = random_stream(seed, "examples").permutation(len(positions))[:examples]
        chosen = [positions[i] for i in order]
        plain: Any = whole.loader
        size = plain.batch_sampler.batch_size
        parts = [chosen[k : k + size] for k in range(0, len(chosen), size)]
        return Pairs(with_positions(plain, parts), whole.batch_fn, whole.output_fn)
    length = length_of(whole)
    with loader_kept(whole.loader):  # to begin its iterator is to draw a number
        given = (batch for batch in islice(whole.loader, length) if batch is not None)
        every = (whole.read(batch, model) for batch in given)
        if length is None or _shuffles(whole.loader):
            return Pairs(list(_first(every, examples)))
        return Pairs(_sample(every, examples, seed))


def reads_at_random(loader: Iterable[Any]) -> bool:
    """Return whether :func:`at_most` chooses the loader's examples at random.

    It is also True for a stream, because its order is not known.
    """
    whole = pairs_of(loader)
    known = _positions(whole.loader) is not None
    return known or length_of(whole) is None or _shuffles(whole.loader)


def _positions(loader: Iterable[Any]) -> Sequence[int] | None:
    """Return the positions of a plain loader's examples, or None for another loader."""
    if not reads_positions(loader):
        return None
    batches = loader.batch_sampler
    if loader.num_workers or type(batches) is not BatchSampler:
        return None
    sampler = batches.sampler  # loader.sampler may be another one, which is not used
    if type(sampler) is SubsetRandomSampler:
        return list(sampler.indices)
    if type(sampler) is RandomSampler:
        n = len(loader.dataset)  # type: ignore[arg-type]
        return range(n) if not sampler.replacement and len(sampler) == n else None
    if type(sampler) is not SequentialSampler:
        return None
    n, size = len(sampler), batches.batch_size
    return range(n - n % size if batches.drop_last else n)


def reads_positions(loader: object) -> TypeGuard[DataLoader[Any]]:
    """Return whether a loader reads a data set by positions, as torch's class does.

    A derived class with an ``__iter__`` of its own may do anything.
    """
    if not isinstance(loader, DataLoader):
        return False
    names, kind = ("__iter__", "_get_iterator"), type(loader)
    own = any(getattr(kind, name) is not getattr(DataLoader, name) for name in names)
    return not own and not isinstance(loader.dataset, IterableDataset)


def with_positions(
    loader: DataLoader[Any], batches: Iterable[Any], **options: Any
) -> DataLoader[Any]:
    """Return a copy of a plain loader with other batches of positions.

    Parameters
    ----------
    loader : DataLoader
        One for which :func:`reads_positions` is true.
    batches : Iterable[Sequence[int]]
        Positions in the data set.
    **options
        Options of a ``DataLoader``, which replace the loader's own.
    """
    own = {"collate_fn": loader.collate_fn, "num_workers": loader.num_workers} | options
    if own["num_workers"]:
        for name in ("worker_init_fn", "multiprocessing_context", "timeout"):
            own.setdefault(name, getattr(loader, name))
    if loader.batch_sampler is None:  # the data set gives batches by itself
        return DataLoader(loader.dataset, sampler=batches, batch_size=None, **own)
    return DataLoader(loader.dataset, batch_sampler=batches, **own)


def sampler_of(loader: DataLoader[Any]) -> Iterable[Any]:
    """Return the sampler that makes a loader's batches of positions."""
    # Without a batch size, a loader's sampler gives batches, not examples.
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def positions_of(loader: DataLoader[Any]) -> Sequence[int]:
    """Return the positions that a loader's sampler may draw, without using it.

    If the sampler does not say which they are, these are all of the data set.
    """
    batches: Any = sampler_of(loader)
    sampler = getattr(batches, "sampler", batches)
    positions = getattr(sampler, "indices", sampler)  # of a SubsetRandomSampler
    if isinstance(sampler, WeightedRandomSampler):
        positions = torch.as_tensor(sampler.weights).nonzero().flatten()
    if hasattr(positions, "tolist"):  # an array's
        positions = positions.tolist()
    if isinstance(positions, Sequence):
        return positions
    return range(len(loader.dataset))  # type: ignore[arg-type]


def _shuffles(loader: Any) -> bool:
    """Return whether a loader shuffles, so that its first examples are random."""
    random = (RandomSampler, SubsetRandomSampler)
    batches = sampler_of(loader) if isinstance(loader, DataLoader) else None
    return type(batches) is BatchSampler and type(batches.sampler) in random


def _first(batches: Iterable[Batch], examples: int) -> Iterator[Batch]:
    """Yield batches with the first `examples` examples."""
    left = examples
    for batch in batches:
        yield batch[: min(left, len(batch))]
        left -= len(batch)
        if left <= 0:
            return


def _sample(batches: Iterable[Batch], examples: int, seed: int) -> list[Batch]:
    """Return random examples: those with the smallest random numbers."""
    draw = random_stream(seed, "examples")
    kept: list[tuple[Batch, Tensor]] = []
    for batch in batches:
        kept.append((batch, torch.from_numpy(draw.random(len(batch)))))
        if sum(len(numbers) for _, numbers in kept) > 2 * examples:
            kept = _smallest(kept, examples)
    return [batch for batch, _ in _smallest(kept, examples)]


def _smallest(
    kept: Sequence[tuple[Batch, Tensor]], examples: int
) -> list[tuple[Batch, Tensor]]:
    numbers = torch.cat([n for _, n in kept]) if kept else torch.zeros(0)
    if len(numbers) <= examples:
        return list(kept)
    last = numbers.kthvalue(examples).values
    chosen = [(batch, n, n <= last) for batch, n in kept]
    return [(batch[rows], n[rows]) for batch, n, rows in chosen if rows.any()]
