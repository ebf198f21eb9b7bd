"""A request for curvature tried on a few examples, before hours go into training."""

from collections.abc import Callable
from typing import Any

import torch
from flwr.app import ArrayRecord, MetricRecord
from torch import Tensor

from flwr_fisher.client.first_examples import first_examples
from flwr_fisher.client.fisher_options import FisherOptions
from flwr_fisher.client.outline import outline, tell_once
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import Request
from flwr_fisher.client.training import score
from flwr_fisher.client.undisturbed import undisturbed
from flwr_fisher.curvature import Curvature
from flwr_fisher.curvature.batches import device_of
from flwr_fisher.curvature.models import evaluating
from flwr_fisher.errors import (
    ClientError,
    DataError,
    FlwrFisherError,
    StructureError,
)
from flwr_fisher.log_lines import logger
from flwr_fisher.params import Params, check_finite
from flwr_fisher.wire import fedavg_bytes, reply_bytes

_FEW = 4  # examples
_ENTRIES, _CUBES = 3 * 10**5, 10**8  # that take about a tenth of a second to pack


Pack = Callable[[Params, Curvature], ArrayRecord]


def dry_run(
    problem: LocalProblem,
    request: Request,
    options: FisherOptions,
    largest: Pack | None = None,
) -> None:
    """Take the curvature of a few examples at the parameters that arrived; pack it.

    Whatever the client could not compute or upload after its training is raised now, by
    the same errors. It changes nothing: see
    :func:`~flwr_fisher.client.undisturbed.undisturbed`. Of a stream, which may come
    only once, nothing is tried. What would take long to pack is not packed: that its
    codec can, is known without.

    What has which structure is told to the log, once a process.

    Parameters
    ----------
    problem : LocalProblem
        Its model holds the request's parameters.
    request : Request
        The server's.
    options : FisherOptions
        What it asks for; without a structure, nothing is tried.
    largest : Callable[[Params, Curvature], ArrayRecord], optional
        Packs the largest of several replies, where the options do not say.

    Raises
    ------
    FlwrFisherError
        As whatever is tried does; a :class:`DataError` or :class:`ClientError` if the
        model's outputs are not finite.
    """
    if options.structure is None:
        return
    model = problem.model
    device_of(model, None)
    with undisturbed(model, problem.trainloader):
        curvature = _tried(problem, request, options)
        if curvature is None:
            logger.info("The data are a stream: no batch is tried before training")
            return
        size, about = _size(problem, request, options, curvature, largest)
    upload = f"upload {about} {_bytes(size)}"
    ratio = f"{size / fedavg_bytes(request.params):.2f} of FedAvg's"
    tell_once(outline(model, curvature, options.structure, f"{upload}, {ratio}"))


def _tried(
    problem: LocalProblem, request: Request, options: FisherOptions
) -> Curvature | None:
    for count in (_FEW, None):
        batch = first_examples(problem, count)
        if batch is None:
            return None
        try:
            return _curvature(problem, request, options, batch)
        except FlwrFisherError:
            raise
        except Exception:
            # A model may want batches of the size that it is trained on.
            if count is None:
                raise
    return None


def _curvature(
    problem: LocalProblem,
    request: Request,
    options: FisherOptions,
    batch: tuple[Tensor, Any],
) -> Curvature:
    _check_outputs(problem, batch[0])
    curvature = options.tried(problem, [batch])
    if request.options.get("report-local"):
        score(problem.model, [batch], problem.device, problem.loss)
    return curvature


def _check_outputs(problem: LocalProblem, inputs: Tensor) -> None:
    model = problem.model
    with evaluating(model), torch.no_grad():
        outputs = model(inputs.to(problem.device))
    if not isinstance(outputs, Tensor):
        raise StructureError(
            f"the model returns a {type(outputs).__name__}, and a curvature is of one "
            "tensor of outputs: wrap the model in one that returns it"
        )
    if outputs.isfinite().all():
        return
    if not inputs.isfinite().all():
        raise DataError(
            "the inputs of the first training examples hold NaN or infinity, and the "
            "model's outputs of them, too: clean the data"
        )
    raise ClientError(
        "the model's outputs of the first training examples hold NaN or infinity at "
        "the parameters that the server sent: look at them, and at the inputs' scale"
    )


def _size(
    problem: LocalProblem,
    request: Request,
    options: FisherOptions,
    curvature: Curvature,
    largest: Pack | None,
) -> tuple[int, str]:
    """Return an upload's bytes, and whether these are about right or the most."""
    params = problem.state_like(request.params)
    tensors = {f"tensor {i}": t for i, t in enumerate(curvature.tensors())}
    check_finite(tensors, "the curvature of a few examples")
    if largest is not None:
        return reply_bytes(largest(params, curvature), MetricRecord()), "at most"
    if options.upload == "fisher" and _takes_long(list(tensors.values())):
        if options.codec.scheme == "lossless":
            return fedavg_bytes({**params, **tensors}), "about"
        return int(options.codec.budget * fedavg_bytes(params)), "at most"
    count = max(request.num_examples, 1)
    arrays = options.arrays(request.params, params, curvature, count)
    return reply_bytes(arrays, MetricRecord()), "about"


def _bytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB" if size >= 10**5 else f"{size / 1e3:.1f} kB"


def _takes_long(tensors: list[Tensor]) -> bool:
    """Return whether tensors are many, or matrices large, to decompose."""
    cubes = sum(t.numel() * t.shape[-1] for t in tensors if t.dim() > 1)
    return sum(t.numel() for t in tensors) > _ENTRIES or cubes > _CUBES
