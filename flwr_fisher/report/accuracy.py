"""The accuracy of models and ensembles, measured on the server."""

import copy
from collections.abc import Mapping, Sequence
from math import nan

import torch
from flwr.app import ArrayRecord, MetricRecord
from torch import Tensor, nn

from flwr_fisher.client import cross_entropy, score
from flwr_fisher.client.training import Loader
from flwr_fisher.curvature.data import IGNORED, batches_of, check_classes, is_correct
from flwr_fisher.curvature.losses import Loss
from flwr_fisher.curvature.models import place_of
from flwr_fisher.devices import default_device
from flwr_fisher.errors import DataError, check_whole
from flwr_fisher.params import Params, load_state, widened
from flwr_fisher.server.driver import EvaluateFn
from flwr_fisher.tangent import TCTModel
from flwr_fisher.wire import arrays_to_tensors


def accuracies(
    model: nn.Module, candidates: Mapping[str, Params], loader: Loader
) -> dict[str, float]:
    """Return the accuracy of each candidate's parameters in a copy of the model.

    It is NaN if the outputs have no classes.

    Parameters
    ----------
    model : nn.Module
        The model.
    candidates : Mapping[str, Mapping[str, Tensor]]
        Parameters by method. For names that are missing, the model's own are used.
    loader : Iterable
        Batches ``(inputs, labels)``, mappings with an entry ``label``, or a
        :class:`~flwr_fisher.curvature.MappedLoader`.

    Raises
    ------
    DataError
        If the loader has no examples with a label.
    ParamsError
        If a candidate has a key that the model lacks.
    RuntimeError
        If a parameter has another shape than the model's.
    """
    return {
        name: ensemble_accuracy(model, [params], [1.0], loader)
        for name, params in candidates.items()
    }


def ensemble_accuracy(
    model: nn.Module,
    members: Sequence[Params],
    weights: Sequence[float],
    loader: Loader,
) -> float:
    """Return the accuracy of the members' weighted mean probabilities.

    It is only a reference, because it is not one model but as many as there are
    members. The loader is read once, so it may shuffle. Errors are those of
    :func:`accuracies`.
    """
    return accuracy_of(class_hits(model, members, weights, loader))


def class_hits(
    model: nn.Module,
    members: Sequence[Params],
    weights: Sequence[float],
    loader: Loader,
) -> Tensor:
    """Return how many of each class the members find, and how many there are.

    Float64 of shape ``[2, classes]``. If the outputs have no classes, one column: NaN
    and the number of labels. Arguments and errors are those of
    :func:`ensemble_accuracy`.
    """
    models = [_copy_with(model, params) for params in members]
    device = place_of(model)
    hits = torch.zeros(2, 1, dtype=torch.float64)
    with torch.no_grad():
        for batch in batches_of(loader, model, device, labelled=True):
            mean = torch.zeros((), dtype=torch.float32, device=device)
            for member, weight in zip(models, weights, strict=True):
                mean = mean + widened(batch.inputs(member)).softmax(-1) * weight
            if (found := is_correct(mean, batch.labels)) is None:
                hits = hits + torch.tensor([[nan], [batch.num_labels]])
                continue
            labels, count = batch.labels, mean.shape[-1]
            check_classes(labels, count)
            both = labels[found], labels[labels != IGNORED]
            every = [y.long().cpu().bincount(minlength=count) for y in both]
            hits = hits + torch.stack(every)
    if not hits[1].any():
        raise DataError("the loader has no examples with a label")
    return hits


def accuracy_of(hits: Tensor) -> float:
    """Return the accuracy of all classes' hits."""
    found, count = hits.sum(1).tolist()
    return float(found / count)


def _copy_with(model: nn.Module, params: Params) -> nn.Module:
    """Return a copy of the model in eval mode, with these parameters."""
    member = copy.deepcopy(model).eval()
    load_state(member, params)
    return member


def evaluate_on_test(
    model: nn.Module, loader: Loader, *, every: int = 1, loss_fn: Loss = cross_entropy
) -> EvaluateFn:
    """Return an ``evaluate_fn`` that evaluates the server's model on the test set.

    Its metrics are ``accuracy`` and ``loss``. A TCT model in its second stage has no
    ``loss``, because it was not fitted by a cross-entropy. Before the first round of
    that stage it predicts nothing yet, and is not evaluated.

    Parameters
    ----------
    model : nn.Module
        The network; its parameters are replaced by the server's.
    loader : Iterable
        The test set, as for :func:`accuracies`.
    every : int, default 1
        Evaluate the initial model, and after each `every`-th round.
    loss_fn : Callable[[Tensor, Tensor], Tensor], default cross_entropy
        The mean loss of a batch, from outputs and labels.

    Raises
    ------
    ConfigurationError
        If `every` is out of range.
    """
    check_whole("every", every, 1)

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round % every:
            return None
        params = arrays_to_tensors(arrays)
        if TCTModel.is_in(params) and not params["tct/weight"].any():
            return None
        return MetricRecord(dict(test_scores(model, loader, params, loss_fn)))

    return evaluate_fn


def test_scores(
    model: nn.Module, loader: Loader, params: Params, loss_fn: Loss
) -> dict[str, float]:
    """Return the accuracy and, except of a TCT model, the loss of parameters."""
    device = default_device()
    is_tct = TCTModel.is_in(params)
    model = (TCTModel.from_tensors if is_tct else _copy_with)(model, params)
    loss, accuracy, _ = score(model.to(device), loader, device, loss_fn)
    return {"accuracy": accuracy} if is_tct else {"accuracy": accuracy, "loss": loss}
