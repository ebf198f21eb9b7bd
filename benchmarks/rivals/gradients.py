"""What rivals of many rounds share: an exchange for gradients, and clients' means."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from flwr_fisher.params import double, norm, weighted_mean
from flwr_fisher.strategies import Exchange, ServerState, Step, Summation, Upload
from flwr_fisher.wire import Additive

Uploads = Sequence[Upload[Additive]]


def mean_of(uploads: Uploads, part: str) -> dict[str, Tensor]:
    """Return the mean of the clients' vectors of a name, weighted by examples."""
    vectors = [upload.payload.part(part) for upload in uploads]
    return weighted_mean(vectors, [upload.num_examples for upload in uploads])


def gradient_exchange() -> Exchange[Additive]:
    """Return an exchange whose step keeps the clients' mean gradient in the state."""
    read = Additive.reader("gradient")
    return Exchange({"job": "gradient"}, read, _keep_mean, additive=Summation())


def send_gradient(state: ServerState) -> Mapping[str, Mapping[str, Tensor]]:
    """Return the mean gradient, for the next exchange to send."""
    return {"gradient": state.group("gradient")}


def _keep_mean(state: ServerState, uploads: Uploads) -> Step:
    gradient = mean_of(uploads, "gradient")
    metrics: dict[str, Any] = {"gradient-norm": float(norm(double(gradient)))}
    return Step(ServerState(state.params, {"gradient": gradient}), metrics)
