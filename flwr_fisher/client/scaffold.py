"""SCAFFOLD on a client: steps corrected for how its data differ from the others'."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import Context
from torch import Tensor

from flwr_fisher.client.state import ClientStore, partition_of
from flwr_fisher.client.training import LocalSGD
from flwr_fisher.errors import ClientError, ParamsError
from flwr_fisher.merge import scaffold_control
from flwr_fisher.params import check_same_layout, subtract, trainable_names
from flwr_fisher.wire import Roster, VectorUpload

if TYPE_CHECKING:
    from flwr_fisher.client.fisher_client import FisherClient

__all__ = ["scaffold_task"]

logger = logging.getLogger("flwr")

_CONTROL = "control"


def scaffold_task(
    client: FisherClient,
    sent: Mapping[str, Tensor],
    config: Mapping[str, Any],
    context: Context,
) -> tuple[VectorUpload, Mapping[str, float]]:
    r"""Train with steps along :math:`g_i(y) - c_i + c`, and renew :math:`c_i`.

    The upload is the trained model and the control variate's change. ``state-lost``
    among the metrics is 1 where the server has heard of this client, but there is no
    control variate of it here: it starts from zero.

    Raises
    ------
    ClientError
        If the client's loop is not ``LocalSGD`` without momentum and with a positive
        learning rate.
    """
    train_fn, lr = _plain_sgd(client, config)
    model = client.model
    parameters = {n: model.get_parameter(n) for n in trainable_names(model)}
    start = {n: p.detach().clone() for n, p in parameters.items()}
    zeros = {n: torch.zeros_like(p) for n, p in start.items()}
    shared = {n: sent.get(f"{_CONTROL}/{n}", zero) for n, zero in zeros.items()}
    store = ClientStore(client.state_dir, int(sent["run"]), partition_of(context))
    heard = Roster.from_tensors(sent).steps.get(partition_of(context))
    found = None if heard is None else _load(store, heard, start)
    if heard is not None and found is None:
        logger.warning(
            "The state of step %s is not in %s: the control variate starts from zero",
            heard,
            store.path,
        )
    own = zeros if found is None else found
    correction, steps = subtract(shared, own), 0

    def correct(epoch: int) -> None:
        nonlocal steps
        steps += 1
        for name, parameter in parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.add_(correction[name])

    metrics = train_fn(
        model, client.trainloader, client.device, config, on_gradients=correct
    )
    away = subtract(start, {n: p.detach() for n, p in parameters.items()})
    new = scaffold_control(own, shared, away, steps=steps, lr=lr)
    store.save(_CONTROL, int(sent["steps"]) + 1, new, keep=heard)
    lost = heard is not None and found is None
    upload = VectorUpload({_CONTROL: subtract(new, own)}, model.state_dict())
    return upload, {**metrics, "state-lost": int(lost)}


def _plain_sgd(
    client: FisherClient, config: Mapping[str, Any]
) -> tuple[LocalSGD, float]:
    train_fn = client.train_fn
    if not isinstance(train_fn, LocalSGD):
        raise ClientError(
            "SCAFFOLD corrects every local step, so it needs train_fn=LocalSGD(...), "
            f"not {train_fn!r}"
        )
    if train_fn.momentum:
        raise ClientError(
            "SCAFFOLD takes the mean gradient from how far plain SGD went, so it needs "
            f"LocalSGD(momentum=0), not {train_fn.momentum}"
        )
    lr = float(config.get("lr", train_fn.lr))
    if lr <= 0:
        raise ClientError(f"SCAFFOLD divides by the learning rate, which is {lr}")
    return train_fn, lr


def _load(
    store: ClientStore, step: int, like: Mapping[str, Tensor]
) -> dict[str, Tensor] | None:
    """Return the control variate of a step, if it is there and fits the model."""
    found = store.load(_CONTROL, step)
    if found is None:
        return None
    try:
        check_same_layout(like, found, f"the state of step {step} in {store.path}")
    except ParamsError as error:
        logger.warning("%s: it is another model's, and treated as lost", error)
        return None
    return {n: found[n].to(p) for n, p in like.items()}
