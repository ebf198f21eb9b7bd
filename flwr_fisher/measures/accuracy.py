"""The accuracy of parameters that the server has at hand."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from flwr_fisher.errors import DataError

Loader = Iterable[tuple[Tensor, Tensor]]


def accuracies(
    model: nn.Module,
    candidates: Mapping[str, Mapping[str, Tensor]],
    loader: Loader,
) -> dict[str, float]:
    """Return the accuracy of each candidate's parameters in the model.

    Parameters
    ----------
    model : nn.Module
        Its own parameters are put back afterwards.
    candidates : Mapping[str, Mapping[str, Tensor]]
        Parameters by method; what is missing stays the model's.
    loader : Iterable
        Batches ``(inputs, labels)``.

    Raises
    ------
    DataError
        If the loader has no examples.
    """
    return {
        name: ensemble_accuracy(model, [params], [1.0], loader)
        for name, params in candidates.items()
    }


def ensemble_accuracy(
    model: nn.Module,
    members: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float],
    loader: Loader,
) -> float:
    """Return the accuracy of the members' weighted mean probabilities.

    It is a reference: as many models as there are members, not one.
    """
    batches = _predictions(model, members, weights, loader)
    count = sum(y.numel() for _, y in batches)  # one label an example, or a token
    if not count:
        raise DataError("the loader has no examples")
    return sum(int((p == y).sum()) for p, y in batches) / count


def _predictions(
    model: nn.Module,
    members: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float],
    loader: Loader,
) -> list[tuple[Tensor, Tensor]]:
    """Return pairs (predicted, true) of every batch; the model is left as it was."""
    own = {k: v.clone() for k, v in model.state_dict().items()}
    training, device = model.training, next(model.parameters()).device
    total: dict[int, Tensor] = {}
    labels: dict[int, Tensor] = {}
    model.eval()
    try:
        for params, weight in zip(members, weights, strict=True):
            model.load_state_dict(params, strict=False)
            with torch.no_grad():
                for index, (inputs, y) in enumerate(loader):
                    p = model(inputs.to(device)).softmax(-1) * weight
                    total[index] = total[index] + p if index in total else p
                    labels[index] = y.to(device)
    finally:
        model.load_state_dict(own)
        model.train(training)
    return [(p.argmax(-1), labels[index]) for index, p in total.items()]
