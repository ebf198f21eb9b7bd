"""TCT on a client: features' sums, their steepest direction, then regression rounds."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import Context
from torch import Tensor

from flwr_fisher.client.state import ClientStore, partition_of
from flwr_fisher.client.tangent import ClientFeatures, Regression
from flwr_fisher.errors import ClientError
from flwr_fisher.merge import (
    check_lr,
    feature_moments,
    tct_control,
    tct_residual,
    tct_steps,
    tct_update,
)
from flwr_fisher.wire import Roster
from flwr_fisher.wire.tangent import TangentUpload, bytes_of, text_from

if TYPE_CHECKING:
    from flwr_fisher.client.fisher_client import FisherClient

__all__ = ["tct_moments_task", "tct_spectrum_task", "tct_step_task"]

logger = logging.getLogger("flwr")

_CONTROL = "tct-control"


def tct_moments_task(
    client: FisherClient,
    sent: Mapping[str, Tensor],
    config: Mapping[str, Any],
    context: Context,
) -> tuple[TangentUpload, dict[str, float]]:
    """Return the mean and squared deviations of this client's features.

    Raises
    ------
    ClientError
        If this client cannot do TCT; before features are computed, where that is known
        before.
    """
    mine = _features(client, sent, config, context)
    found = feature_moments(mine.raw())
    tensors = {
        "mean": found.mean,
        "m2": found.m2,
        "count": torch.tensor(found.count),
        "num-classes": torch.tensor(mine.tangent.num_classes),
        "head": bytes_of(mine.tangent.head),
    }
    return TangentUpload(tensors, mine.tangent.digest), {}


def tct_spectrum_task(
    client: FisherClient,
    sent: Mapping[str, Tensor],
    config: Mapping[str, Any],
    context: Context,
) -> tuple[TangentUpload, dict[str, float]]:
    """Return the largest eigenvalue of this client's regression.

    The server sent the ``mean`` and ``std`` of features over all clients.
    """
    mine = _features(client, sent, config, context)
    problem = mine.regression(sent["mean"], sent["std"])
    largest = torch.tensor(problem.largest, dtype=torch.float64)
    return TangentUpload({"largest-eigenvalue": largest}, mine.tangent.digest), {}


def tct_step_task(
    client: FisherClient,
    sent: Mapping[str, Tensor],
    config: Mapping[str, Any],
    context: Context,
) -> tuple[TangentUpload, dict[str, float]]:
    r"""Take ``local-steps`` corrected gradient steps on this client's regression.

    The upload is :math:`\Theta_i`. ``train_loss`` is half the mean squared error at the
    weights that were sent, ``state-lost`` 1 where the server has heard of this client,
    but there is no control variate of it here: it starts from zero.

    Raises
    ------
    ClientError
        If its features are not the server's.
    ConfigurationError
        If the learning rate is too large for them.
    """
    mine = _features(client, sent, config, context)
    weight, lr = sent["weight"], float(sent["lr"])
    steps = int(config.get("local-steps", 500))
    problem = mine.regression(sent["mean"], sent["std"])
    check_lr(lr, problem.largest)
    targets = problem.targets(weight.shape[1])
    residual = tct_residual(problem.features, targets, weight)
    loss = float(residual.square().sum()) / (2 * len(residual))

    def step(h: Tensor | None) -> Tensor:
        rates = {"lr": lr, "local_steps": steps}
        return _stepped(mine, problem, targets, weight, h, residual, rates)

    if "control" not in sent:
        tensors, lost = {"weight": step(None)}, False
    else:
        own, heard, store = _own_control(client, sent, context)
        lost = heard is not None and own is None
        own = torch.zeros_like(weight) if own is None else own
        new_weight = step(own - sent["control"])
        tensors = {"weight": new_weight}
        new = tct_control(
            own, sent["control"], weight, new_weight, lr=lr, local_steps=steps
        )
        store.save(_CONTROL, int(sent["steps"]) + 1, {_CONTROL: new}, keep=heard)
    metrics = {"train_loss": loss, "state-lost": int(lost)}
    return TangentUpload(tensors, mine.tangent.digest), metrics


def _stepped(
    mine: ClientFeatures,
    problem: Regression,
    targets: Tensor,
    weight: Tensor,
    h: Tensor | None,
    residual: Tensor,
    rates: dict[str, Any],
) -> Tensor:
    if mine.solver == "steps":
        return tct_steps(problem.features, targets, weight, h, **rates)
    assert problem.spectrum is not None
    return tct_update(
        problem.features, targets, weight, h, problem.spectrum, residual=residual,
        **rates,
    )  # fmt: skip


def _features(
    client: FisherClient,
    sent: Mapping[str, Tensor],
    config: Mapping[str, Any],
    context: Context,
) -> ClientFeatures:
    """Return this client's features, which must be those the server knows of."""
    mine = ClientFeatures(client, partition_of(context), int(sent["run"]), config)
    tangent = mine.tangent
    if "digest" in sent and (text := text_from(sent["digest"])) != tangent.digest:
        raise ClientError(
            f"this client has {tangent.num_features} features of digest "
            f"{tangent.digest[:12]}, for seed {tangent.seed} and head "
            f"'{tangent.head}', and the server works with those of digest {text[:12]}: "
            "build the same model on both sides"
        )
    if "weight" in sent and sent["weight"].shape != (
        wanted := (tangent.num_features, tangent.num_classes)
    ):
        raise ClientError(
            f"the server sent weights of shape {tuple(sent['weight'].shape)}, and this "
            f"client has {wanted[0]} features and {wanted[1]} classes"
        )
    return mine


def _own_control(
    client: FisherClient, sent: Mapping[str, Tensor], context: Context
) -> tuple[Tensor | None, int | None, ClientStore]:
    """Return this client's control variate of the step the server last heard of."""
    partition = partition_of(context)
    store = ClientStore(client.state_dir, int(sent["run"]), partition)
    heard = Roster.from_tensors(sent).steps.get(partition)
    if heard is None:
        return None, None, store
    found = (store.load(_CONTROL, heard) or {}).get(_CONTROL)
    if found is None or found.shape != sent["weight"].shape:
        logger.warning(
            "The state of step %s is not in %s: the control variate starts from zero",
            heard,
            store.path,
        )
        return None, heard, store
    return found.to(sent["weight"]), heard, store
