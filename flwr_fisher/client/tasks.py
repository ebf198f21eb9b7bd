"""What a client can do besides training: probes and directions, and odd training.

The server's config names one as ``task``. Each is a function of the client, whose model
holds the parameters that arrived, of what else the server sent, by name, of the config
and of the node's context; it returns what to upload, and metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from flwr.app import ArrayRecord, Context
from torch import Tensor

from flwr_fisher.client.randomness import seeded
from flwr_fisher.client.scaffold import scaffold_task
from flwr_fisher.client.tct import tct_moments_task, tct_spectrum_task, tct_step_task
from flwr_fisher.client.training import Loss, cross_entropy
from flwr_fisher.curvature import gradient, gradient_and_hvp, hvp
from flwr_fisher.curvature.random_probe import random_probe
from flwr_fisher.errors import ClientError, ParamsError, check_known
from flwr_fisher.merge import done_direction, fedga_start, giant_direction
from flwr_fisher.params import Params, check_same_layout, trainable_names
from flwr_fisher.wire import VectorUpload

if TYPE_CHECKING:
    from flwr_fisher.client.fisher_client import FisherClient

__all__ = ["TASKS", "Task", "TaskUpload"]

_PROBES = ("first", "random", "momentum")
_SOLVERS = ("giant", "done")


class TaskUpload(Protocol):
    """What a task returns to be uploaded."""

    def only(self, names: Params) -> TaskUpload:
        """Return it without the parameters that are not among the names."""

    def to_arrays(self) -> ArrayRecord:
        """Return the one record that travels."""


Task = Callable[
    ["FisherClient", Mapping[str, Tensor], Mapping[str, Any], Context],
    tuple[TaskUpload, Mapping[str, float]],
]


def gradient_task(
    client: FisherClient,
    sent: Mapping[str, Tensor],
    config: Mapping[str, Any],
    context: Context,
) -> tuple[VectorUpload, dict[str, float]]:
    """Return the gradient of the mean loss over all of the client's examples."""
    found, loss = gradient(client.model, client.trainloader, loss_fn=_loss(client))
    return VectorUpload({"gradient": found}), {"train_loss": loss}


def probe_task(
    client: FisherClient,
    sent: Mapping[str, Tensor],
    config: Mapping[str, Any],
    context: Context,
) -> tuple[VectorUpload, dict[str, float]]:
    """Return the gradient, and the Hessian's product with the probe of the config.

    ``probe`` is ``first`` (the first trained coordinate), ``random`` (made here from
    the server's ``seed``) or ``momentum`` (what the server sent as ``probe``).
    """
    kind = str(config.get("probe", "first"))
    check_known("probe", kind, _PROBES)
    probe: Params | str = "first"
    if kind == "random":
        probe = random_probe(_trained(client), int(config.get("seed", 0)))
    elif kind == "momentum":
        probe = _sent_vector(client, sent, "probe")
    slope, product, loss = gradient_and_hvp(
        client.model, client.trainloader, probe, loss_fn=_loss(client)
    )
    return VectorUpload({"gradient": slope, "hvp": product}), {"train_loss": loss}


def direction_task(
    client: FisherClient,
    sent: Mapping[str, Tensor],
    config: Mapping[str, Any],
    context: Context,
) -> tuple[VectorUpload, dict[str, float]]:
    """Return this client's solution of ``H_i p = g``, for the ``gradient`` sent.

    ``solver`` is ``giant`` (conjugate gradients) or ``done`` (Richardson's iterations
    of step ``alpha``), ``iterations`` their number.
    """
    solver = str(config.get("solver", "giant"))
    check_known("solver", solver, _SOLVERS)
    g = _sent_vector(client, sent, "gradient")
    iterations = int(config.get("iterations", 10))

    def product(vector: Params) -> dict[str, Tensor]:
        return hvp(client.model, client.trainloader, vector, loss_fn=_loss(client))

    if solver == "giant":
        found = giant_direction(product, g, iterations=iterations)
    else:
        alpha = float(config.get("alpha", 0.05))
        found = done_direction(product, g, alpha=alpha, iterations=iterations)
    return VectorUpload({"direction": found}), {}


def displaced_task(
    client: FisherClient,
    sent: Mapping[str, Tensor],
    config: Mapping[str, Any],
    context: Context,
) -> tuple[VectorUpload, Mapping[str, float]]:
    """Train with `train_fn` from FedGA's start, ``beta`` away from the parameters.

    The server sent the cohort's mean ``gradient``; the client's own is computed again.
    """
    mean = _sent_vector(client, sent, "gradient")
    with seeded(0):  # training begins with the randomness of FedAvg's
        own, _ = gradient(client.model, client.trainloader, loss_fn=_loss(client))
    start = {n: p.detach() for n, p in _trained(client).items()}
    start = fedga_start(start, mean, own, beta=float(config.get("beta", 0.0)))
    client.model.load_state_dict(start, strict=False)
    metrics = client.train_fn(client.model, client.trainloader, client.device, config)
    return VectorUpload({}, client.model.state_dict()), metrics


def _loss(client: FisherClient) -> Loss:
    """Return what to differentiate.

    Raises
    ------
    ClientError
        If it is the default, and outputs are no logits of classes.
    """
    if client.likelihood != "categorical" and client.loss_fn is cross_entropy:
        raise ClientError(
            f"likelihood='{client.likelihood}' and no loss_fn, whose default is of "
            "classes: pass the loss to differentiate, FisherClient(loss_fn=...)"
        )
    return client.loss_fn


def _trained(client: FisherClient) -> dict[str, Tensor]:
    model = client.model
    return {name: model.get_parameter(name) for name in trainable_names(model)}


def _sent_vector(
    client: FisherClient, sent: Mapping[str, Tensor], name: str
) -> dict[str, Tensor]:
    """Return a vector over the trained parameters that the server sent, in their order.

    Raises
    ------
    ClientError
        If it is not there, or does not fit.
    """
    start, trained = f"{name}/", _trained(client)
    found = {k.removeprefix(start): v for k, v in sent.items() if k.startswith(start)}
    if not found:
        raise ClientError(
            f"the server sent no '{name}', which it asks this client to work with"
        )
    try:
        check_same_layout(trained, found, f"the '{name}' that the server sent")
    except ParamsError as error:
        raise ClientError(
            f"{error}: train the same parameters on every client, in every round"
        ) from error
    return {k: found[k].to(p.dtype) for k, p in trained.items()}


TASKS: dict[str, Task] = {
    "direction": direction_task,
    "displaced": displaced_task,
    "gradient": gradient_task,
    "probe": probe_task,
    "scaffold": scaffold_task,
    "tct-moments": tct_moments_task,
    "tct-spectrum": tct_spectrum_task,
    "tct-step": tct_step_task,
}
