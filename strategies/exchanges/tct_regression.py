"""TCT's second stage: its tensors for clients, and its steps from their uploads."""

from collections.abc import Mapping
from typing import Any

import torch

from flwr_fisher.errors import ConfigurationError, listed
from flwr_fisher.log_lines import logger
from flwr_fisher.options import Options, option
from flwr_fisher.params import Params
from flwr_fisher.server.exchange import Groups, ServerState, Step, Uploads
from flwr_fisher.server.membership import Membership, lost_states
from flwr_fisher.tangent import check_lr, largest_safe_lr, standardisation, tct_average
from flwr_fisher.wire import tct_upload
from flwr_fisher.wire.arrays import bytes_of
from flwr_fisher.wire.tct_upload import KEYS, FeatureUpload, WeightUpload

# groups of the state's tensors, and names in them
MEMBERSHIP, CONTROL, _FACTS = "membership", "control", "regression"
_LR, _DIGEST, _LARGEST = "lr", "digest", "largest-eigenvalue"
_RATE = 5.0  # of the paper's eta = 5e-5 for 100 000 features

_SOLVERS, _DTYPES = ("closed-form", "steps"), ("float32", "float16")


class Regression(Options):
    """The features and the steps of :class:`TCT`'s second stage.

    With ``solver="closed-form"`` clients take the M steps all at once, with ``steps``
    one by one. That takes M passes over the features in place of three, and has no
    limit on a client's examples.

    Raises
    ------
    ConfigurationError
        If an argument is out of range.
    """

    head: str | None = option(
        None, "The layer to replace, an ``nn.Linear``; None: the last one."
    )
    solver: str = option(
        "closed-form", "How clients take the M steps.", choices=_SOLVERS
    )
    control_variates: bool = option(
        True, "If not, stage 2 is FedAvg, or with one step gradient descent."
    )
    standardise: bool = option(True, "If not, a larger `lr` is needed.")
    feature_dtype: str = option(
        "float32",
        "How clients store features; float16 needs half of the disk.",
        choices=_DTYPES,
    )


def network(state: ServerState) -> Params:
    """Return the parameters and buffers of the network that stage 1 trained."""
    return {k: v for k, v in state.params.items() if not k.startswith(KEYS)}


def rate_of(state: ServerState) -> float | None:
    """Return the learning rate of stage 2, once it is agreed."""
    facts = state.group(_FACTS)
    return float(facts[_LR]) if _LR in facts else None


def send(state: ServerState) -> Groups:
    """Return the known tensors that a client needs beside the network."""
    names = [k for k in ("weight", "mean", "std") if f"{KEYS}{k}" in state.params]
    sent = {k: state.params[f"{KEYS}{k}"] for k in names}
    facts = {**state.group(_FACTS), **state.group(CONTROL)}
    sent |= {k: facts[k] for k in (_DIGEST, _LR, CONTROL) if k in facts}
    return {"": sent | Membership.from_tensors(state.group(MEMBERSHIP)).sent()}


def standardise_features(
    state: ServerState, uploads: Uploads[FeatureUpload], *, seed: int, standardise: bool
) -> Step:
    """Return a step that sets the features' mean and deviation over all clients."""
    about = uploads[0].payload.about
    mean, std = standardisation([upload.payload.sums for upload in uploads])
    if not standardise:
        mean, std = torch.zeros_like(mean), torch.ones_like(std)
    model = {
        "weight": torch.zeros(len(mean), about["classes"], dtype=torch.float32),
        "mean": mean.float(),
        "std": std.float(),
        "seed": torch.tensor(seed),
        "head": bytes_of(about["head"]),
    }
    params = state.params | {f"{KEYS}{k}": v for k, v in model.items()}
    facts = {_DIGEST: bytes_of(about["digest"])}
    groups = {MEMBERSHIP: state.group(MEMBERSHIP), _FACTS: facts}
    return Step(ServerState(params, groups), {"stage": 2, "num-features": len(mean)})


def agree_on_rate(
    state: ServerState,
    uploads: Uploads[tct_upload.EigenvalueUpload | tct_upload.EigenvalueCounts],
    *,
    lr: float | None,
    control: bool,
) -> Step:
    """Return a step that sets a learning rate at which no client's steps diverge.

    Raises
    ------
    ConfigurationError
        If the given rate is too large for half of the clients. It names them.
    """
    eigenvalues = {
        f"one of {u.client} ({number})" if u.members else u.client: value
        for u in uploads
        for number, value in enumerate(u.payload.eigenvalues)
    }
    largest = max(eigenvalues.values())
    weight = state.params[f"{KEYS}weight"]
    if lr is None:
        lr = min(_RATE / len(weight), 1 / largest if largest else 1.0)
    else:
        _check_rate(lr, eigenvalues)
    text = "TCT: stage 2 begins with lr %g; the clients' largest eigenvalue is %g"
    logger.info(text, lr, largest)
    rate = torch.tensor(lr, dtype=torch.float64)
    groups = {**state.groups, _FACTS: {**state.group(_FACTS), _LR: rate}}
    if control:
        groups[CONTROL] = {CONTROL: torch.zeros_like(weight)}
    return Step(ServerState(state.params, groups), {_LR: lr, _LARGEST: largest})


def average(
    state: ServerState,
    uploads: Uploads[WeightUpload],
    connected: int,
    *,
    local_steps: int,
) -> Step:
    """Return a step to the mean of the clients' weights, with the control variate."""
    before = Membership.from_tensors(state.group(MEMBERSHIP))
    members = before.after(uploads, connected)
    weights, lr = members.weights_of(uploads), float(state.group(_FACTS)[_LR])
    old = state.params[f"{KEYS}weight"]
    sent = state.group(CONTROL).get(CONTROL, torch.zeros_like(old)).double()
    weight, control = tct_average(
        old,
        sent,
        [upload.payload.weight for upload in uploads],
        weights,
        parts=[upload.taken for upload in uploads],
        participation=members.participation(weights),
        lr=lr,
        local_steps=local_steps,
    )
    metrics: dict[str, Any] = {"stage": 2, _LR: lr}
    if not uploads[0].members:  # a secure sum has no metrics
        metrics["num-lost-states"] = lost_states(uploads)
    groups = {**state.groups, MEMBERSHIP: members.to_tensors()}
    details = None
    if CONTROL in state.groups:
        # The old control is a mean over the total weight known before.
        control.add_(sent, alpha=before.total / members.total - 1)
        details = control.to(old.dtype)
        groups[CONTROL] = {CONTROL: details}
        metrics["control-norm"] = float(control.norm())
    params = state.params | {f"{KEYS}weight": weight}
    return Step(ServerState(params, groups), metrics, details)


def _check_rate(lr: float, eigenvalues: Mapping[str, float]) -> None:
    refused = [k for k, v in eigenvalues.items() if lr > largest_safe_lr(v)]
    if not refused:
        return
    if 2 * len(refused) < len(eigenvalues):  # a few clients may be wrong, or lie
        text = "TCT: lr %g is too large for %s, by the eigenvalues that they report: "
        text += "they take shorter steps, and more of them"
        logger.warning(text, lr, listed(refused))
        return
    try:
        check_lr(lr, max(eigenvalues.values()))
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{listed(refused)}: {error} for all clients. Nothing is lost where there "
            "is a checkpoint_dir: resume with this lr, or with lr=None"
        ) from error
