"""The trial: a request's work on a few examples, before the training.

An error that would come after hours of training comes at once.

The trial uses a copy of the model. It does not iterate the loader, and leaves its
workers, its sampler and its generators alone, so that it does not change the training.
A data set that is more than tensors is read in a fork of this process: random numbers
that it draws, or files that it opens, change nothing here.

Long: reading the examples, all checks of them, and the lines for the log.
"""

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing.reduction import ForkingPickler
from textwrap import wrap
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)

from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.curvature import Curvature
from flwr_fisher.curvature.batch import Batch, Inputs, check_all_classes
from flwr_fisher.curvature.batches import (
    check_can_be_read_again,
    positions_of,
    reads_positions,
    sampler_of,
    with_positions,
)
from flwr_fisher.curvature.estimate.likelihood import likelihood_of
from flwr_fisher.curvature.kept_model import copied
from flwr_fisher.curvature.losses import (
    LOSSES,
    Loss,
    check_mean_over_labels,
    loss_of,
)
from flwr_fisher.curvature.models import evaluating
from flwr_fisher.errors import ClientError, DataError, FlwrFisherError, StructureError
from flwr_fisher.log_lines import logger
from flwr_fisher.randomness import seeded

_FEW = 4  # examples
_SECONDS = 60.0  # seconds for reading them in another process
_COLUMNS, _NAMED = 100, 6  # characters of a line; layers up to which all are named
_KINDS = {
    "Kronecker": "K-FAC",
    "EigenKronecker": "E-KFAC",
    "Dense": "dense blocks",
    "Diagonal": "diagonal",
}
_logged: set[str] = set()

Result = TypeVar("Result")


def on_few_examples(
    problem: LocalProblem, attempt: Callable[[LocalProblem, Batch], Result]
) -> Result | None:
    """Run an attempt on a copy of the model and a few training examples.

    The examples come directly from a data set with positions, collated as the loader
    does it, or from a list of batches. Some models need batches of the size with which
    they are trained: if four examples fail, a whole batch is tried.

    Parameters
    ----------
    problem : LocalProblem
        The client's problem, which stays as it is.
    attempt : Callable[[LocalProblem, Batch], Result]
        Called with a problem that has a copy of the model, and with a batch of inputs
        and labels.

    Returns
    -------
    Result | None
        None, with a line in the log, if nothing can be tried before training. There are
        four reasons: the data are a stream, or the loader is of another class, and its
        batches may come only once; the model cannot be copied; reading fails, perhaps
        only in this way of reading; or the data set is more than tensors, its loader
        has no workers, and no process can be forked. Then the attempt is made later, on
        the first batch that the training reads through this library, before its first
        step.

    Raises
    ------
    DataError
        If a batch has a form that this library does not read.
    """
    try:
        return _attempted(problem, attempt, partial(_batch, problem))
    except _UntriedError as why:
        logger.info("Skipping the trial before training: %s", why)

    def on_first_batch(batch: Batch) -> None:
        try:
            _attempted(problem, attempt, lambda count: batch[:count])
        except _UntriedError as why:
            logger.info("Skipping the trial on the first batch: %s", why)

    problem.on_first_batch.append(on_first_batch)
    return None


class _UntriedError(Exception):
    """The reason why a trial is not possible."""


class _CallError(DataError):
    """The model fails on what the loader gives; perhaps not on a whole batch."""


def _attempted(
    problem: LocalProblem,
    attempt: Callable[[LocalProblem, Batch], Result],
    read: Callable[[int | None], Batch],
) -> Result:
    with seeded(0):
        for count in (_FEW, None):
            try:
                batch = read(count)
                tried = replace(problem, model=copied(problem.model))
            except _UntriedError:
                raise
            except FlwrFisherError:
                if count is None:
                    raise
                continue  # a batch_fn, too, may be for whole batches
            except Exception as error:
                why = str(error).strip().rpartition("\n")[2]  # a worker's: a traceback
                raise _UntriedError(f"{type(error).__name__}: {why}") from error
            if batch.labels is not None and not batch.num_labels:
                continue  # labels of -100 alone are not enough for a trial
            try:
                return attempt(tried, batch)
            except _CallError as error:
                if count is None:
                    raise DataError(*error.args) from error.__cause__
            except FlwrFisherError:
                raise
            except Exception:
                if count is None:
                    raise
    raise _UntriedError("the first examples have no labels")


