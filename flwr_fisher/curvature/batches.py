"""A loader's batches, on the device where the model is."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flwr_fisher.curvature.pairs import form_of, pair_in
from flwr_fisher.errors import ConfigurationError, DataError
from flwr_fisher.params import trainable_names
from flwr_fisher.progress import advance

Batch = tuple[Tensor, Any]


def device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Return the device where the model is.

    Parameters
    ----------
    model : nn.Module
        The model.
    device : torch.device | str | None
        Where the caller believes the model to be; None if the caller does not say.

    Returns
    -------
    torch.device
        The device of the first trainable parameter.

    Raises
    ------
    ConfigurationError
        If the model has no trainable parameter or is on another type of device.
    """
    names = trainable_names(model)
    if not names:
        raise ConfigurationError(
            "the model has no trainable parameter: set requires_grad on those to merge"
        )
    actual = model.get_parameter(names[0]).device
    if device is not None and torch.device(device).type != actual.type:
        raise ConfigurationError(
            f"device={device!s}, but the model is on {actual!s}: move it first"
        )
    return actual


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
