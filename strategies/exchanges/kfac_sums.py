"""FedFisher with K-FAC for a server that sees only sums over clients.

A round has three kinds of exchanges. The first takes the clients' mean. The second
takes the preconditioner of the merge and its right-hand side. Each further one takes,
for one iteration, the product of the clients' summed Fishers with a direction. If a
client has left, the matrix is another one: the next exchange takes the right-hand side
again, where the merge is, from the clients that are there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from flwr_fisher.curvature import Curvature
from flwr_fisher.curvature.operators.base import Iterate
from flwr_fisher.errors import WireError
from flwr_fisher.log_lines import logger
from flwr_fisher.merge import MergeOptions, MergeResult, sums_solver
from flwr_fisher.params import Params, check_finite, double, norm, rounded
from flwr_fisher.randomness import new_run_number
from flwr_fisher.server.exchange import (
    Exchange,
    Groups,
    ServerState,
    Step,
    Summation,
    Uploads,
)
from flwr_fisher.wire import Additive, ConfigValue, exact_mean
from flwr_fisher.wire.additive import PARAMS, PRODUCT, PRODUCT_STEP, LayerTraces
from flwr_fisher.wire.layout import PREFIX, checked_to_curvature

_RUN, _TRACES = "sums", "traces"
_MEAN = Summation[Any](mean=exact_mean)
_DIRECTION = "direction"  # one of the groups of an Iterate
_COUNT = "summed"  # of how many clients the right-hand side is, unless one has left
_SLACK = 1e-3  # for float32's rounding, relative to the largest possible length


def run_group() -> Groups:
    """Return the run's number as a group; clients keep their Fishers under it."""
    return {_RUN: {"run": torch.tensor(new_run_number())}}


def step_of(merged: MergeResult, groups: Groups) -> Step:
    """Return the step to a merged model; log how its systems were solved.

    Warn about parameters whose system was not solved.
    """
    solver, stops = "sums", ""
    if (options := merged.options) is not None:
        solver = options.solver
        if solver == "pcg" and merged.iterations == options.iterations:
            stops = f", where it stops by design (iterations={options.iterations})"
    left = merged.residuals[-1]
    text = "merged by %s: %d iterations%s; %.1e of the first residual is left"
    logger.info(text, solver, merged.iterations, stops, left)
    if merged.unsolved:
        text = "the merge's solver failed for %s: these parameters are the clients' "
        logger.warning(text + "mean, as in FedAvg", ", ".join(merged.unsolved))
    metrics = {
        "solver-iterations": merged.iterations,
        "solver-residual": left,
        "solver-fallbacks": len(merged.unsolved),
    }
    shares = {"client-share": merged.shares} if merged.shares else {}
    return Step(ServerState(merged.params, groups), {**metrics, **shares}, merged)