# Examples


def _batch(problem: LocalProblem, count: int | None) -> Batch:
    """Return some training examples, by default one batch."""
    loader: Any = problem.trainloader
    if isinstance(loader, Mapping):
        check_can_be_read_again(loader, "a Fisher is taken of the trainloader")
    if isinstance(loader, (list, tuple)) and loader:
        batch = loader[0]
    elif isinstance(getattr(loader, "dataset", None), IterableDataset):
        raise _UntriedError("the data are a stream")
    elif not reads_positions(loader):
        own = f"a {type(loader).__name__} has an __iter__ of its own"
        raise _UntriedError(f"{own}, whose batches may come only once")
    else:
        batch = _read(loader, _positions(loader, count))
    if batch is None:
        raise _UntriedError("the first batch is None, as of examples that are left out")
    return problem.train_batches.read(batch, problem.model)[:count]


class _Sent:
    """A collate function that fails at once where a process cannot send its batch.

    The worker's own thread would print an error, and its reader would wait in vain.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: Any) -> Any:
        batch = self.collate(rows)
        ForkingPickler.dumps(batch)
        return batch


def _read(loader: DataLoader[Any], positions: Any) -> Any:
    """Return a loader's batch of some positions, read by a worker process."""
    options: dict[str, Any] = {}
    if loader.num_workers or not _is_plain(loader):
        options = {"num_workers": 1, "collate_fn": _Sent(loader.collate_fn)}
    if options and not loader.num_workers:
        if sys.platform != "linux":
            raise _UntriedError(
                "the data set's own code would run here once more; with "
                "DataLoader(num_workers=1) a worker runs it"
            )
        options |= {"multiprocessing_context": "fork", "timeout": _SECONDS}
    few = with_positions(loader, [positions], **options)
    with warnings.catch_warnings():
        # Python warns that threads may hold locks; a reader that waits is stopped.
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        return next(iter(few))


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Return whether a loader reads plain tensors, without a user's code."""
    data = loader.dataset
    while type(data) is Subset:
        data = data.dataset
    collates = (default_collate, default_convert)
    return type(data) is TensorDataset and loader.collate_fn in collates


def _positions(loader: DataLoader[Any], count: int | None) -> Any:
    """Return possible positions of a batch, without using the sampler."""
    batches: Any = sampler_of(loader)
    if isinstance(batches, Sequence):
        first = batches[0]
        return list(first)[:count] if isinstance(first, Sequence) else first
    positions = positions_of(loader)
    if loader.batch_sampler is None and not hasattr(batches, "sampler"):
        return positions[0]  # the size of a whole batch
    size = getattr(batches, "batch_size", None) or 1
    return list(positions[: size if count is None else count])


def check_outputs(problem: LocalProblem, batch: Batch) -> None:
    """Raise an error if outputs are no tensor, not finite, or do not fit the labels.

    Raises
    ------
    DataError, ClientError
        If the model fails on the inputs; if the outputs are not finite, because of the
        inputs or of the parameters; or if labels name classes that the outputs do not
        have. On a GPU, such labels would end the process.
    StructureError
        If the outputs are no tensor, or if the labels have a shape for which the loop's
        loss is no mean.
    """
    model, inputs = problem.model, batch.inputs
    with evaluating(model), torch.no_grad():
        outputs = _called(model, inputs.to(problem.device))
    if outputs.isfinite().all():
        if isinstance(batch.labels, Tensor):
            _check_are_no_weights(problem, batch)
            _check_labels(problem, outputs.cpu(), batch.labels.cpu())
            _check_order(problem, outputs.cpu(), batch.labels.cpu())
            _check_are_logits(problem, outputs.cpu(), batch.labels.cpu())
        return
    if not all(tensor.isfinite().all() for tensor in inputs.tensors):
        raise DataError(
            "the inputs of the first training examples hold NaN or infinity, and so do "
            "the model's outputs: clean the data"
        )
    raise ClientError(
        "with the server's parameters, the model's outputs of the first training "
        "examples hold NaN or infinity: check these parameters, and the inputs' scale"
    )


