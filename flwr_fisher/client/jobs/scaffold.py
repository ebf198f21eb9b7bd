"""SCAFFOLD's job: local steps, corrected for the client's difference from others."""

from collections.abc import Mapping
from typing import Any

import torch

from flwr_fisher.client.jobs import LocalProblem, Reply, Request, register_job
from flwr_fisher.client.state import ClientState
from flwr_fisher.client.training import TrainFn, local_sgd
from flwr_fisher.errors import ClientError, check_positive
from flwr_fisher.params import Params, subtract
from flwr_fisher.rounds import scaffold_control
from flwr_fisher.wire import Additive

_CONTROL = "control"


@register_job("scaffold")
def scaffold_job(problem: LocalProblem, request: Request) -> Reply:
    r"""Train with steps along :math:`g_i(y) - c_i + c`, and update :math:`c_i`.

    The upload is the trained model and the control variate's change. The metric
    ``state-lost`` is 1 if the server has had a reply from this client, but the client
    has no control variate any more: then it starts from zero.

    Raises
    ------
    ClientError
        If the client's loop is not ``LocalSGD`` without momentum, or control variates
        take more than its ``state_bytes``.
    ConfigurationError
        If the learning rate is not positive.
    """
    lr = _rate_of_plain_sgd(problem.train_fn, request.config)
    parameters = problem.trainable()
    start = {n: p.detach().clone() for n, p in parameters.items()}
    zeros = {n: torch.zeros_like(p) for n, p in start.items()}
    sent = request.groups.get(_CONTROL, {})
    shared = {n: sent.get(n, zero) for n, zero in zeros.items()}
    state = ClientState.of(problem, request, _CONTROL, start)
    control, lost = state.load()
    correct = _Correction(parameters, subtract(shared, control))
    metrics = problem.train(request.config, on_gradients=correct)
    away = subtract(start, {n: p.detach() for n, p in parameters.items()})
    new = scaffold_control(control, shared, away, steps=correct.steps, lr=lr)
    state.save(new)
    params = problem.state_like(request.params)
    upload = Additive({"params": params, _CONTROL: subtract(new, control)})
    return Reply({**metrics, "state-lost": int(lost)}, upload.to_arrays())


class _Correction:
    """Adds :math:`c - c_i` to gradients, and counts the steps."""

    def __init__(self, parameters: Params, correction: Params) -> None:
        self.parameters, self.correction = parameters, correction
        self.steps = 0

    def __call__(self, epoch: int, step: int) -> None:
        self.steps = step
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.add_(self.correction[name])

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


def _rate_of_plain_sgd(train_fn: TrainFn, config: Mapping[str, Any]) -> float:
    loop = local_sgd(train_fn, "SCAFFOLD corrects every local step")
    for name, needed in (("optimizer", None), ("scheduler", None), ("momentum", 0)):
        if (value := getattr(loop, name)) != needed:
            raise ClientError(
                "SCAFFOLD computes the mean gradient from the distance of plain SGD, "
                f"so it needs LocalSGD({name}={needed}), not {value!r}"
            )
    lr = loop.rate(config)
    check_positive("lr", lr)  # control variates are divided by it
    return lr
