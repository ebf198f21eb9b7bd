"""FedPM: preconditioned local steps, and preconditioned mixing of the models.

The paper (AAAI 2026) takes FOOF's preconditioner (Benzing, "Gradient Descent on Neurons
and its Link to Approximate Second-Order Optimization", ICML 2022).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.client import LocalProblem, LocalSGD, Reply, Request, register_job
from flwr_fisher.curvature import Kronecker
from flwr_fisher.errors import ClientError, ParamsError, WireError, check_positive
from flwr_fisher.params import (
    Params,
    bias_of,
    double,
    finite,
    norm,
    shares_of,
    weighted_mean,
)
from flwr_fisher.randomness import seeded
from flwr_fisher.strategies import (
    CurvatureStrategy,
    Exchange,
    ServerState,
    Step,
    Upload,
)
from flwr_fisher.wire import Payload, arrays_to_tensors, tensors_to_arrays
from rivals.layer_inputs import layer_inputs

Layers = Mapping[str, Kronecker]
_INPUTS = "inputs/"


def damped_factor(A: Tensor, damping: float) -> Tensor | None:
    r"""Return the Cholesky factor of :math:`A + d\,(\operatorname{tr} A / n)\,I`.

    A layer that has only zeros for inputs has the identity. The result is None if A is
    no second moment, or is not finite.
    """
    level = damping * A.diagonal(dim1=-2, dim2=-1).mean(-1)
    level = torch.where(level > 0, level, 1.0)[:, None, None]
    factor, info = torch.linalg.cholesky_ex(A + level * torch.eye(A.shape[-1]).to(A))
    return None if info.any() or not factor.isfinite().all() else factor


def solved(matrices: Tensor, factor: Tensor) -> Tensor:
    """Return the matrices times the inverse of what was factorised."""
    return torch.cholesky_solve(matrices.double().mT, factor).mT


def fedpm_mix(
    trained: Sequence[Params],
    layers: Sequence[Layers],
    weights: Sequence[float],
    *,
    damping: float,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    r"""Return FedPM's mixture of the clients' models, and its distance from the mean.

    .. math:: W = \Big(\sum_i p_i W_i A_i\Big) \Big(\sum_i p_i A_i\Big)^{-1}

    If no client has inputs in some direction, the inverse does not exist. So this
    solves for the step away from FedAvg's mean :math:`\bar W`,

    .. math:: W = \bar W + \Big(\sum_i p_i (W_i - \bar W) A_i\Big)
              \Big(\sum_i p_i A_i + \delta I\Big)^{-1}, \qquad
              \delta = \frac dn \operatorname{tr} \sum_i p_i A_i.

    Parameters without an A are averaged, and so are layers that cannot be solved.
    """
    mean, shares = weighted_mean(trained, weights), shares_of(weights)
    if any(own.keys() != layers[0].keys() for own in layers):
        raise ParamsError("clients have second moments of inputs of different layers")
    names = {n for k in layers[0].values() for n in (k.weight, k.bias) if n}
    wide = [double(params, names) for params in trained]
    center, correction = weighted_mean(wide, weights), dict[str, Tensor]()
    for name, layer in layers[0].items():
        moments = [own[name].A.double() for own in layers]
        middle = layer.as_matrices(center)
        pulls = [
            share * (layer.as_matrices(params) - middle) @ A
            for share, params, A in zip(shares, wide, moments, strict=True)
        ]
        gram = [share * A for share, A in zip(shares, moments, strict=True)]
        factor = damped_factor(torch.stack(gram).sum(0), damping)
        if factor is not None:
            correction |= layer.as_params(solved(torch.stack(pulls).sum(0), factor))
    mixed = {k: (center[k] + v).to(mean[k].dtype) for k, v in correction.items()}
    return finite({**mean, **mixed}, "the mixture"), correction


@dataclass(frozen=True)
class TrainedLayers(Payload):
    """A client's model, and the second moments of its layers' inputs."""

    params: Params
    layers: Layers

    def layout(self) -> tuple[str, ...]:
        """Return what two uploads must have alike to be used together."""
        return tuple(f"{name} {k.A.shape}" for name, k in self.layers.items())

    def to_arrays(self) -> ArrayRecord:
        """Return what is sent."""
        moments = {_INPUTS + name: k.A for name, k in self.layers.items()}
        return tensors_to_arrays({**self.params, **moments})

    @classmethod
    def from_arrays(cls, record: ArrayRecord, like: Params) -> "TrainedLayers":
        """Read what arrived for the parameters that were sent."""
        widths = {k: v[0].numel() + 1 for k, v in like.items() if v.dim() > 1}
        room = sum(8 * v.numel() + 4096 for v in like.values())
        limit = room + sum(8 * n**2 + 4096 for n in widths.values())
        tensors = arrays_to_tensors(record, limit=limit, most=2 * len(like))
        layers = {}
        for key in [key for key in tensors if key.startswith(_INPUTS)]:
            name, A = key.removeprefix(_INPUTS), tensors.pop(key)
            n = widths.get(name, 0)
            if A.dim() != 3 or A.shape[1:] not in {(n, n), (n - 1, n - 1)}:
                raise WireError("is no second moment of a layer's inputs", field=key)
            G = torch.eye(len(like[name]) // len(A)).to(A).expand(len(A), -1, -1)
            bias = bias_of(name, like) if A.shape[1] == n else None
            layers[name] = Kronecker(name, like[name].shape, A, G, bias)
        for key, value in like.items():
            if key not in tensors or tensors[key].shape != value.shape:
                raise WireError("is missing, or has another shape", field=key)
        return cls({key: tensors[key] for key in like}, layers)


@register_job("fedpm")
def fedpm_job(problem: LocalProblem, request: Request) -> Reply:
    r"""Train along :math:`\hat G (A + \delta I)^{-1}`; then measure A again.

    For the steps, A is measured over the client's whole data at the parameters that
    arrived. Momentum, weight decay and FedProx's term come after the preconditioner.
    """
    if not isinstance(problem.train_fn, LocalSGD):
        raise ClientError("FedPM needs train_fn=LocalSGD(...)")
    parameters, damping = problem.trainable(), float(request.options["damping"])
    layers, factors = _layers(problem), dict[str, Tensor]()
    for name, layer in layers.items():
        factor = damped_factor(layer.A.double(), damping)
        if factor is None:
            raise ClientError(
                f"the inputs of '{name}' cannot be inverted: lower lr, raise damping"
            )
        factors[name] = factor

    def precondition(epoch: int, step: int) -> None:
        gradients = {k: p.grad for k, p in parameters.items() if p.grad is not None}
        for name, layer in layers.items():
            direction = solved(layer.as_matrices(gradients), factors[name])
            for key, value in layer.as_params(direction).items():
                gradients[key].copy_(value)

    metrics = problem.train(request.config, on_gradients=precondition)
    upload = TrainedLayers(problem.state_like(request.params), _layers(problem))
    return Reply(metrics, upload.to_arrays())


def _layers(problem: LocalProblem) -> dict[str, Kronecker]:
    with seeded(0):  # training uses the same random numbers as FedAvg's
        return layer_inputs(problem.model, problem.train_batches)


class FedPM(CurvatureStrategy):
    r"""Ask for preconditioned training, and mix the models layer by layer.

    Parameters
    ----------
    damping : float, default 0.1
        :math:`\delta` of the local steps, as a share of A's mean eigenvalue. The
        paper's is absolute.
    mixing_damping : float, default 1e-3
        How strongly the mixture is drawn to FedAvg's mean.
    **kwargs
        :class:`CurvatureStrategy`'s.
    """

    def __init__(
        self, *, damping: float = 0.1, mixing_damping: float = 1e-3, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        check_positive("damping", damping)
        check_positive("mixing_damping", mixing_damping)
        self.damping, self.mixing_damping = damping, mixing_damping

    def exchanges(self, server_round: int) -> Sequence[Exchange[TrainedLayers]]:
        """Ask for a training."""
        request = {"job": "fedpm", "damping": self.damping}
        read = TrainedLayers.from_arrays
        return [Exchange(request, read, self._step, require_same_parameters=True)]

    def _step(
        self, state: ServerState, uploads: Sequence[Upload[TrainedLayers]]
    ) -> Step:
        params, correction = fedpm_mix(
            [upload.payload.params for upload in uploads],
            [upload.payload.layers for upload in uploads],
            [upload.num_examples for upload in uploads],
            damping=self.mixing_damping,
        )
        params = {name: params[name] for name in state.params}
        return Step(ServerState(params), {"mixing-norm": float(norm(correction))})

    def settings(self) -> dict[str, Any]:
        """Return the options that a resumed run must have alike."""
        return {"damping": self.damping, "mixing_damping": self.mixing_damping}