def _called(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return a model's outputs; an error names what the inputs are."""
    try:
        return inputs(model)
    except (FlwrFisherError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        what = str(error).strip().partition("\n")[0].rstrip(".")
        forms = [f"{tuple(t.shape)} of {t.dtype}" for t in inputs.tensors]
        raise _CallError(
            f"the model fails on the loader's first examples, {', '.join(forms)}: "
            f"{type(error).__name__}: {what}. Change the data set; or, if your own "
            "loop converts its batches first, do that in batch_fn=..., of FisherClient "
            "or of fisher_arrays and check_fisher"
        ) from error


def _check_labels(problem: LocalProblem, outputs: Tensor, labels: Tensor) -> None:
    loss_fn = problem.trained_with
    of_classes = problem.has_classes and not labels.is_floating_point()
    if of_classes:
        if labels.dtype == torch.int64 and labels.shape == outputs.shape[:-1]:
            likelihood_of(problem.likelihood).score(outputs, labels)
            if problem.likelihood == "categorical":
                for each in _known_labels(problem):
                    if isinstance(each, Tensor) and not each.is_floating_point():
                        check_all_classes(each.long(), outputs.shape[-1])
    elif labels.shape != outputs.shape and loss_fn:
        check_mean_over_labels(outputs, labels, loss_fn)


def _known_labels(problem: LocalProblem) -> Iterator[Any]:
    """Yield the labels that are in memory, so that they need no reading of data."""
    loader: Any = problem.trainloader
    if isinstance(loader, (list, tuple)):
        for batch in loader:
            if batch is not None:
                yield problem.train_batches.read(batch, problem.model).labels
    elif reads_positions(loader) and _is_plain(loader) and not problem.batch_fn:
        batches: Any = sampler_of(loader)
        if not all(map(_is_torchs, (batches, getattr(batches, "sampler", batches)))):
            return  # it may leave out what has no label
        data: Any = loader.dataset
        positions = list[Any](positions_of(loader))
        if positions and isinstance(positions[0], Sequence):  # a batch each
            positions = list(chain.from_iterable(positions))
        while isinstance(data, Subset):
            data, positions = data.dataset, [data.indices[i] for i in positions]
        yield data.tensors[-1][torch.as_tensor(positions)]


def _is_torchs(sampler: object) -> bool:
    """Return whether positions are given as a sequence, or by a sampler of torch's."""
    kind = type(sampler).__module__
    return isinstance(sampler, Sequence) or kind == "torch.utils.data.sampler"


def _check_order(problem: LocalProblem, outputs: Tensor, labels: Tensor) -> None:
    """Raise :class:`StructureError` if a loss shows that classes are not last.

    Outputs ``[n, C, C]`` and labels ``[n, C]`` do not show it. A loss of logits stays
    what it is where a number is added to all classes.
    """
    shape, rest = labels.shape, outputs.shape[2:]
    if not (problem.has_classes and rest and shape[1:] == rest == outputs.shape[1:-1]):
        return
    if (loss_fn := problem.loss_fn or problem.trained_with) is None:
        log_once([f"Outputs {tuple(outputs.shape)}: the last dimension is the classes"])
        return

    def ignores(dimension: int) -> bool:
        added = torch.randn_like(outputs.narrow(dimension, 0, 1))
        before, now = (loss_of(loss_fn, o, labels) for o in (outputs, outputs + added))
        return torch.allclose(now, before, rtol=1e-3)

    if ignores(1) and not ignores(-1):
        raise StructureError(
            "the loss shows that the second dimension of the outputs, of shape "
            f"{tuple(outputs.shape)}, is the classes, and the Fisher's are the last: "
            "make it the last, by outputs.movedim(1, -1), in the model or in an "
            "output_fn, and train with flwr_fisher.client.cross_entropy"
        )


def _check_are_no_weights(problem: LocalProblem, batch: Batch) -> None:
    """Raise :class:`DataError` if a batch ends with numbers behind its classes.

    A model whose second argument is optional would take the classes for it.
    """
    if problem.batch_fn is not None or not problem.has_classes:
        return
    labels, inputs = batch.labels, batch.inputs.args
    if labels.is_floating_point() and any(
        isinstance(x, Tensor) and x.dtype == torch.int64 and x.shape == labels.shape
        for x in inputs[1:]
    ):
        raise DataError(
            "a batch ends with integers and numbers, and the last part of a batch is "
            "its labels: if the numbers are weights, pass batch_fn=lambda batch: "
            "(batch[0], batch[1]), to FisherClient or to fisher_arrays and check_fisher"
        )


# The function that turns logits into probabilities, and the loss of probabilities.
_OF_PROBABILITIES: dict[str, tuple[str, Loss]] = {
    "categorical": (
        "softmax",
        lambda p, y: F.nll_loss(p.log().flatten(0, -2), y.flatten()),
    ),
    "bernoulli": ("sigmoid", lambda p, y: F.binary_cross_entropy(p, y.to(p.dtype))),
}


def _check_are_logits(problem: LocalProblem, outputs: Tensor, labels: Tensor) -> None:
    """Raise :class:`StructureError` for probabilities, if the loss takes their log.

    The Fisher would apply a softmax, or a sigmoid, a second time. If the loss is not
    known, the log has a warning about outputs that sum to 1.
    """
    name, one = str(problem.likelihood), outputs.new_ones(())
    is_softmax = name == "categorical" and torch.allclose(outputs.sum(-1), one)
    are_shares = bool(((outputs >= 0) & (outputs <= 1)).all())
    if not are_shares or not (is_softmax or name == "bernoulli"):
        return
    maker, log_loss = _OF_PROBABILITIES[name]
    loss_fn = problem.loss_fn or problem.trained_with
    if loss_fn is None:
        if is_softmax:
            text = "The model returns probabilities, but the Fisher is that of logits: "
            text += "leave out the softmax, unless your loss is F.cross_entropy"
            log_once([text])
        return
    try:
        own, of_logs, of_logits = (
            float(loss(outputs, labels)) for loss in (loss_fn, log_loss, LOSSES[name])
        )
    except Exception:  # it is for other labels
        return
    near = partial(math.isclose, of_logs, rel_tol=1e-3)
    if near(own) and not near(of_logits):
        raise StructureError(
            f"the model returns probabilities, after a {maker}, and its loss takes "
            f"their logarithm, but the Fisher is that of logits: leave the {maker} out "
            "of the model, and train with the loss of logits, such as F.cross_entropy "
            "or F.binary_cross_entropy_with_logits"
        )


# the log lines


def upload_summary(
    model: nn.Module, curvature: Curvature, structure: str | None, size: str
) -> list[str]:
    """Return log lines about each layer's curvature and the upload's size.

    Parameters
    ----------
    model : nn.Module
        The model. The lines also name its frozen parameters.
    curvature : Curvature
        The curvature of a few examples.
    structure : str
        The requested structure: E-KFAC is tried as K-FAC.
    size : str
        The upload's size, in words.

    Examples
    --------
    >>> from flwr_fisher.curvature import fisher
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    >>> F = fisher(model, [torch.randn(4, 2)])
    >>> upload_summary(model, F, "kfac", "upload 1.0 kB")
    ['curvature: K-FAC of 0, 2; diagonal of 1 (2 tensors); upload 1.0 kB']
    """
    groups: dict[str, list[str]] = {}
    for block in curvature.blocks():
        kind = _KINDS.get(block.kind, block.kind)
        kind = "E-KFAC" if structure == "ekfac" and kind == "K-FAC" else kind
        groups.setdefault(kind, []).extend(block.shapes)
    parts = [
        f"{kind} of {_layers(names)}"
        + (f" ({len(names)} tensors)" if kind == "diagonal" else "")
        for kind, names in groups.items()
    ]
    if frozen := [n for n, p in model.named_parameters() if not p.requires_grad]:
        parts.append(f"frozen: {_layers(frozen)}")
    text = "; ".join(["curvature: " + parts[0], *parts[1:], size])
    return wrap(text, _COLUMNS, subsequent_indent="  ", break_on_hyphens=False)


def log_once(lines: Iterable[str]) -> None:
    """Log lines, unless this process has logged them with any upload size."""
    text = "\n".join(lines)
    known = " ".join(text.split()).partition("; upload ")[0]
    if known not in _logged:
        _logged.add(known)
        for line in text.splitlines():
            logger.info("%s", line)


def _layers(parameters: Iterable[str]) -> str:
    """Return the names of the parameters' layers, or the first and last of many."""
    own = dict.fromkeys(name.rpartition(".")[0] or name for name in parameters)
    names = list(own)
    if len(names) <= _NAMED:
        return ", ".join(names)
    return f"{len(names)} layers, {names[0]} … {names[-1]}"
