"""FedFish: federated averaging with each parameter weighted by the clients' Fishers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from flwr_fisher.errors import ConfigurationError, check_range, plain
from flwr_fisher.params import Params, double, norm, select, subtract, weighted_mean
from flwr_fisher.rounds import (
    FishOptions,
    fedfish_average,
    fedfish_quotient,
    make_optimizer,
    server_step,
)
from flwr_fisher.server.exchange import (
    Exchange,
    ServerState,
    Step,
    Summation,
    Uploads,
    weights_of,
)
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.strategies.exchanges.refinement import refinements
from flwr_fisher.wire import Additive, Codec, FisherUpload, resolve

_TRACE = 2.0  # the largest that counts, where honest clients' are 1 but for rounding
_OPTIMIZER = "optimizer"


class FedFish(CurvatureStrategy):
    r"""Federated averaging weighted by Fisher information (Dhawan et al., TMLR 2024).

    Algorithm 1 of *Leveraging Function Space Aggregation for Federated Learning at
    Scale*: a round's clients train from :math:`\theta_G`, and the server takes, element
    by element, the pseudo-gradient

    .. math:: g = \frac{\sum_i n_i F_i\,(\theta_G - \theta_i)}{\sum_i n_i F_i}

    and passes it to a server optimiser. In entries where every client's Fisher is zero,
    it takes FedAvg's pseudo-gradient. :math:`F_i` is the sum of a client's squared
    mini-batch gradients at the end of its training (Algorithm 2), so it grows with
    :math:`n_i`, too; ``reduction="mean"`` takes their mean. By default, `power` and
    `balance` then change :math:`F_i`; ``power=1, balance=0`` is the paper's method.

    Parameters
    ----------
    server_optimizer : str | Callable[[Iterable[nn.Parameter]], Optimizer]
        The name of an optimiser of ``torch.optim``, which then has its default options,
        or a function that makes an optimiser from parameters. Default "sgd". The
        optimiser's state is kept over rounds, and in checkpoints.
    server_lr : float, optional
        :math:`\eta_g`, the learning rate of an optimiser that is given by name; by
        default 1.
    fisher_source : "extra-pass" | "last-epoch", default "extra-pass"
        ``last-epoch`` squares the gradients of the last local epoch while training, at
        no extra cost (Appendix A.5.1); the client's loop must be ``LocalSGD``.
    reduction : "sum" | "mean", default "sum"
        Whether :math:`F_i` is the sum or the mean of a client's squared mini-batch
        gradients.
    power : float, default 0.5
        Each entry of a client's Fisher is raised to this power, in [0, 1]. The paper's
        is 1; with it, few clients decide most entries. With 0 all entries are equal,
        which is FedAvg.
    balance : float, default 1
        Each client's Fisher is then divided by this power, in [0, 1], of its trace.
        With 1, clients are weighted by their examples alone, and `reduction` changes
        nothing. With the paper's 0, a client's weight also depends on its loss: the
        worse it fits its data, the larger its weight. The defaults of `power` and
        `balance` were chosen on validation data (``benchmarks/fedfish.py``).
    codec
        As for :class:`FedFisherOneShot`.
    **kwargs
        :class:`CurvatureStrategy`'s: FedAvg's sampling keywords and ``seed``.

    Raises
    ------
    ConfigurationError
        If an argument is out of range, before any client trains.

    Notes
    -----
    Buffers are averaged. ``CurvatureResult.details`` is the last round's
    pseudo-gradient, by parameter. A round's metrics have ``pseudo-gradient-norm`` and
    ``num-zero-fishers``: how many clients' Fisher was zero everywhere. Such a client
    counts only in entries where every client's Fisher is zero. With ``secure=`` only
    the sum is known, and the number is 0 or 1.

    Examples
    --------
    ::

        strategy = FedFish(server_optimizer="adam", server_lr=1e-2, fraction_train=0.1)
        result = strategy.start(grid, ArrayRecord(shared_state(model)), num_rounds=100)
    """

    def __init__(
        self,
        *,
        server_optimizer: str
        | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = "sgd",
        server_lr: float | None = None,
        fisher_source: str = "extra-pass",
        reduction: str = "sum",
        power: float = 0.5,
        balance: float = 1.0,
        codec: str | Codec = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if isinstance(server_optimizer, str):
            server_lr = 1.0 if server_lr is None else server_lr
            check_range("server_lr", server_lr, 0)
        elif server_lr is not None:
            raise ConfigurationError(
                "server_lr is for a server_optimizer that is given by name: leave it "
                "out, and give the function its own"
            )
        self.fisher = FishOptions(
            fisher_source=fisher_source,
            reduction=reduction,
            power=power,
            balance=balance,
        )
        self.codec = Codec.of("codec", codec)
        if self.secure is not None and self.codec.name not in ("auto", "lossless"):
            raise ConfigurationError(
                f"codec={codec!r} does not go with secure=, because packed uploads "
                "cannot be summed: leave codec out"
            )
        self._make_optimizer = make_optimizer(
            server_optimizer, server_lr, name="server_optimizer"
        )

    def exchanges(self, server_round: int) -> Sequence[Exchange[Any]]:
        """Return one exchange: training, with the Fisher."""
        training: Exchange[Any] = Exchange(
            self._requested(), self._read, self._step, require_same_parameters=True
        )
        if self.secure is not None:
            read = Additive.reader("product", "fisher", "params")
            step, mean = self._step_of_sums, Summation[Additive]()
            training = replace(training, read=read, step=step, additive=mean)
        return [training, *refinements(self, server_round)]

    def _requested(self) -> dict[str, str | int | float]:
        """Return the options of the clients' job."""
        packing = {"upload": "sums"} if self.secure else self.codec.to_options()
        return {"job": "fedfish", **self.fisher.to_options(), **packing}

    def _read(self, record: ArrayRecord, like: Params) -> FisherUpload:
        codec = resolve(self.codec, like)
        return FisherUpload.from_arrays(record, like, codec, structure="diagonal")

    def check(self, state: ServerState) -> None:
        """Raise an error for a small budget, or parameters that no optimiser takes."""
        resolve(self.codec, state.params)
        floats = (v for v in state.params.values() if v.is_floating_point())
        self._make_optimizer([nn.Parameter(v.detach()) for v in floats])

    def _step(self, state: ServerState, uploads: Uploads[FisherUpload]) -> Step:
        """Return a step along the Fisher-weighted mean of the clients' updates."""
        fishers = [upload.payload.curvature.diagonal() for upload in uploads]
        parts = [1.0] * len(fishers)
        if self.fisher.balance == 1:  # then a client has divided its own by its trace
            parts = [min(1.0, _TRACE / max(1.0, _trace(F))) for F in fishers]
        trained = [upload.payload.params for upload in uploads]
        weights, gradient = weights_of(uploads), dict[str, Tensor]()
        # One parameter after another: its updates are in float64.
        for name, start in double(state.params, fishers[0]).items():
            deltas = [{name: start - params[name]} for params in trained]
            pairs = zip(fishers, parts, strict=True)
            of_name = [{name: F[name] if p == 1 else F[name] * p} for F, p in pairs]
            gradient |= fedfish_average(deltas, of_name, weights)
        return self._descend(state, gradient, fishers, trained, weights)

    def _step_of_sums(self, state: ServerState, uploads: Uploads[Additive]) -> Step:
        """Return a step along the quotient of two sums over all clients."""
        (mean,) = (upload.payload for upload in uploads)
        product, fisher, params = map(mean.part, ("product", "fisher", "params"))
        deltas = subtract(double(state.params, product), select(params, product))
        gradient = fedfish_quotient(product, fisher, deltas)
        return self._descend(state, gradient, [fisher], [params], weights_of(uploads))

    def _descend(
        self,
        state: ServerState,
        gradient: Params,
        fishers: Sequence[Params],
        trained: Sequence[Params],
        weights: Sequence[float],
    ) -> Step:
        """Return a step of the server's optimiser; what has no gradient is averaged."""
        stepped, kept = server_step(
            double(state.params, gradient),
            gradient,
            state.group(_OPTIMIZER),
            self._make_optimizer,
        )
        buffers = [
            {k: v for k, v in params.items() if k not in gradient} for params in trained
        ]
        averaged = weighted_mean(buffers, weights)
        params = {
            k: averaged[k] if k in averaged else stepped[k].to(v.dtype)
            for k, v in state.params.items()
        }
        zeros = [not any(v.any() for v in fisher.values()) for fisher in fishers]
        length = float(norm(gradient))
        metrics = {"num-zero-fishers": sum(zeros), "pseudo-gradient-norm": length}
        return Step(ServerState(params, {_OPTIMIZER: kept}), metrics, gradient)

    def settings(self) -> dict[str, Any]:
        """Return this strategy's own settings."""
        optimizer = self._make_optimizer([nn.Parameter(torch.zeros(1, 1))])
        server = {f"server-{key}": plain(n) for key, n in optimizer.defaults.items()}
        kinds = (str, int, float, bool, list)
        return {
            **{f"client-{name}": value for name, value in self._requested().items()},
            "server": type(optimizer).__name__,
            **{key: n for key, n in server.items() if isinstance(n, kinds)},
        }


def _trace(fisher: Params) -> float:
    return float(sum(entries.sum() for entries in fisher.values()))
