"""The accuracy of models and ensembles, measured on the server."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from flwr_fisher.curvature.batch import num_correct
from flwr_fisher.curvature.batches import batches_of, count_of
from flwr_fisher.curvature.models import evaluating, place_of
from flwr_fisher.errors import DataError, ParamsError
from flwr_fisher.params import Params
from flwr_fisher.progress import watching

Loader = Iterable[Any]  # batches of any form, or `Pairs`


def accuracies(
    model: nn.Module,
    candidates: Mapping[str, Mapping[str, Tensor]],
    loader: Loader,
) -> dict[str, float]:
    """Return the accuracy of each candidate's parameters in the model.

    It is NaN if the outputs have no classes.

    Parameters
    ----------
    model : nn.Module
        The model. Its parameters, and the mode of each of its modules, are left as they
        were.
    candidates : Mapping[str, Mapping[str, Tensor]]
        Parameters by method. For names that are missing, the model's own are used.
    loader : Iterable
        Batches ``(inputs, labels)``, mappings with an entry ``label``, or a
        :class:`~flwr_fisher.curvature.Pairs`.

    Raises
    ------
    DataError
        If the loader has no examples with a label.
    ParamsError
        If a candidate has a key that the model lacks or has in another shape.
    """
    scores = {}
    with watching("accuracy", len(candidates), "models") as progress:
        for name, params in candidates.items():
            scores[name] = ensemble_accuracy(model, [params], [1.0], loader)
            progress.advance()
    return scores


def ensemble_accuracy(
    model: nn.Module,
    members: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float],
    loader: Loader,
) -> float:
    """Return the accuracy of the members' weighted mean probabilities.

    It is only a reference, because it is not one model but as many as there are
    members. The loader is read once, so it may shuffle. Errors are those of
    :func:`accuracies`.
    """
    # A module's extra state may be anything.
    held = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    own = {name: tensor.clone() for name, tensor in held.items()}
    _check_fit(own, members)
    device = place_of(model)
    right, count = 0.0, 0
    kept = ExitStack()
    # Its tensors are as they were: a posterior that has them may still be merged.
    for tensor in held.values():
        if not tensor.is_inference():
            kept.enter_context(_unsafe_preserve_version_counter(tensor))
    try:
        watched = watching("scoring", count_of(loader))
        with evaluating(model), torch.no_grad(), watched:
            for batch in batches_of(loader, model, device, labelled=True):
                mean = torch.zeros((), device=device)
                for params, weight in zip(members, weights, strict=True):
                    for each in (own, params):  # first, what this member lacks
                        model.load_state_dict(each, strict=False)
                    mean = mean + batch.inputs(model).softmax(-1) * weight
                right += num_correct(mean, batch.labels)
                count += batch.num_labels
    finally:
        model.load_state_dict(own, strict=False)
        kept.close()
    if not count:
        raise DataError("the loader has no examples with a label")
    return right / count


def _check_fit(own: Params, members: Sequence[Params]) -> None:
    if not members:
        raise ParamsError("an ensemble needs at least one member")
    for key, value in ((k, v) for params in members for k, v in params.items()):
        if key not in own or own[key].shape != value.shape:
            has = tuple(own[key].shape) if key in own else "no such key"
            raise ParamsError(
                f"the parameters have '{key}' of shape {tuple(value.shape)}, but the "
                f"model has {has}"
            )
