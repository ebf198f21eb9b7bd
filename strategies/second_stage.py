"""TCT's second stage on the server: what is sent, and what uploads make of it."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.merge import (
    FeatureMoments,
    check_lr,
    combine_moments,
    largest_safe_lr,
    standardisation,
    tct_average,
)
from flwr_fisher.params import Params
from flwr_fisher.strategies.membership import Membership
from flwr_fisher.strategies.state import ServerState, Step, Upload
from flwr_fisher.strategies.updates import weights_of
from flwr_fisher.wire.tangent import TCT, TangentUpload, bytes_of

__all__ = ["LR", "network", "regressed", "send", "settled", "standardised"]

logger = logging.getLogger("flwr")

LR = "lr"
_CONTROL, _LARGEST, _DIGEST = "control", "largest-eigenvalue", "digest"
_RATE = 5.0  # of the paper's eta = 5e-5 for 100 000 features


def network(state: ServerState) -> Params:
    """Return the network's parameters and buffers, which stage 1 trained."""
    return {k: v for k, v in state.params.items() if not k.startswith(TCT)}


def send(state: ServerState) -> Params:
    """Return what a client needs beside the network, as far as it is known."""
    names = [k for k in ("weight", "mean", "std") if f"{TCT}{k}" in state.params]
    own = {k: state.params[f"{TCT}{k}"] for k in names}
    kept = {k: state.extra[k] for k in (_DIGEST, LR, _CONTROL) if k in state.extra}
    return own | kept | Membership.from_tensors(state.extra).sent()


def standardised(
    state: ServerState, uploads: Sequence[Upload], *, seed: int, standardise: bool
) -> Step:
    """Take the features' mean and deviation over all clients."""
    found = [_tensors(upload) for upload in uploads]
    moments = [FeatureMoments(t["mean"], t["m2"], int(t["count"])) for t in found]
    mean, std = standardisation(combine_moments(moments))
    if not standardise:
        mean, std = torch.zeros_like(mean), torch.ones_like(std)
    own = {
        "weight": torch.zeros(len(mean), int(found[0]["num-classes"])),
        "mean": mean.float(),
        "std": std.float(),
        "seed": torch.tensor(seed),
        "head": found[0]["head"],
    }
    params = state.params | {f"{TCT}{k}": v for k, v in own.items()}
    kept = Membership.from_tensors(state.extra).to_tensors()
    extra = kept | {_DIGEST: bytes_of(_payload(uploads[0]).digest)}
    metrics: dict[str, Any] = {"stage": 2, "num-features": len(mean)}
    return Step(ServerState(params, extra), metrics)


def settled(
    state: ServerState, uploads: Sequence[Upload], *, lr: float | None, control: bool
) -> Step:
    """Settle on a learning rate with which no client's steps diverge.

    Raises
    ------
    ConfigurationError
        If the one that is given is too large for some clients, naming them.
    """
    eigenvalues = {u.client: float(_tensors(u)[_LARGEST]) for u in uploads}
    largest = max(eigenvalues.values())
    weight = state.params[f"{TCT}weight"]
    if lr is None:
        lr = min(_RATE / len(weight), 1 / largest if largest else 1.0)
    else:
        _check_rate(lr, eigenvalues)
    logger.info(
        "TCT: stage 2 begins with lr %g; the clients' largest eigenvalue is %g",
        lr,
        largest,
    )
    extra = state.extra | {LR: torch.tensor(lr, dtype=torch.float64)}
    if control:
        extra[_CONTROL] = torch.zeros_like(weight)
    return Step(ServerState(state.params, extra), {LR: lr, _LARGEST: largest})


def regressed(
    state: ServerState, uploads: Sequence[Upload], connected: int, *, local_steps: int
) -> Step:
    """Average the clients' weights, and renew the control variate if there is one."""
    before = Membership.from_tensors(state.extra)
    members = before.heard(uploads, connected)
    weights, lr = weights_of(uploads), float(state.extra[LR])
    old = state.params[f"{TCT}weight"]
    sent = state.extra.get(_CONTROL, torch.zeros_like(old)).double()
    weight, control = tct_average(
        old,
        sent,
        [_tensors(upload)["weight"] for upload in uploads],
        weights,
        participation=members.participation(weights),
        lr=lr,
        local_steps=local_steps,
    )
    lost = sum(bool(upload.metrics.get("state-lost")) for upload in uploads)
    if lost:
        logger.warning(
            "%d clients have lost their control variate, and start from zero", lost
        )
    metrics: dict[str, Any] = {"stage": 2, LR: lr, "num-lost-states": lost}
    extra = state.extra | members.to_tensors()
    if _CONTROL in state.extra:
        # What was a mean over all clients' weight, as known before, is less or more.
        control.add_(sent, alpha=members.rescale(before) - 1)
        extra[_CONTROL] = control.to(old.dtype)
        metrics["control-norm"] = float(control.norm())
    params = state.params | {f"{TCT}weight": weight}
    return Step(ServerState(params, extra), metrics, extra.get(_CONTROL))


def _check_rate(lr: float, eigenvalues: Mapping[str, float]) -> None:
    refused = [k for k, v in eigenvalues.items() if lr > largest_safe_lr(v)]
    if not refused:
        return
    try:
        check_lr(lr, max(eigenvalues.values()))
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{', '.join(refused)}: {error} for all clients. Nothing is lost where "
            "there is a checkpoint_dir: resume with that, or with lr=None"
        ) from error


def _payload(upload: Upload) -> TangentUpload:
    assert isinstance(upload.payload, TangentUpload)
    return upload.payload


def _tensors(upload: Upload) -> dict[str, Tensor]:
    return _payload(upload).tensors
