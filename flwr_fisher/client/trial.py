"""The check of a training's first batch, and what the log says of an upload."""

from collections.abc import Hashable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import Request
from flwr_fisher.curvature import Curvature, FisherOptions, fisher
from flwr_fisher.curvature.data import Batch, are_probabilities
from flwr_fisher.curvature.estimate.likelihood import check_labels, likelihood_of
from flwr_fisher.curvature.models import check_rows, evaluating, place_of
from flwr_fisher.devices import has_float64
from flwr_fisher.errors import (
    ClientError,
    DataError,
    FlwrFisherError,
    StructureError,
    listed,
)
from flwr_fisher.log_lines import log_once, logger
from flwr_fisher.randomness import seeded

_NAMED = 6  # layers up to which all are named
_KINDS = {"Kronecker": "K-FAC", "Diagonal": "diagonal"}
_FEW = 2  # examples whose Fisher is tried
_tried: set[Hashable] = set()  # what this process has tried


def try_upload(
    problem: LocalProblem,
    request: Request,
    structure: str,
    options: FisherOptions,
    batch: Any,
) -> None:
    """Check the first batch of a process's first training.

    It shows, before hours of training, whether the Fisher can be computed after it:
    whether the model takes the batch, and its outputs are one finite tensor that fits
    the labels and the likelihood, with a row for each example that is its own; and
    whether the Fisher of two of its examples can be computed.

    Parameters
    ----------
    problem, request
        The job's.
    structure, options
        The Fisher's: another one is checked, too.
    batch : Any
        The first batch that the training reads, as its loader yields it.

    Raises
    ------
    DataError, ClientError
        If the model fails on the inputs; if the outputs are not finite; or if labels
        name classes that the outputs do not have.
    StructureError
        If the outputs are no tensor, their classes are not the last dimension, an
        example's outputs depend on the others of its batch, or the Fisher fails.
    """
    read = problem.read(batch)
    forms = [(t.dtype, t.shape[1:]) for t in read.inputs.tensors]
    model = problem.model
    data = (request.client, str(problem.likelihood), *forms)
    key = (structure, options, repr(model), *data)
    if key in _tried:
        return
    # Where the model is: a loop of the user may have moved it.
    inputs = read.inputs.to(place_of(model) or problem.device)
    # A model may draw random numbers, which are not the training's.
    with evaluating(model), torch.no_grad(), seeded(0):
        try:
            outputs = inputs(model)
        except (FlwrFisherError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            sizes = [f"{tuple(t.shape)} of {t.dtype}" for t in inputs.tensors]
            raise DataError(
                f"the model fails on the loader's first examples, {', '.join(sizes)}: "
                f"{type(error).__name__}: {error}. Change the data set, or pass "
                "batch_fn=... if your own loop converts its batches"
            ) from error
        if options.expectation != "empirical-batch":  # it takes examples apart
            check_rows(model, inputs, outputs)
    if not outputs.isfinite().all():
        raise ClientError(
            "the model's outputs of the first training examples hold NaN or infinity: "
            "check the inputs, their scale, and the server's parameters"
        )
    likelihood, outputs = likelihood_of(problem.likelihood), outputs.cpu()
    likelihood.sample_score(outputs, torch.Generator().manual_seed(0))
    if isinstance(labels := read.labels, Tensor):
        check_labels(likelihood, outputs, labels.cpu())
    if problem.has_classes and are_probabilities(outputs):
        log_once(
            "The model returns probabilities, but the Fisher is that of logits: leave "
            "out the softmax, unless your loss is F.cross_entropy"
        )
    rows = [*islice((i for i in range(len(read)) if read[i : i + 1].num_labels), _FEW)]
    # There is no float64 where a loop has moved the model to such a device.
    if rows and has_float64(inputs.tensors[0].device):
        _try_fisher(problem, structure, options, read[torch.tensor(rows)])
    _tried.add(key)


def _try_fisher(
    problem: LocalProblem, structure: str, options: FisherOptions, examples: Batch
) -> None:
    """Compute the Fisher of a few examples, and see what it is of.

    Raises
    ------
    StructureError
        If it fails, or the outputs depend on no trained parameter.
    """
    try:
        with seeded(0):
            made = fisher(
                problem.model,
                [examples],
                structure,
                options=replace(options, examples=None),
                likelihood=problem.likelihood,
            )
    except (FlwrFisherError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise StructureError(
            "the Fisher, which follows the training, fails on two of the first "
            f"examples: {type(error).__name__}: {error}. docs/supported.md says which "
            "models have one"
        ) from error
    if all(values.any() for values in made.diagonal().values()):
        return
    trained = problem.trainable()
    with evaluating(problem.model), seeded(0):
        inputs = examples.inputs.to(place_of(problem.model) or problem.device)
        total = inputs(problem.model).sum()
        slopes = torch.autograd.grad(total, [*trained.values()], allow_unused=True)
    pairs = zip(trained, slopes, strict=True)
    unused = [name for name, slope in pairs if slope is None]
    if len(unused) == len(trained):
        raise StructureError(
            "in eval mode the model's outputs depend on no trained parameter: compute "
            "them without torch.no_grad, and by checkpoint(use_reentrant=False)"
        )
    if unused:
        logger.warning(
            "In eval mode the outputs do not depend on %s: no Fisher weighs these "
            "parameters, and the merge takes their mean",
            listed(unused),
        )


def upload_summary(
    model: nn.Module, curvature: Curvature, size: int, fedavg: int
) -> str:
    r"""Return what an upload is made of, and its size, for the log.

    Parameters
    ----------
    model : nn.Module
        The model. The lines also name its frozen parameters.
    curvature : Curvature
        The curvature.
    size, fedavg : int
        The upload's bytes, and those of FedAvg's upload.

    Examples
    --------
    >>> from flwr_fisher.curvature import fisher
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    >>> upload_summary(model, fisher(model, [torch.randn(4, 2)]), 1000, 500)
    "curvature: K-FAC of 0, 2; diagonal of 1; upload 1.0 kB, 2.00 of FedAvg's"
    """
    groups: dict[str, list[str]] = {}
    for block in curvature.blocks():
        groups.setdefault(_KINDS.get(block.kind, block.kind), []).extend(block.shapes)
    if frozen := [n for n, p in model.named_parameters() if not p.requires_grad]:
        groups["frozen parameters"] = frozen
    parts = [f"{kind} of {_layers(names)}" for kind, names in groups.items()]
    kb = size / 1e3
    amount = f"{kb / 1e3:.2f} MB" if kb >= 100 else f"{kb:.1f} kB"
    parts.append(f"upload {amount}, {size / fedavg:.2f} of FedAvg's")
    return f"curvature: {'; '.join(parts)}"


def _layers(parameters: Iterable[str]) -> str:
    """Return the names of the parameters' layers, or the first and last of many."""
    names = list(dict.fromkeys(n.rpartition(".")[0] or n for n in parameters))
    if len(names) <= _NAMED:
        return ", ".join(names)
    return f"{len(names)} layers, {names[0]} … {names[-1]}"
