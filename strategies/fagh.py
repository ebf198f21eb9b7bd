"""FAGH: server steps along Newton's direction, from one row of the Hessian."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.curvature.second_order import random_probe
from flwr_fisher.errors import ConfigurationError, check_known
from flwr_fisher.params import Params, dot, double, flatten, norm
from flwr_fisher.randomness import derive_seed
from flwr_fisher.rounds import FaghMoments, fagh_step
from flwr_fisher.server.exchange import (
    Exchange,
    Groups,
    ServerState,
    Step,
    Summation,
    Uploads,
    mean_vector,
)
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.strategies.exchanges.refinement import refinements
from flwr_fisher.wire import Additive

_PROBES = ("first", "random", "momentum", "none")
# groups of the state's tensors
_GRADIENT, _PRODUCT, _DIRECTION = "gradient-moment", "hvp-moment", "direction"
_COUNTERS = "counters"


class FAGH(CurvatureStrategy):
    r"""Newton's direction from one row of the global Hessian (Sen, Qin & Mohan).

    *FAGH: Accelerating Federated Learning with Approximated Global Hessian*, Algorithm
    1. A round's clients report :math:`g_i`, the gradient of their whole loss at
    :math:`\theta`, and :math:`v_i = H_i u`; they do not train. From the means over the
    cohort the server keeps moments, G of the gradients and V of the rows, and steps

    .. math:: \theta \leftarrow \theta - \eta (H + \rho I)^{-1} G,
              \qquad H = V V^\top / u^\top V

    (eq. 6, where :math:`u = e_1`); see :func:`flwr_fisher.rounds.fagh_step`. If
    :math:`u^\top V` is not positive, or is only rounding, the step is along
    :math:`G / \rho`, and the metrics count it. (It is only rounding, for example, if
    the first weight is that of an image's black corner.)

    Parameters
    ----------
    lr : float, default 1.0
        :math:`\eta`.
    rho : float, default 0.1
        :math:`\rho`. The paper takes 1, 0.5, 0.1, 0.01 and 0.001.
    betas : tuple[float, float], optional
        :math:`\beta_1, \beta_2` of the moments. Default: the paper's (0.9, 0.99), but
        (0.9, 0) with ``probe="momentum"``, where :math:`u` changes: a mean of products
        :math:`H u` with different :math:`u` is no product with any of them.
    probe : "first" | "random" | "momentum" | "none", default "first"
        :math:`u`, of length 1. ``first``: the first trained coordinate, as in the
        paper. ``random``: one direction for the whole run, which server and clients
        draw from `seed` for themselves. ``momentum``: the last step's direction, or in
        the first round a random one. The server sends it with the model, so a download
        has twice FedAvg's bytes. ``none``: H = 0, so that steps are along
        :math:`G / \rho`, with momentum alone; for comparison. An upload is half as
        large.
    train_mode : bool, default False
        Let clients differentiate the model in train mode: with dropout, and each batch
        normalised by its own statistics, as their loaders make batches. Use it for
        networks with batch norms that are not trained yet. The new model's statistics
        are then measured after each step (``norm_statistics="refresh"``, which costs
        one forward pass).
    **kwargs
        :class:`CurvatureStrategy`'s: FedAvg's sampling keywords and ``seed``.

    Raises
    ------
    ConfigurationError
        If an argument is out of range, before any client computes; if `train_mode` is
        given another ``norm_statistics`` than ``refresh``; or if a strategy with the
        momentum probe begins at a later round and lacks the last step's direction.

    Notes
    -----
    Clients differentiate ``FisherClient``'s `loss_fn`, and are weighted by their
    examples. If the rate is too large, ``train_loss`` grows, and in the end clients'
    gradients are NaN: lower `lr`, or raise `rho`. By default models are differentiated
    in eval mode, with their batch norms' running statistics, and buffers stay as they
    are.
    ``CurvatureResult.details`` is the last step's direction, by parameter. A round's
    metrics have ``gradient-norm`` of the mean gradient, ``curvature``
    (:math:`u^\top V`), ``fell-back`` (1 if this round's step was along
    :math:`G / \rho`, or else 0) and ``fallbacks`` (how many were, so far).

    Examples
    --------
    ::

        strategy = FAGH(lr=0.1, rho=0.5, fraction_train=0.4)
        result = strategy.start(grid, ArrayRecord(shared_state(model)), num_rounds=100)
    """

    moves_norms = False  # clients do not upload any statistics

    def __init__(
        self,
        *,
        lr: float = 1.0,
        rho: float = 0.1,
        betas: tuple[float, float] | None = None,
        probe: str = "first",
        train_mode: bool = False,
        **kwargs: Any,
    ) -> None:
        if train_mode:
            kwargs.setdefault("norm_statistics", "refresh")
        super().__init__(**kwargs)
        check_known("probe", probe, _PROBES)
        if train_mode and self.norm_statistics != "refresh":
            raise ConfigurationError(
                "train_mode=True needs norm_statistics='refresh', its default: clients "
                "have no statistics of the model after a step that could be averaged"
            )
        default = (0.9, 0.0 if probe == "momentum" else 0.99)
        self.betas = default if betas is None else betas
        self.lr, self.rho, self.probe = lr, rho, probe
        self.train_mode = train_mode
        self._probe_seed = derive_seed(self.seed, "probe")  # clients use the same
        # a step by zero, for its checks
        fagh_step({}, {}, {}, 0.0, None, **self._numbers())

    def may_skip(self, server_round: int) -> bool:
        """Return whether a run can skip a round.

        With the probe ``"momentum"``, later rounds need the direction of round 1.
        """
        return self.probe != "momentum" or server_round > 1

    def exchanges(self, server_round: int) -> Sequence[Exchange[Additive]]:
        """Return one exchange: for gradients, and Hessian products with the probe."""
        options: dict[str, Any] = {"job": "gradient", "train-mode": self.train_mode}
        read: Callable[[ArrayRecord, Params], Additive] = Additive.reader("gradient")
        has_last = self.probe == "momentum" and server_round > 1
        if self.probe != "none":
            # Round 1 has no last direction: the momentum's first probe is random.
            drawn = self.probe == "momentum" and not has_last
            options["job"], read = "probe", _read
            options["probe"] = "random" if drawn else self.probe
            options["probe-seed"] = self._probe_seed
        exchange = Exchange(options, read, self._step, additive=Summation())
        exchange = replace(exchange, require_same_parameters=True)
        if has_last:
            exchange = replace(exchange, send=_send)
        return [exchange, *refinements(self, server_round)]

    def _step(self, state: ServerState, uploads: Uploads[Additive]) -> Step:
        """Return a step along Newton's direction, with updated moments."""
        gradient = mean_vector(uploads, "gradient")
        if self.probe == "none":
            product = {k: torch.zeros_like(v) for k, v in gradient.items()}
            along = torch.zeros((), dtype=torch.float32)
        else:
            product = mean_vector(uploads, "hvp")
            along = self._along(state, product)
        moments, fallbacks = _memory(state)
        step = fagh_step(
            state.params, gradient, product, along, moments, **self._numbers()
        )
        fell_back = int(step.fell_back and self.probe != "none")
        groups = _groups(step.moments, fallbacks + fell_back)
        if self.probe == "momentum":
            groups[_DIRECTION] = step.direction
        metrics = {
            "curvature": step.curvature,
            "fallbacks": fallbacks + fell_back,
            "fell-back": fell_back,
            "gradient-norm": float(norm(double(gradient))),
        }
        return Step(ServerState(step.params, groups), metrics, step.direction)

    def _along(self, state: ServerState, product: Params) -> Tensor:
        """Return u^T V, for the probe u and the mean product V = H u."""
        if self.probe == "first":
            return flatten(product)[0]
        probe = _last_direction(state) or random_probe(product, self._probe_seed)
        return dot(double(probe), double(product))

    def _numbers(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("lr", "rho", "betas")}

    def settings(self) -> dict[str, Any]:
        """Return this strategy's own settings."""
        options = {"probe": self.probe, "train_mode": self.train_mode}
        return {**self._numbers(), "betas": list(self.betas), **options}


def _read(record: ArrayRecord, like: Params) -> Additive:
    """Read an upload, and keep its parameters in the order of their arrival.

    The probe ``first`` is the first coordinate of the client's first parameter.
    """
    upload = Additive.from_arrays(record, like, parts=("gradient", "hvp"))
    start, parts = "hvp/", upload.parts.items()
    order = [key.removeprefix(start) for key in record if key.startswith(start)]
    return Additive({part: {k: v[k] for k in order} for part, v in parts})


def _send(state: ServerState) -> Groups:
    return {"probe": _last_direction(state)}


def _last_direction(state: ServerState) -> dict[str, Tensor]:
    """Return the last step's direction with length 1, or 0 if there was no step."""
    last = state.group(_DIRECTION)
    length = float(norm(double(last))) if last else 0.0
    return {k: (v.double() / (length or 1.0)).to(v.dtype) for k, v in last.items()}


def _memory(state: ServerState) -> tuple[FaghMoments | None, int]:
    """Return the moments, and the number of fallbacks."""
    if not (counters := state.group(_COUNTERS)):
        return None, 0
    moments = FaghMoments(
        dict(state.group(_GRADIENT)),
        dict(state.group(_PRODUCT)),
        float(counters["curvature"]),
        int(counters["steps"]),
    )
    return moments, int(counters["fallbacks"])


def _groups(moments: FaghMoments, fallbacks: int) -> dict[str, Params]:
    """Return the state's groups after a step, for :func:`_memory`."""
    counters = {
        "curvature": torch.tensor(moments.curvature, dtype=torch.float64),
        "steps": torch.tensor(moments.steps),
        "fallbacks": torch.tensor(fallbacks),
    }
    return {_GRADIENT: moments.gradient, _PRODUCT: moments.hvp, _COUNTERS: counters}
