"""FAGH: Newton's direction from one row of the Hessian."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.curvature.random_probe import random_probe
from flwr_fisher.errors import ConfigurationError, check_known
from flwr_fisher.merge import fagh_step
from flwr_fisher.params import Params, dot, flatten, norm, weighted_mean
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.strategies.state import Exchange, ServerState, Step, Upload
from flwr_fisher.wire import VectorUpload

__all__ = ["FAGH"]

logger = logging.getLogger("flwr")

_PROBES = ("first", "random", "momentum", "none")
_DIRECTION = "fagh/direction/"
_STEPS, _FALLBACKS = "fagh/steps", "fagh/fallbacks"


class FAGH(CurvatureStrategy):
    r"""Newton's direction from one row of the global Hessian (Sen, Qin & Mohan).

    *FAGH: Accelerating Federated Learning with Approximated Global Hessian*, Algorithm
    1. A round's clients report :math:`g_i`, the gradient of their whole loss at
    :math:`\theta`, and :math:`v_i = H_i u`; they do not train. From the means over the
    cohort the server keeps moments, G of the gradients and V of the rows, and steps

    .. math:: \theta \leftarrow \theta - \eta (H + \rho I)^{-1} G,
              \qquad H = V V^\top / u^\top V

    (eq. 6, where :math:`u = e_1`); see :func:`flwr_fisher.merge.fagh_step`. Where
    :math:`u^\top V` is not positive, or no more than rounding (the first weight sees an
    image's black corner), the step is along :math:`G / \rho`, and counted.

    Parameters
    ----------
    lr : float, default 1.0
        :math:`\eta`.
    rho : float, default 0.1
        :math:`\rho`; the paper's are 1, 0.5, 0.1, 0.01 and 0.001.
    betas : tuple[float, float], optional
        :math:`\beta_1, \beta_2` of the moments. Default: the paper's (0.9, 0.99), and
        (0.9, 0) where the probe moves, since a mean over the :math:`H u` of different
        :math:`u` is a row of nothing.
    probe : "first" | "random" | "momentum" | "none", default "first"
        :math:`u`, of length 1. ``first``: the first trained coordinate, as in the
        paper. ``random``: one direction for the whole run, which server and clients
        draw from `seed` for themselves. ``momentum``: the last step's direction, which
        the server sends beside the model, twice FedAvg's bytes down; ``random`` in the
        first round. ``none``: H = 0, momentum alone along :math:`G / \rho`, for
        comparison; half the upload.
    epsilon : float, default 1e-6
        The cosine of the angle between :math:`u` and V up to which there is no usable
        curvature.
    **kwargs
        :class:`CurvatureStrategy`'s: FedAvg's sampling keywords and ``seed``.

    Raises
    ------
    ConfigurationError
        If an argument is out of range, before any client computes; or if a strategy
        with the momentum probe joins in a later round without the last step's
        direction.

    Notes
    -----
    Clients differentiate ``FisherClient``'s `loss_fn`, and are weighted by their
    examples. A rate that is too large shows in ``train_loss``, and in the end in
    clients' gradients that are NaN: lower `lr`, or raise `rho`. Buffers stay as they
    are: models are evaluated in eval mode, with their batch norms' running statistics.
    ``CurvatureResult.details`` is the last step's direction, by parameter. A round's
    metrics have ``gradient-norm`` of the mean gradient, ``curvature``
    (:math:`u^\top V`), ``fell-back`` (0 or 1) and ``fallbacks``, those so far.

    Examples
    --------
    ::

        strategy = FAGH(lr=0.1, rho=0.5, fraction_train=0.4)
        result = strategy.start(grid, ArrayRecord(shared_state(model)), num_rounds=100)
    """

    def __init__(
        self,
        *,
        lr: float = 1.0,
        rho: float = 0.1,
        betas: tuple[float, float] | None = None,
        probe: str = "first",
        epsilon: float = 1e-6,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_known("probe", probe, _PROBES)
        default = (0.9, 0.0 if probe == "momentum" else 0.99)
        self.betas = default if betas is None else betas
        self.lr, self.rho, self.probe, self.epsilon = lr, rho, probe, epsilon
        # A step of nothing, for its checks.
        fagh_step({}, {}, {}, 0.0, {}, t=1, **self._numbers())

    def exchanges(self, server_round: int) -> Sequence[Exchange]:
        """Ask for gradients, and for the Hessian's products with the probe."""
        if self.probe == "none":
            return [Exchange({"task": "gradient"}, VectorUpload.reader("gradient"))]
        moves = self.probe == "momentum" and server_round > 1
        asked = {
            "task": "probe",
            "probe": "random" if self.probe == "momentum" and not moves else self.probe,
        }
        return [Exchange(asked, _read, self._send if moves else lambda state: {})]

    def _send(self, state: ServerState) -> Params:
        direction = _last_direction(state)
        if not direction:
            raise ConfigurationError(
                "probe='momentum' needs the last step's direction after round 1, and "
                "this strategy has made no step: begin at round 1, or resume a run of "
                "`start` from its checkpoint_dir"
            )
        return {f"probe/{name}": value for name, value in direction.items()}

    def step(self, state: ServerState, uploads: Sequence[Upload]) -> Step:
        """Update the moments, and step along Newton's direction."""
        weights = [upload.num_examples for upload in uploads]
        gradient = weighted_mean([_vector(u, "gradient") for u in uploads], weights)
        if self.probe == "none":
            product = {k: torch.zeros_like(v) for k, v in gradient.items()}
            along = torch.zeros(())
        else:
            product = weighted_mean([_vector(u, "hvp") for u in uploads], weights)
            along = self._along(state, product)
        before = _count(state, _STEPS)
        step = fagh_step(
            state.params,
            gradient,
            product,
            along,
            state.extra,
            t=before + 1,
            **self._numbers(),
        )
        fell_back = int(step.fell_back and self.probe != "none")
        fallbacks = _count(state, _FALLBACKS) + fell_back
        extra = step.moments | {
            _STEPS: torch.tensor(before + 1),
            _FALLBACKS: torch.tensor(fallbacks),
        }
        if self.probe == "momentum":
            extra |= {_DIRECTION + k: v for k, v in step.direction.items()}
        metrics: dict[str, int | float | list[float]] = {
            "curvature": step.curvature,
            "fallbacks": fallbacks,
            "fell-back": fell_back,
            "gradient-norm": float(norm(_double(gradient))),
        }
        return Step(ServerState(step.params, extra), metrics, step.direction)

    def _along(self, state: ServerState, product: Params) -> Tensor:
        """Return the probe's inner product with the Hessian's product with it."""
        if self.probe == "first":
            return flatten(product)[0]
        probe = _last_direction(state) or random_probe(product, self.seed)
        return dot(_double(probe), _double(product))

    def _numbers(self) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "rho": self.rho,
            "betas": self.betas,
            "epsilon": self.epsilon,
        }

    def options(self) -> dict[str, Any]:
        """Return what a resumed run must have in common."""
        own = self._numbers() | {"betas": list(self.betas), "probe": self.probe}
        return super().options() | own

    def summary(self) -> None:
        """Log the strategy's configuration."""
        logger.info("\t├──> Probe: %s", self.probe)
        logger.info("\t├──> Step: %s", self._numbers())
        super().summary()