@dataclass(frozen=True)
class KfacSums:
    """A round's exchanges: two, and one for each iteration, after one local training.

    Parameters
    ----------
    merge : MergeOptions
        `anchor` and `iterations` are the server's, `shrink`, `damping` and `balance`
        the clients'.
    options : Mapping[str, …]
        The request's options for the clients' Fisher.
    """

    merge: MergeOptions
    options: Mapping[str, ConfigValue]

    def exchanges(self) -> Sequence[Exchange[Any]]:
        """Return the exchanges: for models, for traces, and for products."""
        names = ("shrink", "damping", "balance")
        regularised = {name: getattr(self.merge, name) for name in names}
        models = Exchange(
            {**self.options, **regularised, "job": "kfac-train"},
            Additive.reader(PARAMS),
            _take_mean,
            send=_run,
            require_same_parameters=True,
            additive=_MEAN,
        )
        traces = Exchange(
            {"job": "kfac-traces"},
            LayerTraces.read_traces,
            self._begin,
            send=_run,
            clients="previous",
            additive=_MEAN,
            measure=lambda state: self._measure_pull,
        )
        products = [self._product(k) for k in range(1, self.merge.iterations + 1)]
        return [models, traces, *products]

    def _product(self, iteration: int) -> Exchange[Additive]:
        """Return an exchange that asks for the Fishers' products with a direction."""
        return Exchange(
            {"job": "kfac-product", "iteration": iteration},
            Additive.reader(PRODUCT),
            partial(self._advance, iteration),
            send=_direction,
            start=_place,
            clients="previous",
            additive=_MEAN,
            measure=self._measure_product,
        )

    def _measure_pull(self, upload: LayerTraces) -> dict[str, float]:
        """Return how far a client's pull leads, by the client's own curvature."""
        return self._step_length(upload.traces, upload.part(PRODUCT))

    def _measure_product(
        self, state: ServerState
    ) -> Callable[[Additive], dict[str, float]]:
        """Return a function that checks a product, and measures how far it leads.

        The server has no longer each client's own curvature, so the sum's is used.
        """
        traces, direction = _traces(state), double(state.group(_DIRECTION))

        def measure(upload: Additive) -> dict[str, float]:
            product = upload.part(PRODUCT)
            if _COUNT in state.groups:  # otherwise it is no product with `direction`
                _check_product(double(product), direction, traces)
            return self._step_length(traces, product)

        return measure

    def _step_length(self, traces: Curvature, product: Params) -> dict[str, float]:
        step = sums_solver.step_of_product(traces, product, self.merge.anchor)
        return {PRODUCT_STEP: float(norm(step))}

    def _begin(self, state: ServerState, uploads: Uploads[Additive]) -> Step:
        """Return a step to the preconditioned system's first direction."""
        mean = uploads[0].payload
        total = {k: v for k, v in mean.tensors.items() if k.startswith(PREFIX)}
        groups = {**state.groups, _TRACES: total, **_count(uploads)}
        begun = ServerState(state.params, groups)
        product = mean.part(PRODUCT)
        layers = sums_solver.begin(_traces(begun), product, self.merge.anchor)
        return Step(_with(begun, layers))

    def _advance(
        self, iteration: int, state: ServerState, uploads: Uploads[Additive]
    ) -> Step:
        """Return a step by one iteration, or to the merged model after the last."""
        traces, product = _traces(state), uploads[0].payload.part(PRODUCT)
        layers, groups = sums_solver.from_groups(state.groups, traces), _count(uploads)
        if _COUNT not in state.groups:
            layers = sums_solver.begun_again(traces, layers, product, self.merge.anchor)
        elif groups[_COUNT] == state.group(_COUNT):
            layers = sums_solver.advanced(traces, layers, product, self.merge)
        else:  # The product is not with the matrix of the right-hand side.
            groups, left = {}, len(uploads[0].members)
            last = iteration == self.merge.iterations
            after = "it was the last one" if last else "the next one begins with these"
            text = "merge: iteration %d changes nothing, as only %d clients are left: "
            logger.warning(text + after, iteration, left)
        if iteration < self.merge.iterations:
            begun = ServerState(state.params, {**state.without(_COUNT), **groups})
            return Step(_with(begun, layers))
        result = replace(sums_solver.merged(state.params, layers), options=self.merge)
        return step_of(result, state.without(_TRACES, _COUNT, *sums_solver.ITERATE))


def _check_product(product: Params, direction: Params, traces: Curvature) -> None:
    """Raise :class:`WireError` if a product shows a negative eigenvalue of a Fisher.

    The error names a layer in which the direction's inner product with its own product
    is negative.
    """
    for block in traces.blocks():
        pairs = [(product[n].flatten(), direction[n].flatten()) for n in block.shapes]
        length = sum(float(p @ d) for p, d in pairs)
        size = sum(float(p.norm() * d.norm()) for p, d in pairs)
        if length < -_SLACK * size:
            reason = "is no product of a Fisher: it shows a negative eigenvalue"
            raise WireError(reason, field=f"{PRODUCT}/{next(iter(block.shapes))}")


def _take_mean(state: ServerState, uploads: Uploads[Additive]) -> Step:
    """Return a step to FedAvg's mean."""
    mean = uploads[0].payload.part(PARAMS)
    params = {k: rounded(mean[k], v.dtype) for k, v in state.params.items()}
    return Step(ServerState(params, state.groups))


def _with(state: ServerState, layers: Sequence[Iterate]) -> ServerState:
    """Return the state with the layers' iterates; clients get their directions.

    Raises
    ------
    ParamsError
        If that would not be finite.
    """
    groups = sums_solver.to_groups(layers)
    sent = {k: v.to(state.params[k].dtype) for k, v in groups[_DIRECTION].items()}
    check_finite(sent, "the direction")
    groups[_DIRECTION] = double(sent)
    return ServerState(state.params, {**state.groups, **groups})


def _traces(state: ServerState) -> Curvature:
    return checked_to_curvature(dict(state.group(_TRACES)), double(state.params))


def _run(state: ServerState) -> Groups:
    return {"": state.group(_RUN)}


def _count(uploads: Uploads[Additive]) -> Groups:
    return {_COUNT: {"clients": torch.tensor(len(uploads[0].members))}}


def _place(state: ServerState) -> Params:
    """Return the mean, or the place of the merge if clients must send their pull."""
    if _COUNT in state.groups:
        return state.params
    mean, moves = state.params, state.group("solution")
    return {**mean, **{k: mean[k] + move.to(mean[k]) for k, move in moves.items()}}


def _direction(state: ServerState) -> Groups:
    if _COUNT not in state.groups:
        return _run(state)
    sent = {k: v.to(state.params[k].dtype) for k, v in state.group(_DIRECTION).items()}
    return {**_run(state), _DIRECTION: sent}
