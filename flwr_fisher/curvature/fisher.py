"""The true Fisher information of a trained model."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flwr_fisher.curvature.base import Curvature
from flwr_fisher.curvature.engine import Engine
from flwr_fisher.curvature.taps import evaluating
from flwr_fisher.errors import ConfigurationError, DataError, check_known
from flwr_fisher.params import trainable_names

__all__ = ["ENGINES", "EXPECTATIONS", "STRUCTURES", "fisher"]

STRUCTURES = ("kfac", "diagonal", "dense")
EXPECTATIONS = ("exact",)
ENGINES = ("auto", "nngeometry")


def fisher(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    structure: str = "kfac",
    expectation: str = "exact",
    engine: str = "auto",
    device: torch.device | str | None = None,
) -> Curvature:
    r"""Compute the true Fisher of a softmax classifier, a mean over examples.

    .. math:: F = \frac1n \sum_x \sum_c p_c(x)\, g_c g_c^\top, \qquad
              g_c = \nabla_\theta \log p_c(x)

    (FedFisher, eq. 4), where :math:`p = \operatorname{softmax}` of the model's output.
    The expectation is over the model's own predictions, so labels are not used; this
    is not the empirical Fisher. The model is evaluated in eval mode (no dropout, batch
    norm's running statistics) and left as it was. Frozen parameters stay out.

    Parameters
    ----------
    model : nn.Module
        Maps a batch ``[n, ...]`` to logits ``[n, C]``.
    loader : Iterable
        Batches ``(inputs, labels)`` or bare ``inputs``.
    structure : "kfac" | "diagonal" | "dense", default "kfac"
        ``kfac``: a :class:`Kronecker` for each linear or convolution layer that is
        called once a batch with one row an example, the exact diagonal for any other
        parameter. ``diagonal``: exact. ``dense``: the whole matrix, for small models.
    expectation : "exact", default "exact"
        How the sum over classes is taken.
    engine : "auto" | "nngeometry", default "auto"
        ``nngeometry`` computes the same through that library, for comparison; it
        refuses layers that it is known to get wrong.
    device : torch.device | str | None
        Where the model is; by default where its first trainable parameter is.

    Returns
    -------
    Curvature
        Over the trainable parameters, in the parameters' dtype.

    Raises
    ------
    ConfigurationError
        If the model has no trainable parameter or is on another device.
    UnknownNameError
        If `structure`, `expectation` or `engine` is not known.
    DataError
        If the loader yields no examples, or something else than batches.
    StructureError
        If the model's output is not logits ``[n, C]``, or a parameter has neither a
        Kronecker form nor per-example gradients.

    Examples
    --------
    >>> model = torch.nn.Linear(3, 2)
    >>> F = fisher(model, [torch.randn(8, 3)], structure="kfac")
    >>> {name: tuple(d.shape) for name, d in F.diagonal().items()}
    {'weight': (2, 3), 'bias': (2,)}
    """
    for what, name, known in (
        ("structure", structure, STRUCTURES),
        ("expectation", expectation, EXPECTATIONS),
        ("engine", engine, ENGINES),
    ):
        check_known(what, name, known)
    place = _device(model, device)
    if engine == "nngeometry":
        from flwr_fisher.curvature.nngeometry_engine import nngeometry_fisher

        with evaluating(model):
            return nngeometry_fisher(model, list(_inputs(loader, place)), structure)
    with evaluating(model):
        run = Engine(model, structure)
        for inputs in _inputs(loader, place):
            run.add(inputs)
        return run.mean()


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device:
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


def _inputs(loader: Iterable[Any], device: torch.device) -> Iterator[Tensor]:
    for batch in loader:
        inputs = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        if not isinstance(inputs, Tensor):
            raise DataError(
                "the loader must yield (inputs, labels) or inputs as tensors, got "
                f"{type(batch).__name__}"
            )
        if inputs.shape[0]:
            yield inputs.to(device, non_blocking=True)
