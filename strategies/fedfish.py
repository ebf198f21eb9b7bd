"""FedFish: federated averaging, weighted by what each client's predictions hang on."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from flwr_fisher.errors import ConfigurationError, check_known, check_range
from flwr_fisher.merge import fedfish_average, make_optimizer, server_step
from flwr_fisher.params import Params, norm, select, subtract, weighted_mean
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.strategies.state import Exchange, ServerState, Step, Upload
from flwr_fisher.wire import Codec, FisherUpload, ProductUpload, get_codec, resolve

__all__ = ["FedFish"]

logger = logging.getLogger("flwr")

_SOURCES = ("extra-pass", "last-epoch")
_UPLOADS = ("fisher", "product")
_REDUCTIONS = ("sum", "mean")
_EPS = 1e-16  # products of a small Fisher and a small step are far below Adam's 1e-8


class FedFish(CurvatureStrategy):
    r"""Federated averaging weighted by Fisher information (Dhawan et al., TMLR 2024).

    Algorithm 1 of *Leveraging Function Space Aggregation for Federated Learning at
    Scale*: a round's clients train from :math:`\theta_G`, and the server takes, element
    by element, the pseudo-gradient

    .. math:: g = \frac{\sum_i n_i F_i\,(\theta_G - \theta_i)}{\sum_i n_i F_i}

    to a server optimiser; where no client has any Fisher, FedAvg's. :math:`F_i` is the
    sum of a client's squared mini-batch gradients at the end of its training (Algorithm
    2), which grows with :math:`n_i` as well; ``reduction="mean"`` takes their mean.

    Parameters
    ----------
    server_optimizer : str | Callable[[Iterable[nn.Parameter]], Optimizer]
        An optimiser of ``torch.optim`` by name, with its defaults, or what makes one
        of parameters. Default "sgd". Its state is kept over rounds, and in checkpoints.
    server_lr : float, default 1.0
        :math:`\eta_g`, of an optimiser by name.
    fisher_source : "extra-pass" | "last-epoch", default "extra-pass"
        ``last-epoch`` squares the gradients of the last local epoch while training, at
        no extra cost (Appendix A.5.1); the client's loop must be ``LocalSGD``.
    upload : "fisher" | "product", default "fisher"
        ``product``: clients upload :math:`F_i (\theta_G - \theta_i)` alone, FedAvg's
        bytes, and normalising is left to an adaptive server optimiser (section 5.3).
    reduction : "sum" | "mean", default "sum"
        Of a client's squared mini-batch gradients.
    codec, budget
        As for :class:`FedFisherOneShot`, with ``upload="fisher"``.
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
    ``num-zero-fishers``: how many clients' Fisher was zero everywhere, so that they
    count only where all are.

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
        server_lr: float = 1.0,
        fisher_source: str = "extra-pass",
        upload: str = "fisher",
        reduction: str = "sum",
        codec: str | Codec = "auto",
        budget: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_known("fisher_source", fisher_source, _SOURCES)
        check_known("upload", upload, _UPLOADS)
        check_known("reduction", reduction, _REDUCTIONS)
        check_range("server_lr", server_lr, 0)
        self.codec = get_codec(codec, budget)
        if upload == "product":
            if server_optimizer == "sgd":
                raise ConfigurationError(
                    "upload='product' needs an adaptive server_optimizer, which "
                    "normalises it: 'adam', for example, not 'sgd'"
                )
            if self.codec.scheme not in ("auto", "lossless"):
                raise ConfigurationError(
                    "upload='product' has FedAvg's bytes as it is: leave codec out"
                )
        self.fisher_source, self.upload, self.reduction = (
            fisher_source,
            upload,
            reduction,
        )
        self.server_optimizer, self.server_lr = server_optimizer, server_lr
        self._make_optimizer = make_optimizer(server_optimizer, server_lr)

    def exchanges(self, server_round: int) -> Sequence[Exchange]:
        """Ask every sampled client to train and to add its Fisher, or to multiply."""
        read = ProductUpload.from_arrays if self.upload == "product" else self._read
        return [Exchange(self._asked(), read)]

    def _asked(self) -> dict[str, str | int | float]:
        asked: dict[str, str | int | float] = {
            "structure": "diagonal",
            "expectation": "empirical-batch",
            "fisher-source": self.fisher_source,
            "fisher-reduction": self.reduction,
            "upload": self.upload,
        }
        return asked if self.upload == "product" else asked | self.codec.to_config()

    def _read(self, record: ArrayRecord, like: Params) -> FisherUpload:
        codec = resolve(self.codec, like)
        return FisherUpload.from_arrays(record, like, codec, structure="diagonal")

    def check(self, state: ServerState) -> None:
        """Refuse a budget that is too small for the model."""
        resolve(self.codec, state.params)

    def step(self, state: ServerState, uploads: Sequence[Upload]) -> Step:
        """Take one step of the server's optimiser on the pseudo-gradient."""
        weights = [upload.num_examples for upload in uploads]
        if self.upload == "product":
            gradient = weighted_mean([_products(u) for u in uploads], weights)
            fishers = [_products(u) for u in uploads]
        else:
            fishers = [u.posterior.curvature.diagonal() for u in uploads]
            deltas = [
                subtract(_double(state.params, F), _double(u.posterior.params, F))
                for u, F in zip(uploads, fishers, strict=True)
            ]
            gradient = fedfish_average(deltas, fishers, weights)
        averaged = weighted_mean([_buffers(u, gradient) for u in uploads], weights)
        stepped, extra = server_step(
            _double(state.params, gradient), gradient, state.extra, self._optimizer
        )
        params = {
            k: averaged[k] if k in averaged else stepped[k].to(v.dtype)
            for k, v in state.params.items()
        }
        zeros = [not any(v.any() for v in fisher.values()) for fisher in fishers]
        metrics: dict[str, int | float | list[float]] = {
            "num-zero-fishers": sum(zeros),
            "pseudo-gradient-norm": float(norm(gradient)),
        }
        return Step(ServerState(params, extra), metrics, gradient)

    def _optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = self._make_optimizer(parameters)
        if self.upload == "product" and isinstance(self.server_optimizer, str):
            for group in optimizer.param_groups:
                group.update({"eps": _EPS} if "eps" in group else {})
        return optimizer

    def options(self) -> dict[str, Any]:
        """Return what a resumed run must have in common."""
        asked = {f"client-{name}": value for name, value in self._asked().items()}
        made = self._optimizer([nn.Parameter(torch.zeros(()))])
        settings = {
            f"server-{key}": value
            for key, value in made.defaults.items()
            if isinstance(value, str | int | float | bool)
        }
        return super().options() | asked | {"server": type(made).__name__} | settings

    def summary(self) -> None:
        """Log the strategy's configuration."""
        logger.info("\t├──> Fisher: %s, %s", self.fisher_source, self.reduction)
        logger.info("\t├──> Upload: %s", self.upload)
        options = self.options()
        shown = {k: v for k, v in options.items() if k.startswith("server")}
        logger.info("\t├──> Server: %s", shown)
        super().summary()


def _double(params: Params, names: Iterable[str]) -> dict[str, Tensor]:
    """Return some parameters in float64, where a step away and back changes no bit."""
    return {k: v.double() for k, v in select(params, names).items()}


def _products(upload: Upload) -> dict[str, Tensor]:
    assert isinstance(upload.payload, ProductUpload)
    return upload.payload.products


def _buffers(upload: Upload, trained: Params) -> dict[str, Tensor]:
    payload = upload.payload
    if isinstance(payload, ProductUpload):
        return payload.buffers
    return {k: v for k, v in upload.posterior.params.items() if k not in trained}
