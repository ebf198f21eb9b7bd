"""FedFisher: one-shot federated learning with Fisher information.

Long: a third of it is the docstring of a strategy with many options.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, ClassVar

import torch
from flwr.app import ArrayRecord

from flwr_fisher.curvature import FisherOptions
from flwr_fisher.curvature.structures import STRUCTURES
from flwr_fisher.devices import default_device, usable_device
from flwr_fisher.errors import (
    ConfigurationError,
    check_known,
    check_number,
    given,
    plain,
)
from flwr_fisher.log_lines import Progress, logger
from flwr_fisher.merge import (
    DiagonalSums,
    MergeOptions,
    MergeResult,
    fedfisher_from_sums,
)
from flwr_fisher.merge.fedfisher import merge_posteriors
from flwr_fisher.merge.options import Report, Score, check_score
from flwr_fisher.params import Params
from flwr_fisher.server.exchange import (
    Exchange,
    Groups,
    ServerState,
    Step,
    Summation,
    Uploads,
)
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.strategies.exchanges.kfac_sums import KfacSums, run_group
from flwr_fisher.strategies.exchanges.norm_statistics import norm_exchanges
from flwr_fisher.wire import (
    LOSSLESS,
    REGRESSION,
    Additive,
    Codec,
    FisherUpload,
    RunningMean,
    resolve,
)
from flwr_fisher.wire.additive import SUMS

_Options = dict[str, str | int | float]


class FedFisherOneShot(CurvatureStrategy):
    r"""Merge clients' models by their Fisher information, in one round or a few.

    FedFisher (Jhunjhunwala, Wang & Joshi, AISTATS 2024), Algorithm 1: clients train to
    the end and upload their parameters and the Fisher at these parameters; the server
    solves :math:`(\sum_i p_i F_i)\,\theta = \sum_i p_i F_i \theta_i`. More rounds
    repeat this from the merged model (the paper's Fig. 2). It starts from the arrays
    that you give, so a pre-trained model is merged in the same way.

    Differences from the paper: the default solver is preconditioned conjugate gradients
    with a relative anchor, which need no data on the server. The paper's solver is
    ``solver="adam"`` with `score`. A client's weight is its number of examples, divided
    by the root of its Fisher's size (`balance`), so that a large Fisher has less
    influence. The weight is even lower if the Fisher predicts an unusually large rise
    of the client's loss at the mean (`robust`). From the second round on, the merge
    shortens a layer's move from the mean if it is longer than is usual between the
    clients (`trust`). In a regression the solver takes only one iteration: if each
    layer were solved to the end, the layers' steps would together be too large. (With
    ``aggregate="sums"`` the server does not know what the task is.)

    Parameters
    ----------
    structure : "kfac" | "diagonal", default "kfac"
        What clients upload beside their parameters.
    solver : "pcg" | "cg" | "closed-form" | "adam" | "gd", optional
        Short for ``merge=MergeOptions(solver=…)``.
    fisher : FisherOptions, optional
        How clients compute their Fishers: from how many examples, over which labels, …;
        see :class:`flwr_fisher.curvature.FisherOptions`.
    merge : MergeOptions, optional
        How the server merges: the solver, regularisation and the clients' weights; see
        :class:`flwr_fisher.merge.MergeOptions`.
    codec : "auto" | "fedavg" | "lossless" | Codec, default "auto"
        How uploads are packed: at FedAvg's size (``fedavg``),
        or not at all (``lossless``). ``auto`` is ``fedavg``, and ``lossless`` for a
        model so small that headers outweigh it. ``Codec("fedavg", budget=0.75)`` packs
        into another share of FedAvg's upload.
    aggregate : "parts" | "sums", default "parts"
        ``parts``: the merge takes each client's model and Fisher. ``sums``: it takes
        only weighted means over the clients. With `secure` the server does not see what
        a single client adds to them; without it, it does. For ``kfac`` a round has one
        training and 2 + `iterations` requests: one for models, one for layers' partial
        traces with the right-hand side, and one in each iteration for a product
        (``flwr_fisher.merge.sums_solver``). For ``diagonal`` it has one request, for
        :math:`n_i`, :math:`n_i\theta_i`, :math:`n_iF_i` and :math:`n_iF_i\theta_i`.
        Uploads are not packed. A client's weight is its number of examples; with
        ``kfac`` this is divided by its Fisher's trace to the power `balance`, here 1 by
        default. `robust`, `max_share` and `trust` need more than sums.
    score : Callable[[dict[str, Tensor]], float], optional
        For ``adam``: scores merged parameters on the server's data. To be sure that it
        works, the server also calls it once with the model before clients train.
    device : torch.device | str, optional
        Where the server merges clients' parts; by default on the GPU, if there is one.
        Sums are merged on the CPU.
    norm_statistics : "refresh" | "average", optional
        As for :class:`CurvatureStrategy`, but ``refresh`` by default.
        With averaged statistics, a merged network with batch norm can be far
        worse than it has to be (:doc:`/pretrained`).
    **kwargs
        :class:`CurvatureStrategy`'s: FedAvg's sampling keywords and ``seed``. With
        ``aggregate="parts"``, `policy`'s `max_curvature` has no effect: use
        ``MergeOptions(max_share=)``.

    Raises
    ------
    ConfigurationError
        If an argument is out of range, before any client trains.

    Notes
    -----
    ``CurvatureResult.details`` is the last round's
    :class:`~flwr_fisher.merge.MergeResult`. A round's metrics have
    ``solver-iterations``, ``solver-residual``, ``solver-fallbacks`` (how many
    parameters stayed at the clients' mean because their system was not solved; a
    warning names them) and ``client-share`` (each client's share of the curvature, in
    the clients' order; not with ``aggregate="sums"``).

    Examples
    --------
    ::

        strategy = FedFisherOneShot(structure="kfac", fraction_evaluate=0.0)
        result = strategy.start(grid, ArrayRecord(shared_state(model)), num_rounds=1)
    """

    grouped: ClassVar[Mapping[str, str]] = {
        **{f.name: f"fisher=FisherOptions({f.name}=…)" for f in fields(FisherOptions)},
        **{name: f"merge=MergeOptions({name}=…)" for name in MergeOptions.names()},
    }

    def __init__(
        self,
        *,
        structure: str = "kfac",
        solver: str | None = None,
        fisher: FisherOptions | None = None,
        merge: MergeOptions | None = None,
        codec: str | Codec = "auto",
        aggregate: str = "parts",
        score: Score | None = None,
        device: torch.device | str | None = None,
        norm_statistics: str = "refresh",
        **kwargs: Any,
    ) -> None:
        super().__init__(norm_statistics=norm_statistics, **kwargs)
        self.device = default_device()
        if device is not None:
            self.device = usable_device(device, "merge on the CPU, device='cpu'")
        check_known("aggregate", aggregate, ("parts", "sums"))
        fisher = given("fisher", fisher, FisherOptions)
        merge = MergeOptions.of("merge", merge)
        merge = merge if solver is None else replace(merge, solver=solver)
        check_known("structure", structure, STRUCTURES)
        self.structure, self.fisher = structure, fisher.for_structure(structure)
        self.codec, self.score = Codec.of("codec", codec), score
        self.aggregate = aggregate
        self.merge = merge.for_sums(structure) if aggregate == "sums" else merge
        self._filled = self.merge.filled()  # `check` has the model's own defaults
        if aggregate == "parts" and self._filled.max_share < 1:
            # The merge limits each client's share of a layer's curvature.
            self.policy = replace(self.policy, max_curvature=math.inf)
        check_score(score, merge.solver)
        if merge.solver == "closed-form" and structure != "diagonal":
            raise ConfigurationError(
                f"solver='closed-form' needs structure='diagonal', not '{structure}'"
            )
        if aggregate == "sums":
            self._check_sums()

    def _check_sums(self) -> None:
        """Raise an error for options that do not work with sums."""
        needs = "aggregate='sums' needs"
        if self.structure == "kfac" and self.merge.solver != "pcg":
            raise ConfigurationError(
                f"{needs} solver='pcg' for structure='kfac', not '{self.merge.solver}'"
            )
        if self.codec.name not in ("auto", "lossless"):
            raise ConfigurationError(
                f"{needs} codec='lossless', since packed uploads cannot be summed"
            )
        self.check_weighted_by_examples("aggregate='sums'")
        self.codec = LOSSLESS

    def exchanges(self, server_round: int) -> Sequence[Exchange[Any]]:
        """Return a round's exchanges.

        One request for models with their Fishers (`parts`), or several for sums
        (`sums`).
        """
        own = self._requested()
        if self.aggregate == "parts":
            return [self._of_uploads(server_round, own), *norm_exchanges(self)]
        if self.structure == "kfac":
            merge, keep_all = self._filled, self.policy.limits
            sums = KfacSums(merge, own, keep_all, step_of).exchanges()
            return [*sums, *norm_exchanges(self)]
        return [self._of_diagonal_sums(own), *norm_exchanges(self)]

    def _of_uploads(self, server_round: int, own: _Options) -> Exchange[Any]:
        # A first merge has no usual length of moves, which `trust` could limit.
        trust = math.inf if server_round == 1 else self.merge.trust
        step = partial(self._merge_uploads, replace(self.merge, trust=trust))
        return Exchange(own, self._read, step, require_same_parameters=True)

    def _of_diagonal_sums(self, own: _Options) -> Exchange[Any]:
        options = own | {"job": "diagonal-sums"}
        total = Additive.reader(*SUMS, of_one=False)
        mean = Summation[Additive](
            read=total, total=RunningMean(), keep_all=self.policy.limits
        )
        read, step = Additive.reader(*SUMS), self._step_from_sums
        return Exchange(
            options, read, step, require_same_parameters=True, additive=mean
        )

    def initial_groups(self) -> Groups:
        """Return the run's number, if clients keep their Fishers under it."""
        kept = self.aggregate == "sums" and self.structure == "kfac"
        return run_group() if kept else {}

    def _requested(self) -> _Options:
        return {
            "structure": self.structure,
            **self.fisher.to_options(),
            **self.codec.to_options(),
        }

    def _read(self, record: ArrayRecord, like: Params) -> FisherUpload:
        codec = resolve(self.codec, like)
        return FisherUpload.from_arrays(record, like, codec, structure=self.structure)

    def check(self, state: ServerState) -> None:
        """Raise an error if the model does not fit the budget.

        Also if `score` returns something else than a number for it.
        """
        if self.score is not None:
            check_number("score's result", plain(self.score(dict(state.params))))
        self._filled = self.merge.filled(state.params)
        codec = resolve(self.codec, state.params)
        if self.codec.name == "auto" and codec == LOSSLESS:
            logger.info(
                "codec='auto': the model is small, so clients send lossless uploads"
            )

    def _merge_uploads(
        self, merge: MergeOptions, state: ServerState, uploads: Uploads[FisherUpload]
    ) -> Step:
        """Return the step to the merge of the uploads."""
        regressions = sum(bool(u.metrics.get(REGRESSION)) for u in uploads)
        by_default = merge.solver == "pcg" and merge.iterations is None
        if by_default and 2 * regressions > len(uploads):
            merge = replace(merge, iterations=1)
        posteriors = [u.payload.posterior(u.num_examples) for u in uploads]
        merged = merge_posteriors(
            posteriors,
            merge,
            score=self.score,
            progress=_progress_of_merge(),
            device=self.device,
        )
        return step_of(merged)

    def _step_from_sums(self, state: ServerState, uploads: Uploads[Additive]) -> Step:
        """Return the step to the merge of the uploads' means."""
        (upload,) = uploads
        parts = [dict(upload.payload.part(name)) for name in SUMS]
        return self._merge_sums(state, DiagonalSums(*parts))

    def _merge_sums(self, state: ServerState, sums: DiagonalSums) -> Step:
        merged = fedfisher_from_sums(
            sums,
            like=state.params,
            score=self.score,
            progress=_progress_of_merge(),
            **self.merge.settings(),
        )
        return step_of(merged)

    def settings(self) -> dict[str, Any]:
        """Return this strategy's own settings."""
        return self._settings(self._filled.settings())

    def used_settings(self) -> dict[str, Any]:
        """Return the settings that the solver uses, with its defaults."""
        merge = self._filled.settings()
        return self._settings({k: v for k, v in merge.items() if v is not None})

    def _settings(self, merge: dict[str, Any]) -> dict[str, Any]:
        wanted = {f"client-{name}": n for name, n in self._requested().items()}
        own: dict[str, Any] = {"aggregate": self.aggregate}
        own |= {} if self.score is None else {"score": "given"}
        return wanted | merge | own


def _progress_of_merge() -> Report:
    """Return a function that logs the progress of a long merge."""
    progress = Progress("merging")

    def report(text: str) -> None:
        if progress.due:
            progress.tell(text)

    return report


def step_of(merged: MergeResult) -> Step:
    """Return the step to a merged model; log how its systems were solved.

    Warn about parameters whose system was not solved.
    """
    solver, stops = "sums", ""
    if (options := merged.options) is not None:
        solver = options.solver
        if solver == "pcg" and merged.iterations == options.iterations:
            stops = f"; it stops there by design (iterations={options.iterations})"
    logger.info(
        "merged by %s: %d iterations left %.1e of the residual%s",
        solver,
        merged.iterations,
        merged.residuals[-1],
        stops,
    )
    if merged.unsolved:
        logger.warning(
            "the merge's solver failed for %s: these parameters are the clients' "
            "mean, as in FedAvg",
            ", ".join(merged.unsolved),
        )
    metrics = {
        "solver-iterations": merged.iterations,
        "solver-residual": merged.residuals[-1],
        "solver-fallbacks": len(merged.unsolved),
    }
    shares = {"client-share": merged.shares} if merged.shares else {}
    return Step(ServerState(merged.params), {**metrics, **shares}, merged)
