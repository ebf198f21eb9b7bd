"""The jobs for a head in closed form: sums over the client's data, and losses."""

import torch

from flwr_fisher.client.jobs import LocalProblem, Reply, Request, register_job
from flwr_fisher.client.request import whole_number
from flwr_fisher.curvature.data import check_can_be_read_again
from flwr_fisher.curvature.losses import LOSSES, cross_entropy
from flwr_fisher.curvature.models import evaluating
from flwr_fisher.errors import ClientError, StructureError
from flwr_fisher.params import select, state_of
from flwr_fisher.tangent.frozen_head import head_losses, head_sums, output_layer
from flwr_fisher.tangent.head import find_head, linear_layer
from flwr_fisher.wire import HeadLossUpload, HeadUpload, NoHead


@register_job("head-sums")
def head_sums_job(problem: LocalProblem, request: Request) -> Reply:
    """Return the sums of this client's features and targets, without training.

    The option ``head`` names the linear layer, by default the one that computes the
    outputs. With the option ``most`` it is no error if there is no such layer, or if
    its sums have more numbers than these: the reply says so.

    Raises
    ------
    DataError
        If labels do not fit the head.
    StructureError, ClientError
        If there is no such layer, or the likelihood has no name.
    """
    named, most = request.options.get("head", ""), request.options.get("most")
    try:
        head = _head_of(problem, str(named))
        layer = linear_layer(problem.model, head)
        numbers = layer.in_features * (layer.in_features + layer.out_features)
        if numbers > whole_number(request.options, "most", numbers):
            raise StructureError(
                f"the sums of the last layer '{head}' have {numbers} numbers, more "
                f"than the model's {most}"
            )
        signs = (lambda y: 2 * y - 1) if problem.likelihood == "bernoulli" else None
        data = problem.model, problem.train_batches, head
        sums = head_sums(*data, classes=problem.has_classes, targets=signs)
    except (StructureError, ClientError) as error:
        if most is None:
            raise
        return Reply({}, NoHead.of(str(error)).to_arrays())
    upload = HeadUpload.of(*head_names(problem, head), str(problem.likelihood), sums)
    return Reply({}, upload.counting(problem.num_examples).to_arrays())


def _head_of(problem: LocalProblem, named: str) -> str:
    """Return the name of the layer to solve for."""
    if not isinstance(problem.likelihood, str):
        raise ClientError(
            "a head in closed form needs a likelihood by name, not "
            f"{problem.likelihood_name}"
        )
    check_can_be_read_again(problem.counted.loader, "the head's sums are taken of it")
    if named:
        return find_head(problem.model, named)
    with evaluating(problem.model), torch.no_grad():
        return output_layer(problem.model, problem.train_batches)


def head_names(problem: LocalProblem, head: str) -> tuple[str, str | None]:
    """Return the names of a layer's weight and bias (None if it has none)."""
    start = f"{head}." if head else ""
    biased = linear_layer(problem.model, head).bias is not None
    return f"{start}weight", f"{start}bias" if biased else None


@register_job("head-losses")
def head_losses_job(problem: LocalProblem, request: Request) -> Reply:
    """Return the losses of the model with its own head and the server's, and slopes.

    The server's is in the group ``head``, under its parameters' names. The option
    ``scales`` has the factors by which its outputs are multiplied.

    Raises
    ------
    ClientError
        If the server sent no head of this model's.
    """
    solved = request.groups.get("head", {})
    layers = {name.rpartition(".")[0] for name in solved}
    head = find_head(problem.model, layers.pop() if len(layers) == 1 else None)
    names = [name for name in head_names(problem, head) if name is not None]
    state = state_of(problem.model)
    shapes = {name: value.shape for name, value in solved.items()}
    fits = shapes == {name: state[name].shape for name in names}
    scales = request.options.get("scales")
    if not fits or not isinstance(scales, list):
        raise ClientError("the server sent no head that fits this model, or no scales")
    data = problem.model, problem.train_batches, head
    parts = list(select(solved, names).values())
    wanted = [float(scale) for scale in scales[:16]]
    loss_fn = LOSSES.get(str(problem.likelihood), cross_entropy)
    classes = problem.has_classes
    losses, slopes = head_losses(*data, parts, wanted, loss_fn, classes=classes)
    return Reply({}, HeadLossUpload(losses, slopes.float()).to_arrays())
