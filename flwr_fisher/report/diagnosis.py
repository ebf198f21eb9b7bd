"""What a run's accuracies mean: sentences for its log, made from the numbers alone."""

from collections.abc import Iterator, Mapping
from math import isnan, nan, sqrt
from typing import Any

import torch
from torch import Tensor

from flwr_fisher.errors import listed

_FOUND = 0.1  # of a class's examples: a model that never saw the class finds fewer
_ONE_CLASS = 0.6  # a training loss of one class, of smoothed labels, too, is lower
_ALIKE = (
    "If the clients have alike labels, they have alike Fishers: then FedAvg, with the "
    "same refine=, is probably as good."
)
_TRY = (
    "If their labels differ, try LocalSGD(label_smoothing=0.1) on the clients, "
    "refine=Refinement(steps=3) on the server, or more rounds: see "
    "docs/fedfisher.md#if-fedavg-is-as-good"
)
_OTHER_DATA = 0.2  # how far below the clients' own scores a test score is no accident


def against_fedavg(method: str, accuracy: float, fedavg: float, count: int) -> str:
    """Return a sentence that compares a model with the mean of the same models.

    Parameters
    ----------
    method : str
        The method's name.
    accuracy, fedavg : float
        The accuracies of its model, and of FedAvg's mean of the same clients' models.
    count : int
        The number of test examples.

    Examples
    --------
    >>> against_fedavg("FedFisher", 0.983, 0.569, 360)
    "FedFisher is 41.4 points above FedAvg's mean of the same models."
    >>> against_fedavg("FedFisher", 0.983, 0.981, 360)
    "FedAvg's mean of the same models is level with FedFisher (98.1 and 98.3 %; \
less than two standard errors)."
    """
    lead = _lead(accuracy, fedavg, count)
    above = f"{100 * abs(lead):.1f} points above"
    if lead > 0:
        return f"{method} is {above} FedAvg's mean of the same models."
    how = above if lead else "level with"
    both = f"{100 * fedavg:.1f} and {100 * accuracy:.1f} %"
    both += "" if lead else "; less than two standard errors"
    return f"FedAvg's mean of the same models is {how} {method} ({both})."


def one_shot_sentences(
    accuracy: Mapping[str, float],
    final: Tensor,
    clients: Mapping[str, Tensor],
    losses: Mapping[str, Any],
    evaluated: float = nan,
    method: str = "FedFisher",
) -> list[str]:
    """Return what the log of a run of one round should say of its accuracies.

    Parameters
    ----------
    accuracy : Mapping[str, float]
        Accuracy by method, as in ``metrics.json``.
    final : Tensor
        :func:`~flwr_fisher.report.accuracy.class_hits` of the final model.
    clients : Mapping[str, Tensor]
        The same of each client's model, by its name; empty for a merge of sums.
    losses : Mapping[str, Any]
        The loss of each client's training, where it is known and the client has more
        than one class.
    evaluated : float
        The accuracy of the final model on the clients' own data, if it is known.
    method : str
        The method's name.
    """
    ours, count = accuracy["fedfisher"], int(final[1].sum())
    if isnan(ours):  # the outputs have no classes
        return []
    said = []
    if evaluated > ours + _OTHER_DATA:
        said.append(
            f"On the clients' own data its accuracy is {100 * evaluated:.1f} %: has "
            "each class the same number on all clients and in the test set?"
        )
    failed = [name for name, hits in clients.items() if _failed(hits, losses[name])]
    said += [
        f"{name}'s model gives every test example the same class, and its training's "
        f"loss is {losses[name]:.2g}. If the loss rose, lower the learning rate; if it "
        "still fell, train longer."
        for name in failed
    ]
    if 2 * len(failed) > len(clients):  # then all else is about them
        return said
    merge, fedavg = accuracy.get("fedfisher_merge", ours), accuracy["fedavg"]
    ours_alone = f"{method}'s merge" if "fedfisher_merge" in accuracy else method
    said.append(against_fedavg(ours_alone, merge, fedavg, count))

    def better(name: str) -> bool:
        return _lead(accuracy.get(name, 0.0), ours, count) > 0

    if (gain := _lead(ours, merge, count)) > 0:
        said.append(
            f"What follows the merge adds {100 * gain:.1f} points. FedAvg's mean is "
            "without it in this table, and gains by a new last layer, too: to compare, "
            "run flwr_fisher.strategies.FedAvg with this run's refine= (by default "
            "Refinement()) and report_rounds(..., method='FedAvg')."
        )
    if (lead := _lead(merge, fedavg, count)) <= 0:
        ahead = _lead(ours, fedavg, count) > 0
        said += [_ALIKE] * (ahead or not lead) + [_TRY] * (not ahead)
    if better("fedfisher_merge"):
        said.append("The merge alone is better: refine=None leaves out what follows.")
    if better("best_client"):
        said.append("One client's model is better: is the test set like its data?")
    if better("ensemble"):
        said.append(
            "The clients know more together (see the ensemble) than the merged model: "
            "refine=Refinement(steps=3), or a further round, can bring in more of it."
        )
    trained = {name: hits for name, hits in clients.items() if name not in failed}
    return [*said, *_on_classes(final, trained)]


def _on_classes(final: Tensor, clients: Mapping[str, Tensor]) -> Iterator[str]:
    """Say which classes depend on one client, and which the final model misses."""
    finders: dict[str, list[str]] = {}
    for client, hits in clients.items():
        for c in _classes(hits):
            finders.setdefault(c, []).append(client)
    alone = [f"{c} by {who[0]}" for c, who in finders.items() if len(who) == 1]
    if alone and len(clients) > 1:
        yield f"Classes that only one client's model finds: {listed(alone)}."
    missed = _classes(torch.stack([final[1], final[1]])) - _classes(final)
    if lost := missed & finders.keys():
        yield f"Classes that a client's model finds, but not the final: {listed(lost)}."
    if unknown := missed - finders.keys():
        yield (
            f"Classes that the final model hardly finds: {listed(unknown)}. Perhaps no "
            "client that took part has enough of their examples."
        )


def _failed(hits: Tensor, loss: Any) -> bool:
    """Return whether a model has one answer, though its client has more classes."""
    found = hits[0] > 0
    one_answer = int(found.sum()) == 1 and bool((hits[0] == hits[1])[found])
    return one_answer and isinstance(loss, float) and loss > _ONE_CLASS


def _classes(hits: Tensor) -> set[str]:
    """Return the classes that a model finds."""
    found = (hits[0] > _FOUND * hits[1]) & (hits[1] > 0)
    return {str(c) for c in found.nonzero().flatten().tolist()}


def _lead(first: float, second: float, count: int) -> float:
    """Return how far an accuracy is above another; 0 within two standard errors."""
    variance = sum(p * (1 - p) for p in (first, second)) / count
    lead = first - second
    return lead if abs(lead) > 2 * sqrt(variance) else 0.0
