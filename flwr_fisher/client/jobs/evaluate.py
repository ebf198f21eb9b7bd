"""Evaluation on a client's data, before and after personalisation."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SubsetRandomSampler,
)

from flwr_fisher.client.jobs import LocalProblem, Reply, Request, register_job
from flwr_fisher.client.limits import real_number, whole_number
from flwr_fisher.client.training import Loader, TrainFn, score
from flwr_fisher.curvature.batches import (
    positions_of,
    reads_positions,
    sampler_of,
    with_positions,
)
from flwr_fisher.errors import ClientError, DataError, check_known, check_positive
from flwr_fisher.params import Params
from flwr_fisher.randomness import derive_seed, seeded
from flwr_fisher.wire import NUM_EXAMPLES
from flwr_fisher.wire.answer import client_name

_SETS = ("validation", "train")
_FEWEST = 4  # examples, so that a client can fine-tune on a quarter of them


def local_scores(problem: LocalProblem, request: Request) -> dict[str, float]:
    """Return ``local-loss`` and ``local-accuracy`` on the client's training data.

    Return nothing unless the server requests them, by the option ``report-local``.
    """
    if not request.options.get("report-local"):
        return {}
    scores = _training_scores(problem, request.client)
    return {f"local-{key}": scores[key] for key in scores if key != NUM_EXAMPLES}


@register_job("evaluate", kind="evaluate")
def evaluate_job(problem: LocalProblem, request: Request) -> Reply:
    """Evaluate the server's parameters on the data that the options name.

    The options are ``evaluate-on`` = "validation" (default) or "train"; or
    ``personalise-fraction`` in (0, 0.5] and ``personalise-epochs``. The metrics are
    ``num-examples``, ``loss`` and ``accuracy``, or the last two as ``zero-shot-…`` and
    ``personalised-…``. There is an accuracy only if the likelihood is of classes and
    the labels are classes, not probabilities. On validation data, a client's own
    ``evaluate_fn`` decides what is measured.

    Raises
    ------
    ClientError
        If there is no such data, or the parameters are not this model's.
    DataError
        If there are no examples, or fewer than four to personalise with.
    """
    if "personalise-fraction" in request.options:
        return Reply(_personalised(problem, request))
    return evaluation(problem, request, LocalProblem.load)


def evaluation(
    problem: LocalProblem,
    request: Request,
    load: Callable[[LocalProblem, Params], LocalProblem],
) -> Reply:
    """Evaluate the model that `load` returns; raise an error without data.

    `load` puts parameters into the problem's model, or returns a problem with another.
    """
    options = request.options
    where = options.get("evaluate-on", "validation")
    check_known("evaluate-on", where, _SETS)
    nothing = problem.valloader is None and problem.evaluate_fn is None
    if where == "validation" and nothing:
        if options.get("may-abstain") is True:
            return Reply({NUM_EXAMPLES: 0})
        raise ClientError(
            "this client has no valloader to evaluate on: pass one to FisherClient,"
            " or pass fraction_evaluate=0.0 to the strategy"
        )
    problem = load(problem, request.params)
    if where == "train":
        return Reply(_training_scores(problem, request.client))
    if problem.val_batches is None or problem.evaluate_fn is not None:
        return Reply(problem.evaluate(request.config))
    return Reply(_scores(problem, problem.val_batches))


def _scores(problem: LocalProblem, loader: Loader) -> dict[str, float]:
    loss, accuracy, n = score(
        problem.model,
        loader,
        problem.device,
        problem.loss,
        classes=problem.has_classes,
    )
    scores = {NUM_EXAMPLES: n, "loss": loss, "accuracy": accuracy}
    if math.isnan(accuracy):
        del scores["accuracy"]
    return scores


def _training_scores(problem: LocalProblem, partition: int) -> dict[str, float]:
    """Evaluate on the training data, always in one order, so that sums agree."""
    with seeded(derive_seed("training data", partition)):
        return _scores(problem, problem.train_batches)


def _personalised(problem: LocalProblem, request: Request) -> dict[str, float]:
    """Fine-tune on a part of one half of the data; evaluate before and after.

    Raises
    ------
    ClientError
        If the data cannot be split, or the loop trained for another number of epochs;
        before parameters are loaded.
    ConfigurationError
        If the fraction is out of range.
    """
    options = request.options
    epochs = problem.limits.epochs(options, "personalise-epochs", 1)
    fraction = real_number(options, "personalise-fraction", 0.0)
    check_positive("personalise-fraction", fraction, most=0.5)
    loader = _map_style(problem.trainloader)
    size, train_fn = _batch_size(loader), _with_epochs(problem.train_fn, epochs)
    problem.load(request.params)
    seed = whole_number(options, "seed", 0)
    tune, test = _halves(loader, fraction, seed, request.client)
    unseen = problem.pairs_of(_part(loader, test))
    # Batch norm cannot train on one example, so a loader with drop_last keeps it.
    drops = getattr(sampler_of(loader), "drop_last", False) and len(tune) >= size
    mine = _part(loader, SubsetRandomSampler(tune), drop_last=drops)
    model = problem.model
    start = {k: v.clone() for k, v in model.state_dict().items()}
    training = model.training
    before = _scores(problem, unseen)
    try:
        problem.run(train_fn, mine, request.config)
        after = _scores(problem, unseen)
    finally:
        model.load_state_dict(start)
        model.train(training)
    count = before.pop(NUM_EXAMPLES)
    return {
        NUM_EXAMPLES: count,
        **{f"zero-shot-{key}": value for key, value in before.items()},
        **{f"personalised-{key}": after[key] for key in before},
    }


def _halves(
    loader: DataLoader[Any], fraction: float, seed: int, partition: int
) -> tuple[list[int], list[int]]:
    """Return the examples to fine-tune on, and the half to test on.

    The same half in every round and for every fraction; a smaller fraction's examples
    are among a larger one's.
    """
    own = positions_of(loader)
    n = len(own)
    if n < _FEWEST:
        raise DataError(
            f"{client_name(partition)} has {n} examples, but personalisation needs at "
            f"least {_FEWEST}: personalise only clients that have more"
        )
    chosen = derive_seed("personalise", seed, partition)
    generator = torch.Generator().manual_seed(chosen)
    order = [own[i] for i in torch.randperm(n, generator=generator).tolist()]
    return order[: min(n // 2, max(1, round(fraction * n)))], order[n // 2 :]


def _part(
    loader: DataLoader[Any], order: Iterable[int], *, drop_last: bool = False
) -> DataLoader[Any]:
    """Return a similar loader for a part of the data set."""
    return with_positions(loader, BatchSampler(order, _batch_size(loader), drop_last))


def _batch_size(loader: DataLoader[Any]) -> int:
    size = getattr(sampler_of(loader), "batch_size", None)
    if size is None:
        raise ClientError(
            "personalisation makes its own batches, so it needs a trainloader with a "
            "batch_size, or with a batch sampler that has one"
        )
    return int(size)


def _map_style(loader: Loader) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return the loader, after a check that its data set can be split."""
    if reads_positions(loader):
        return loader
    raise ClientError(
        "personalisation splits the client's data, so the trainloader must be a torch "
        "DataLoader, without an __iter__ of its own, with a map-style data set, not a "
        f"{type(loader).__name__} with data of type "
        f"{type(getattr(loader, 'dataset', loader)).__name__}"
    )


def _with_epochs(train_fn: TrainFn, epochs: int) -> TrainFn:
    """Return the same local loop with another number of epochs."""
    fn: Any = train_fn
    is_instance = dataclasses.is_dataclass(fn) and not isinstance(fn, type)
    names = {field.name for field in dataclasses.fields(fn)} if is_instance else set()
    if "epochs" not in names:
        raise ClientError(
            "personalisation sets its own number of epochs: it needs a train_fn that "
            "is LocalSGD, or another dataclass with a field 'epochs'"
        )
    plain = {"on_epoch": None, "swa_epochs": 1}  # what depends on the number of epochs
    other = {name: value for name, value in plain.items() if name in names}
    changed: TrainFn = dataclasses.replace(fn, epochs=epochs, **other)
    return changed
