"""FedFisher: one-shot federated learning with Fisher information."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from flwr.app import ArrayRecord

from flwr_fisher.curvature import FisherOptions
from flwr_fisher.devices import CPU, default_device, usable_device
from flwr_fisher.errors import ConfigurationError, check_known, check_number, plain
from flwr_fisher.log_lines import logger
from flwr_fisher.merge import DiagonalSums, MergeOptions, fedfisher_from_sums
from flwr_fisher.merge.fedfisher import merge_posteriors
from flwr_fisher.merge.options import Score, check_score
from flwr_fisher.params import Params
from flwr_fisher.server.exchange import (
    Exchange,
    Groups,
    ServerState,
    Step,
    Summation,
    Uploads,
)
from flwr_fisher.strategies.base import CurvatureStrategy, Refinement
from flwr_fisher.strategies.exchanges.kfac_sums import KfacSums, run_group, step_of
from flwr_fisher.strategies.exchanges.refinement import (
    check_pretrained,
    head_first,
    refinements,
    training_options,
)
from flwr_fisher.wire import (
    LOSSLESS,
    Additive,
    Codec,
    FisherUpload,
    exact_mean,
    resolve,
)
from flwr_fisher.wire.additive import SUMS

_HEAD = Refinement()  # the default: frozen, so that all strategies can share it


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
    ``aggregate="sums"`` the server does not know what the task is.) After the last
    merge, the model's last layer is solved for in closed form, from sums over the
    clients' data at the merged model (`refine`).

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
    refine : Refinement or None, default Refinement()
        What follows the merge: by default a head in closed form; with
        ``Refinement(steps=3)`` also steps by K-FAC, and with ``None`` nothing.
    pretrained : bool, default False
        Whether the arrays that the run starts from are published weights with a new
        last layer. Then this layer is solved for before the training, as after the
        merge. Clients train the others: norms keep their statistics, and
        :class:`~flwr_fisher.client.LocalSGD` has a lower learning rate. If in the end
        the merge has a higher loss than the published weights with such a layer, these
        are the result (:doc:`/pretrained`).
    **kwargs
        :class:`CurvatureStrategy`'s: FedAvg's sampling keywords and ``seed``. The
        policy's `max_curvature` has no effect where ``merge.max_share`` is below 1.
        With ``structure="kfac"`` it needs an `anchor`.

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
        **{name: f"fisher=FisherOptions({name}=…)" for name in FisherOptions.names()},
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
        refine: Refinement | None = _HEAD,
        pretrained: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(norm_statistics=norm_statistics, refine=refine, **kwargs)
        self.pretrained = check_pretrained(self, pretrained)
        check_known("aggregate", aggregate, ("parts", "sums"))
        self.structure, self.aggregate, self.score = structure, aggregate, score
        self.fisher = FisherOptions.of("fisher", fisher)
        self.fisher.check(structure)
        self.codec = Codec.of("codec", codec)
        self.merge = MergeOptions.of("merge", merge)
        if solver is not None:
            self.merge = replace(self.merge, solver=solver)
        check_score(score, self.merge.solver)
        self.device = default_device()
        if device is not None:
            self.device = usable_device(device, "merge on the CPU, device='cpu'")
        if self.merge.solver == "closed-form" and structure != "diagonal":
            raise ConfigurationError(
                f"solver='closed-form' needs structure='diagonal', not '{structure}'"
            )
        if aggregate == "sums":
            self._use_sums()
        self._filled = self.merge.filled()  # `check` has the model's own defaults
        strict = self.policy.max_curvature < math.inf
        if strict and structure == "kfac" and not self._filled.anchor:
            # One client then decides where the others' Fishers are nearly singular.
            raise ConfigurationError(
                "a policy with max_curvature needs an anchor above 0 with "
                "structure='kfac': pass merge=MergeOptions("
                f"solver='{self.merge.solver}', anchor=0.03)"
            )

    def _use_sums(self) -> None:
        """Set the options for sums; raise an error for those that need more."""
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
        self.codec, self.merge = LOSSLESS, self.merge.for_sums(self.structure)

    def exchanges(self, server_round: int) -> Sequence[Exchange[Any]]:
        """Return a round's exchanges.

        One request for models with their Fishers (`parts`), or several for sums
        (`sums`).
        """
        options = {**self._requested(), **training_options(self)}
        merging: Sequence[Exchange[Any]]
        if self.aggregate == "parts":
            # A first merge has no usual length of moves, which `trust` could limit.
            trust = math.inf if server_round == 1 else self.merge.trust
            merge: Exchange[Any] = Exchange(
                options,
                self._read,
                partial(self._merge_uploads, replace(self.merge, trust=trust)),
                require_same_parameters=True,
                # The merge limits each client's share of a layer's curvature.
                limit_curvature=self._filled.max_share >= 1,
            )
            merging = [merge]
        elif self.structure == "kfac":
            merging = KfacSums(self._filled, options).exchanges()
        else:
            read = Additive.reader(*SUMS, of_one=False)
            merging = [
                Exchange(
                    {**options, "job": "diagonal-sums"},
                    Additive.reader(*SUMS),
                    self._merge_sums,
                    require_same_parameters=True,
                    additive=Summation[Additive](read=read, mean=exact_mean),
                )
            ]
        first = head_first(self, server_round)
        return [*first, *merging, *refinements(self, server_round)]

    def initial_groups(self) -> Groups:
        """Return the run's number, if clients keep their Fishers under it."""
        kept = self.aggregate == "sums" and self.structure == "kfac"
        return run_group() if kept else {}

    def _requested(self) -> dict[str, str | int | float]:
        """Return the options of the clients' job."""
        return {
            "structure": self.structure,
            **self.fisher.to_options(),
            **self.codec.to_options(),
        }

    def _read(self, record: ArrayRecord, like: Params) -> FisherUpload:
        codec = resolve(self.codec, like)
        return FisherUpload.from_arrays(record, like, codec, structure=self.structure)

    def check(self, state: ServerState) -> None:
        """Raise an error if the model does not fit the budget, or sums.

        Also if `score` returns something else than a number for it.
        """
        if self.score is not None:
            check_number("score's result", plain(self.score(dict(state.params))))
        halves = [k for k, v in state.params.items() if v.dtype == torch.float16]
        if halves and self.aggregate == "sums" and self.structure == "kfac":
            raise ConfigurationError(
                f"'{halves[0]}' is float16, which is too coarse for sums of K-FAC: "
                "pass structure='diagonal', aggregate='parts', or a float32 model"
            )
        self._filled = self.merge.filled(state.params)
        codec = resolve(self.codec, state.params)
        if self.codec.name == "auto" and codec == LOSSLESS:
            text = "codec='auto': the model is small, so clients send lossless uploads"
            logger.info(text)

    def _merge_uploads(
        self, merge: MergeOptions, state: ServerState, uploads: Uploads[FisherUpload]
    ) -> Step:
        """Return the step to the merge of the uploads."""
        regressions = sum(u.likelihood == "gaussian" for u in uploads)
        if _fewer_in_a_regression(merge) and 2 * regressions > len(uploads):
            merge = replace(merge, iterations=1)
        merged_on = partial(
            merge_posteriors,
            [u.payload.posterior(u.num_examples) for u in uploads],
            merge,
            score=self.score,
        )
        try:
            return step_of(merged_on(device=self.device), state.groups)
        except RuntimeError as error:  # such as too little memory
            if self.device == CPU:
                raise
            text = "merging failed on %s, so it is done on the CPU: %s"
            logger.warning(text, self.device, error)
            return step_of(merged_on(device=CPU), state.groups)

    def _merge_sums(self, state: ServerState, uploads: Uploads[Additive]) -> Step:
        """Return the step to the merge of the uploads' means."""
        (upload,) = uploads
        merged = fedfisher_from_sums(
            DiagonalSums(*[dict(upload.payload.part(name)) for name in SUMS]),
            like=state.params,
            score=self.score,
            **self.merge.settings(),
        )
        return step_of(merged, state.groups)

    def settings(self) -> dict[str, Any]:
        """Return this strategy's own settings, with the solver's defaults."""
        merge = self._filled.settings()
        if self.aggregate == "parts" and _fewer_in_a_regression(self.merge):
            merge["iterations"] = f"{merge['iterations']}, 1 in a regression"
        return {
            "aggregate": self.aggregate,
            "score": self.score is not None,
            **training_options(self),
            **{f"client-{name}": value for name, value in self._requested().items()},
            **{name: value for name, value in merge.items() if value is not None},
        }


def _fewer_in_a_regression(merge: MergeOptions) -> bool:
    """Return whether a regression takes one iteration, as nobody gave their number."""
    return merge.solver == "pcg" and merge.iterations is None
