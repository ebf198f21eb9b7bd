"""FedFisher: one-shot federated learning with Fisher information.

Long: a third of it is the docstring of a strategy with many options.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
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
    MergeSettings,
    matched,
    sums_settings,
)
from flwr_fisher.merge.fedfisher import merge_posteriors
from flwr_fisher.merge.matching import RENUMBERED, check_matching
from flwr_fisher.merge.options import Report, Score, check_score
from flwr_fisher.merge.sums import merge_from_sums
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
    solver : "pcg" | "cg" | "closed-form" | "adam" | "gd", default "pcg"
        See :func:`flwr_fisher.merge.fedfisher`.
    fisher : FisherOptions, optional
        How clients compute their Fishers: from how many examples, over which labels, …;
        see :class:`flwr_fisher.curvature.FisherOptions`.
    merge : MergeOptions, optional
        How the server merges: regularisation, the clients' weights, robust merging; see
        :class:`flwr_fisher.merge.MergeOptions`. A client that `outlier` leaves out is
        logged; its ``client-share`` is 0.
    matching : bool, default False
        Permute clients' hidden units to one order before the merge
        (:func:`flwr_fisher.merge.matched`, Git Re-Basin). Use it for clients that did
        not start from one model. The network's layers must follow one another, and
        `structure` must be ``kfac``, ``ekfac`` or ``diagonal``. It needs SciPy:
        ``pip install "flwr-fisher[matching]"``.
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
        default. `robust`, `max_share`, `outlier` and `trust` need more than sums.
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
        **{f.name: f"merge=MergeOptions({f.name}=…)" for f in fields(MergeOptions)},
    }

    def __init__(
        self,
        *,
        structure: str = "kfac",
        solver: str = "pcg",
        fisher: FisherOptions | None = None,
        merge: MergeOptions | None = None,
        matching: bool = False,
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
        merge = given("merge", merge, MergeOptions)
        check_known("structure", structure, STRUCTURES)
        self.structure, self.fisher = structure, fisher.for_structure(structure)
        self.codec, self.score = Codec.of("codec", codec), score
        self.aggregate = aggregate
        if aggregate == "parts":
            # The merge limits each client's share of a layer's curvature (`max_share`).
            self.policy = replace(self.policy, max_curvature=math.inf)
        if aggregate == "sums":
            self.merge = sums_settings(solver, structure=structure, **asdict(merge))
        else:
            self.merge = merge.settings(solver)
        self._merge_of_model = self.merge.of_model({})  # `check` has the model itself
        self._iterations_by_default = merge.iterations is None and solver == "pcg"
        self.matching = matching
        if matching and (aggregate == "sums" or structure not in RENUMBERED):
            raise ConfigurationError(
                "matching=True needs aggregate='parts' and a structure among "
                f"{', '.join(RENUMBERED)}, not aggregate='{aggregate}' and "
                f"structure='{structure}'"
            )
        check_score(score, solver)
        if solver == "closed-form" and structure != "diagonal":
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
            merge, keep_all = self._merge_of_model, self.policy.limits
            sums = KfacSums(merge, own, keep_all, step_of).exchanges()
            return [*sums, *norm_exchanges(self)]
        return [self._of_diagonal_sums(own), *norm_exchanges(self)]

    def _of_uploads(self, server_round: int, own: _Options) -> Exchange[Any]:
        step = partial(self._merge_uploads, self.merge.for_round(server_round))
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
        """Raise an error if the model does not fit the budget or the matching.

        Also if `score` returns something else than a number for it.
        """
        if self.score is not None:
            check_number("score's result", plain(self.score(dict(state.params))))
        if self.matching:
            check_matching(state.params)
        self._merge_of_model = self.merge.of_model(state.params)
        codec = resolve(self.codec, state.params)
        if self.codec.name == "auto" and codec == LOSSLESS:
            logger.info(
                "codec='auto': the model is small, so clients send lossless uploads"
            )

    def _merge_uploads(
        self, merge: MergeSettings, state: ServerState, uploads: Uploads[FisherUpload]
    ) -> Step:
        """Return the step to the merge of the uploads."""
        if self._iterations_by_default and any(
            u.metrics.get(REGRESSION) for u in uploads
        ):
            merge = replace(merge, iterations=1)
        posteriors = [u.payload.posterior(u.num_examples) for u in uploads]
        if self.matching:
            posteriors = matched(posteriors)
        merged = merge_posteriors(
            posteriors,
            merge,
            score=self.score,
            progress=_progress_of_merge(),
            device=self.device,
        )
        for place, distance in merged.outliers.items():
            logger.warning(
                "aggregate_train: leaving %s out of the merge: its model is %.3g "
                "times as far from the median model as the median client's "
                "(outlier=%g)",
                uploads[place].client,
                distance,
                merge.outlier,
            )
        return step_of(merged)

    def _step_from_sums(self, state: ServerState, uploads: Uploads[Additive]) -> Step:
        """Return the step to the merge of the uploads' means."""
        (upload,) = uploads
        parts = [dict(upload.payload.part(name)) for name in SUMS]
        return self._merge_sums(state, DiagonalSums(*parts))

    def _merge_sums(self, state: ServerState, sums: DiagonalSums) -> Step:
        merged = merge_from_sums(
            sums,
            self.merge,
            like=state.params,
            score=self.score,
            progress=_progress_of_merge(),
        )
        return step_of(merged)

    def settings(self) -> dict[str, Any]:
        """Return this strategy's own settings."""
        return self._settings(asdict(self.merge))

    def used_settings(self) -> dict[str, Any]:
        """Return the settings without those that the solver does not use."""
        return self._settings(self.merge.used())

    def _settings(self, merge: dict[str, Any]) -> dict[str, Any]:
        wanted = {f"client-{name}": n for name, n in self._requested().items()}
        own: dict[str, Any] = {"aggregate": self.aggregate}
        own |= {"matching": True} if self.matching else {}
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
    if (settings := merged.settings) is not None:
        solver = settings.solver
        if solver == "pcg" and merged.iterations == settings.iterations:
            stops = f"; it stops there by design (iterations={settings.iterations})"
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
    if merged.outliers:
        metrics["num-outliers"] = len(merged.outliers)
    shares = {"client-share": merged.shares} if merged.shares else {}
    return Step(ServerState(merged.params), {**metrics, **shares}, merged)