def _read(record: ArrayRecord, like: Params) -> VectorUpload:
    """Read an upload in the client's order, whose first parameter has the probe."""
    names = ("gradient", "hvp")
    upload = VectorUpload.from_arrays(record, like, names=names, with_params=False)
    start = "hvp/"
    order = [key.removeprefix(start) for key in record if key.startswith(start)]
    return VectorUpload(
        {name: {k: v[k] for k in order} for name, v in upload.vectors.items()}
    )


def _vector(upload: Upload, name: str) -> dict[str, Tensor]:
    assert isinstance(upload.payload, VectorUpload)
    return upload.payload.vectors[name]


def _last_direction(state: ServerState) -> dict[str, Tensor]:
    """Return the last step's direction at length 1 (or 0, where it is nothing)."""
    found = {
        key.removeprefix(_DIRECTION): value
        for key, value in state.extra.items()
        if key.startswith(_DIRECTION)
    }
    length = float(norm(_double(found))) if found else 0.0
    return {k: (v.double() / (length or 1.0)).to(v.dtype) for k, v in found.items()}


def _count(state: ServerState, key: str) -> int:
    return int(state.extra[key]) if key in state.extra else 0


def _double(params: Params) -> dict[str, Tensor]:
    return {name: value.double() for name, value in params.items()}
