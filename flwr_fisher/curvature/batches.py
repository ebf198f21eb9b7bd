"""A loader's batches as pairs of inputs and labels, whatever it calls them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from flwr_fisher.errors import DataError
from flwr_fisher.progress import advance

Batch = tuple[Tensor, Any]
BatchFn = Callable[[Any], tuple[Tensor, Tensor]]

TARGETS = ("label", "labels", "y", "target", "targets", "fine_label")
"""Names that a batch's labels may have."""

_WAY_OUT = "pass batch_fn, FisherClient(batch_fn=...) or curvature.Pairs(loader, ...)"
_EXAMPLE = "such as lambda batch: (batch['img'], batch['label'])"


class Pairs(Iterable[Any]):
    """A loader whose batches are pairs ``(inputs, labels)``, and all else is its own.

    Of a mapping, such as ``{"img": ..., "label": ...}``, the labels are the one entry
    named as in :data:`TARGETS`, and the inputs the one tensor beside it. Any other
    batch stays as it is. What has another form takes a `batch_fn`.

    Parameters
    ----------
    loader : Iterable
        Batches of any form.
    batch_fn : Callable, optional
        Makes a pair of tensors of each batch.

    Raises
    ------
    DataError
        While it is read: if a mapping has no such pair of entries, or several; or if
        `batch_fn` returns something else than two tensors.

    Examples
    --------
    >>> import torch
    >>> batch = {"img": torch.zeros(2, 3), "label": torch.ones(2), "path": ["a", "b"]}
    >>> [(x.shape, y) for x, y in Pairs([batch])]
    [(torch.Size([2, 3]), tensor([1., 1.]))]
    >>> loader = Pairs([batch], lambda batch: (batch["img"], batch["img"]))
    >>> len(loader)
    1
    """

    def __init__(self, loader: Iterable[Any], batch_fn: BatchFn | None = None) -> None:
        own = loader.batch_fn if isinstance(loader, Pairs) else None
        self.loader: Iterable[Any] = unwrapped(loader)
        self.batch_fn: BatchFn | None = batch_fn or own

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield self.pair(batch)

    def __len__(self) -> int:
        loader: Any = self.loader
        return len(loader)

    def __getattr__(self, name: str) -> Any:
        # A data set, a sampler, a generator: whatever a DataLoader has.
        if name == "loader" or name.startswith("__"):  # while it is copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def pair(self, batch: Any) -> Any:
        """Return one batch as a pair."""
        if self.batch_fn is not None:
            return _checked(self.batch_fn(batch))
        return pair_in(batch) if isinstance(batch, Mapping) else batch


def unwrapped(loader: Iterable[Any]) -> Iterable[Any]:
    """Return the loader itself, behind :class:`Pairs` if it is behind one."""
    return loader.loader if isinstance(loader, Pairs) else loader


def batches_on(loader: Iterable[Any], device: torch.device) -> Iterator[Batch]:
    """Yield a loader's batches on a device, without the empty ones; count examples.

    Parameters
    ----------
    loader : Iterable
        Batches ``(inputs, labels, ...)``, mappings with an entry ``label``
        (:class:`~flwr_fisher.curvature.Pairs`), or bare ``inputs``.
    device : torch.device
        Where tensors are moved to.

    Yields
    ------
    inputs : Tensor
        ``[n, ...]`` with at least one example.
    labels : Any
        What the batch has after its inputs; None for bare inputs.

    Raises
    ------
    DataError
        If the loader is one tensor, or a batch's inputs are not a tensor.
    """
    check_loader(loader)
    for batch in loader:
        inputs, labels = inputs_and_labels(batch)
        if isinstance(labels, Tensor):
            labels = labels.to(device, non_blocking=True)
        if inputs.shape[0]:
            yield inputs.to(device, non_blocking=True), labels
            advance(len(inputs))


def check_loader(loader: object) -> None:
    """Raise :class:`DataError` if a loader is one tensor, and not batches."""
    if isinstance(loader, Tensor):
        raise DataError("the loader must yield batches; for a single one pass [inputs]")


def labelled_pairs(loader: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a loader's batches, each with labels.

    Raises
    ------
    DataError
        If a batch is no pair of what can be moved to a device.
    """
    for batch in Pairs(loader):
        inputs, labels = as_pair(batch)
        if not (hasattr(inputs, "to") and hasattr(labels, "to")):
            raise _no_pair(batch)
        yield inputs, labels


def inputs_and_labels(batch: Any) -> Batch:
    """Return a batch's inputs, and what it has after them; None for bare inputs.

    Raises
    ------
    DataError
        If the inputs are not a tensor, or are not to be told in a mapping.
    """
    if isinstance(batch, Mapping):
        return pair_in(batch)
    several = isinstance(batch, (tuple, list)) and len(batch) > 0
    inputs = batch[0] if several else batch
    if not isinstance(inputs, Tensor):
        raise DataError(
            "the loader must yield (inputs, labels) or inputs as tensors, got "
            f"{form_of(batch)}: pass Pairs(loader, batch_fn) for other batches, or "
            "FisherClient(batch_fn=...)"
        )
    return inputs, batch[1] if several and len(batch) > 1 else None


def pair_in(batch: Mapping[Any, Any]) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels among a mapping's entries.

    Raises
    ------
    DataError
        If they cannot be told, naming the entries.
    """
    targets = [key for key in batch if key in TARGETS]
    tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
    labels = tensors.pop(targets[0], None) if len(targets) == 1 else None
    if labels is None or len(tensors) != 1:
        kinds = ((key, type(value).__name__) for key, value in list(batch.items())[:12])
        names = ", ".join(f"{key!r:.40} ({kind})" for key, kind in kinds)
        raise DataError(
            f"a batch is a mapping of {names or 'nothing'}, and not of one tensor of "
            f"labels, named any of {', '.join(TARGETS)}, beside one of inputs: "
            f"{_WAY_OUT}, {_EXAMPLE}"
        )
    return next(iter(tensors.values())), labels


def as_pair(batch: Any) -> tuple[Any, Any]:
    """Return a batch of two parts; raise :class:`DataError` for any other."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise _no_pair(batch)
    return batch[0], batch[1]


def _checked(pair: Any) -> tuple[Tensor, Tensor]:
    two = isinstance(pair, (tuple, list)) and len(pair) == 2
    if not two or not all(isinstance(part, Tensor) for part in pair):
        raise DataError(
            "batch_fn must return (inputs, labels), two tensors, and it returned "
            f"{form_of(pair)}"
        )
    return pair[0], pair[1]


def form_of(batch: Any) -> str:
    """Return in words what a batch is made of."""
    if isinstance(batch, (tuple, list)):
        parts = ", ".join(type(part).__name__ for part in batch[:8])
        return f"a {type(batch).__name__} of {len(batch)}: {parts or 'nothing'}"
    return f"a {type(batch).__name__}"


def _no_pair(batch: Any) -> DataError:
    return DataError(
        "batches must be pairs (inputs, labels) of tensors, or mappings with an entry "
        f"'label', and one is {form_of(batch)}: {_WAY_OUT}, {_EXAMPLE}"
    )
