"""FedFisher: one-shot federated learning with Fisher information."""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from flwr_fisher.curvature import EXPECTATIONS, STRUCTURES, TOLERANCE
from flwr_fisher.errors import ConfigurationError, check_known, check_range
from flwr_fisher.merge import merge_fisher, merge_options
from flwr_fisher.merge.solvers import Score
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.strategies.state import Exchange, ServerState, Step, Upload

__all__ = ["FedFisherOneShot"]

logger = logging.getLogger("flwr")


class FedFisherOneShot(CurvatureStrategy):
    r"""Merge clients' models by their Fisher information, in one round or a few.

    FedFisher (Jhunjhunwala, Wang & Joshi, AISTATS 2024), Algorithm 1: clients train to
    the end and upload their parameters with their Fisher there; the server solves
    :math:`(\sum_i p_i F_i)\,\theta = \sum_i p_i F_i \theta_i`. More rounds repeat this
    from the merged model (the paper's Fig. 2). It starts from whatever arrays it is
    given, so a pre-trained model is merged in the same way.

    What deviates: the default solver is conjugate gradients with a relative anchor,
    which needs no data on the server; the paper's is ``solver="adam"`` with `score`.
    Clients are weighted by their numbers of examples.

    Parameters
    ----------
    structure : "kfac" | "diagonal" | "ekfac" | "block" | "dense", default "kfac"
        What clients upload beside their parameters.
    solver : "cg" | "closed-form" | "adam" | "gd", default "cg"
        See :func:`flwr_fisher.merge.merge_fisher`, as for the next ones.
    anchor, shrink, damping, balance : float, optional
        Regularisation of ``cg``.
    iterations : int, optional
        Of the solver, at most.
    expectation : str, default "exact"
        See :func:`flwr_fisher.curvature.fisher`, as for the next one.
    tolerance : float, default 1e-3
        Share of the Fisher that a client may leave out to save time.
    score : Callable[[dict[str, Tensor]], float], optional
        For ``adam``: scores merged parameters on the server's data.
    **kwargs
        :class:`CurvatureStrategy`'s: FedAvg's sampling keywords and ``seed``.

    Raises
    ------
    ConfigurationError
        If an argument is out of range, before any client trains.

    Notes
    -----
    ``CurvatureResult.details`` is the last round's
    :class:`~flwr_fisher.merge.MergeResult`. A round's metrics have
    ``solver-iterations``, ``solver-residual`` and ``client-share`` (each client's share
    of the curvature, in the clients' order).

    Examples
    --------
    ::

        strategy = FedFisherOneShot(structure="kfac", fraction_evaluate=0.0)
        result = strategy.start(grid, ArrayRecord(shared_state(model)), num_rounds=1)
    """

    def __init__(
        self,
        *,
        structure: str = "kfac",
        solver: str = "cg",
        anchor: float | None = None,
        shrink: float | None = None,
        damping: float | None = None,
        balance: float | None = None,
        iterations: int | None = None,
        expectation: str = "exact",
        tolerance: float = TOLERANCE,
        score: Score | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_known("structure", structure, STRUCTURES)
        check_known("expectation", expectation, EXPECTATIONS)
        check_range("tolerance", tolerance, 0, 1)
        self.tolerance = tolerance
        self.structure, self.expectation, self.score = structure, expectation, score
        self.merge = merge_options(
            solver,
            anchor=anchor,
            shrink=shrink,
            damping=damping,
            balance=balance,
            iterations=iterations,
        )
        if score is not None and solver != "adam":
            raise ConfigurationError(f"score is for solver='adam', not '{solver}'")
        if solver == "closed-form" and structure != "diagonal":
            raise ConfigurationError(
                f"solver='closed-form' needs structure='diagonal', not '{structure}'"
            )

    def exchanges(self, server_round: int) -> Sequence[Exchange]:
        """Ask every client to train and to add its Fisher."""
        return [Exchange(self._asked())]

    def _asked(self) -> dict[str, str | float]:
        return {
            "structure": self.structure,
            "expectation": self.expectation,
            "tolerance": self.tolerance,
        }

    def step(self, state: ServerState, uploads: Sequence[Upload]) -> Step:
        """Merge the uploads."""
        merged = merge_fisher(
            [upload.posterior for upload in uploads],
            **asdict(self.merge),
            score=self.score,
            progress=logger.info,
        )
        metrics: dict[str, int | float | list[float]] = {
            "solver-iterations": merged.iterations,
            "solver-residual": merged.residuals[-1],
            "client-share": merged.shares,
        }
        return Step(ServerState(merged.params), metrics, merged)

    def options(self) -> dict[str, Any]:
        """Return what a resumed run must have in common."""
        asked = {f"client-{name}": value for name, value in self._asked().items()}
        return super().options() | asked | asdict(self.merge)

    def summary(self) -> None:
        """Log the strategy's configuration."""
        logger.info("\t├──> Structure: %s (%s)", self.structure, self.expectation)
        options = ", ".join(f"{k} {v}" for k, v in asdict(self.merge).items())
        logger.info("\t├──> Merge: %s", options)
        super().summary()
