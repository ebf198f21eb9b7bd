r"""Exchanges after a round's step, which improve the model that it has made.

The merge is the best guess from what each client knew before it. Then clients meet the
merged model, once, without training: first its last layer is solved for in closed form
(a classifier's then takes a step of logistic regression), then the server takes steps
by the clients' pooled K-FAC. Every exchange is optional for the round: a client that
has left is skipped by name, and if nobody replies, the model stays as it is.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flwr_fisher.curvature import FisherOptions
from flwr_fisher.errors import ConfigurationError
from flwr_fisher.log_lines import logger
from flwr_fisher.params import Params, add, double, rounded, weighted_mean
from flwr_fisher.rounds.quasi_newton import Descent, Inverse, damped_inverse
from flwr_fisher.server.exchange import (
    Exchange,
    ServerState,
    Step,
    Summation,
    Uploads,
    weights_of,
)
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.strategies.exchanges.norm_statistics import norm_exchanges
from flwr_fisher.tangent import HeadSums, chosen_ridge, closed_form_head, lda_head
from flwr_fisher.tangent.frozen_head import majorizer, ridge_of
from flwr_fisher.wire import ConfigValue, HeadLossUpload, HeadUpload, LossUpload, NoHead
from flwr_fisher.wire.additive import GRADIENT, LOSS, GradientUpload
from flwr_fisher.wire.head_upload import read_head
from flwr_fisher.wire.layout import PREFIX, checked_to_curvature
from flwr_fisher.wire.options import join_groups, split_groups

Exchanges = Sequence[Exchange[Any]]

_ANY_NUMBER = 2**53
_MANY = 100  # clients that are enough for a head
_ASKING: dict[str, Any] = {"clients": "previous", "optional": True, "refines": True}
_SOLVED, _SCALES = "head", "head-scales"  # groups of the state's tensors
_START, _START_HEAD = "start", ("start-head", "start-scales")
_CHOSEN = "chosen"  # the clients' losses with the head that was taken
_DESCENT, _KFAC = "descent", "descent-kfac"
_OF = "clients"  # whose losses the descent's group has
# Chosen on validation examples: of a model that is sure, the expectation over its own
# labels is nearly zero, and a draw from them noise. Given labels say where it is wrong.
_KFAC_OPTIONS = FisherOptions(expectation="empirical", examples=1000)
# Features move while clients train below a head. One with large weights, on directions
# in which the features hardly vary, makes that training diverge. The least ridge, as a
# share of the features' mean variance:
_FIRST_RIDGE = 0.1
# What the closed form's outputs may be multiplied by: LDA's logits are too sure, and a
# regression on -1 and 1 is not sure enough.
_SCALES_OF = {"categorical": [0.125, 0.25, 0.5, 1.0], "bernoulli": [1.0, 2.0, 4.0, 8.0]}
_BOUNDS = {"categorical": 0.5, "bernoulli": 0.25}  # of an output's Hessian, over zz^T


def refinements(strategy: CurvatureStrategy, server_round: int) -> Exchanges:
    """Return the exchanges after a round's step: norms' statistics, head, steps.

    A strategy lists them behind its last step that changes the model's weights. They
    ask the clients of the exchange before; with a `fraction_train` below 1, a head asks
    a hundred clients, or all if there are fewer. Only the run's last round has a head
    and steps: a training that begins at a head in closed form ends in a worse merge.

    Parameters
    ----------
    strategy : CurvatureStrategy
        Its `norm_statistics`, `refine` and `num_rounds` count.
    server_round : int
        The round.

    Examples
    --------
    ::

        def exchanges(self, server_round):
            step = Exchange({}, read, self.step)
            return [step, *refinements(self, server_round)]
    """
    wanted, exchanges = strategy.refine, list[Exchange[Any]](norm_exchanges(strategy))
    if wanted is None or server_round < strategy.num_rounds:
        return exchanges
    if wanted.head:
        exchanges += _head_exchanges(strategy)
    if wanted.steps:
        exchanges += _step_exchanges(wanted.steps)
    return exchanges


# --- the head


def check_pretrained(strategy: CurvatureStrategy, pretrained: bool) -> bool:
    """Return `pretrained`, after a check that the strategy's other arguments fit.

    Raises
    ------
    ConfigurationError
        It names the argument that does not.
    """
    if not pretrained:
        return False
    if strategy.refine is None or not strategy.refine.head:
        raise ConfigurationError(
            "pretrained=True needs refine=Refinement(), since the last layer is solved "
            "for before the training and after it"
        )
    strategy.check_weighted_by_examples("pretrained=True")
    if strategy.waiting.window is not None:
        raise ConfigurationError(
            "pretrained=True with Waiting(window=...): clients are asked twice before "
            "they train; leave one of them out"
        )
    return True


def head_first(strategy: CurvatureStrategy, server_round: int) -> Exchanges:
    """Return the exchanges for a pre-trained model's head, before the first training.

    Clients then train from there, with the options of :func:`training_options`. The
    model as it was given is kept, and compared with the last one.
    """
    if not strategy.pretrained or server_round > 1:
        return []
    known: Exchange[Any] = head_exchange(name="first head")
    sums = replace(known, read=read_head, step=_solve_first, clients="all")
    return [sums, _losses_of("first head", _choose_first, clients="previous")]


def training_options(strategy: CurvatureStrategy) -> dict[str, ConfigValue]:
    """Return the options of a training: those of pre-trained models, or none."""
    return {"pretrained": True} if strategy.pretrained else {}


def head_exchange(
    *, ridge: float | None = None, head: str | None = None, **more: Any
) -> Exchange[HeadUpload]:
    """Return the exchange that sets a linear layer by ridge regression (AFL).

    Parameters
    ----------
    ridge, head
        As for :class:`~flwr_fisher.strategies.AFL`.
    **more
        Other arguments of the :class:`Exchange`, such as ``clients="previous"``.
    """
    return Exchange(
        {"job": "head-sums", "head": head or ""},
        HeadUpload.read,
        partial(_set_head, ridge),
        require_same_parameters=True,
        additive=Summation(weighted=False, bits=64),
        **more,
    )


def _head_exchanges(strategy: CurvatureStrategy) -> Exchanges:
    """Return the exchanges for a head: for sums, and for the losses of candidates.

    If the run began with a pre-trained model, also for the losses of that one.
    """
    pretrained = strategy.pretrained
    bounded = strategy.refine.head == "auto" and not pretrained
    known: Exchange[Any] = head_exchange(name="head", **_ASKING)
    sums = replace(known, read=read_head, step=_solve_head)
    if strategy.fraction_train < 1:
        # A head forgets the classes that no asked client has.
        sums = replace(sums, clients=lambda _: strategy.cohort.some_numbers(_MANY))

    def within(before: ServerState, now: ServerState) -> Exchange[Any]:
        """Ask for sums, if `bounded` of no more numbers than the model has."""
        most = sum(v.numel() for v in now.params.values()) if bounded else _ANY_NUMBER
        return replace(sums, options={**sums.options, "most": most})

    losses = _losses_of("head", _choose_head, **_ASKING)
    exchanges = [replace(sums, prepare=within), losses]
    if pretrained:
        asking = {**_ASKING, "start": lambda state: state.group(_START)}
        own = _losses_of("start", _choose_start, groups=_START_HEAD, **asking)
        exchanges.append(own)
    return exchanges


def _losses_of(
    name: str,
    step: Callable[[ServerState, Uploads[HeadLossUpload]], Step],
    *,
    groups: tuple[str, str] = (_SOLVED, _SCALES),
    **asking: Any,
) -> Exchange[HeadLossUpload]:
    """Return the exchange for the losses of a solution at its scales."""
    solved, scales = groups
    losses = Exchange(
        {"job": "head-losses"},
        HeadLossUpload.read,
        step,
        send=lambda state: {_SOLVED: state.group(solved)},
        additive=Summation(),
        measure=lambda state: partial(_lengths, state.group(scales).get("majorizer")),
        name=f"{name} losses",
        **asking,
    )

    def compared(before: ServerState, now: ServerState) -> Exchange[Any] | None:
        """Ask for losses if this round has solved for a head; the start has its own."""
        old = now.group(scales) is before.group(scales) and scales == _SCALES
        if old or not now.group(scales):
            return None
        factors = now.group(scales)["scales"].tolist()
        parts = now.group(solved).values()
        classes = len(next(iter(parts)))
        width = sum(part.numel() for part in parts) // classes
        shape = 1 + len(factors), classes, width
        read = partial(HeadLossUpload.read_slopes, shape)
        return replace(losses, options={**losses.options, "scales": factors}, read=read)

    return replace(losses, prepare=compared)


def _lengths(majorizer: Tensor | None, upload: HeadLossUpload) -> dict[str, float]:
    """Return the lengths of the steps to which a client's slopes lead.

    Ordinary slopes lead far where the clients' features hardly vary.
    """
    if majorizer is None:
        return {}
    steps = upload.slopes.double() @ majorizer
    return {f"slopes {n}": float(step.norm()) for n, step in enumerate(steps)}


def _total(uploads: Uploads[HeadUpload]) -> HeadSums:
    """Return all clients' sums."""
    # With another weight than its examples, a client's sums count by its weight.
    counts = [float(upload.payload.count) for upload in uploads]
    unit = sum(counts) / sum(weights_of(uploads))
    factors = [unit * u.num_examples / n for u, n in zip(uploads, counts, strict=True)]
    return HeadSums.total([upload.payload.sums for upload in uploads], factors)


def _solution(
    first: HeadUpload, sums: HeadSums, ridge: float | None, *, lda: bool = False
) -> dict[str, Tensor]:
    """Return the solution for the head of an upload, by parameters' names."""
    solve = lda_head if lda else closed_form_head
    names = [name for name in (first.weight, first.bias) if name is not None]
    solution = solve(sums, bias=first.bias is not None, ridge=ridge)
    return dict(zip(names, solution, strict=True))


def _set_head(
    ridge: float | None, state: ServerState, uploads: Uploads[HeadUpload]
) -> Step:
    """Set the head to the ridge regression."""
    sums = _total(uploads)
    solution = _solution(uploads[0].payload, sums, ridge)
    return Step(ServerState(_with(state.params, solution), state.groups), {}, sums)


def _solve_head(state: ServerState, uploads: Uploads[Any]) -> Step:
    """Solve for the head, which is not yet taken."""
    if isinstance(first := uploads[0].payload, NoHead):
        logger.info("head: it stays as it was, since %s", first.reason)
        return Step(state)
    sums = _total(uploads)
    facts = _candidates(uploads, sums, chosen_ridge(sums, bias=first.bias is not None))
    groups = dict(zip((_SOLVED, _SCALES), facts, strict=True))
    return Step(ServerState(state.params, {**state.groups, **groups}))


def _solve_first(state: ServerState, uploads: Uploads[HeadUpload]) -> Step:
    """Solve for a head to train below, and for the best one of the model as it is."""
    sums, bias = _total(uploads), uploads[0].payload.bias is not None
    ridge = chosen_ridge(sums, bias=bias)
    least = ridge_of(_FIRST_RIDGE, sums, bias=bias)
    best = _candidates(uploads, sums, ridge)
    below = _candidates(uploads, sums, max(ridge, least))
    start = {name: value.clone() for name, value in state.params.items()}
    groups = dict(zip((*_START_HEAD, _SOLVED, _SCALES), best + below, strict=True))
    return Step(ServerState(state.params, {**state.groups, _START: start, **groups}))


def _candidates(
    uploads: Uploads[HeadUpload], sums: HeadSums, ridge: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the solution, and its scales with what the step from there needs."""
    first = uploads[0].payload
    likelihood, bias = first.likelihood, first.bias is not None
    scales = _SCALES_OF.get(likelihood, [1.0])
    facts = {"scales": torch.tensor(scales, dtype=torch.float32)}
    if bound := _BOUNDS.get(likelihood):
        bound /= sums.cross.shape[1] if likelihood == "bernoulli" else 1
        # Where the policy has cut sums, the bound is that of more than what is left.
        left = min(upload.limited.get("head/gram", 1.0) for upload in uploads)
        facts["majorizer"] = left * majorizer(sums, bias=bias, bound=bound, ridge=ridge)
        facts["clients"] = _clients(uploads)
    return _solution(first, sums, ridge, lda=likelihood == "categorical"), facts


def _choose_head(state: ServerState, uploads: Uploads[HeadLossUpload]) -> Step:
    """Take the solution at its best scale or the head that is there, a step further."""
    solved, facts = state.group(_SOLVED), state.group(_SCALES)
    params, metrics, own = _best_head(state.params, solved, facts, uploads)
    kept = state.without(_SOLVED, _SCALES)
    if state.group(_START):  # which the next exchange compares
        kept = {**kept, _CHOSEN: own}
    return Step(ServerState(params, kept), metrics, quiet=True)


def _choose_first(state: ServerState, uploads: Uploads[HeadLossUpload]) -> Step:
    """Take the solution to train below."""
    step = _choose_head(state, uploads)
    first = {"first-head-loss": step.metrics["head-loss"]}
    state = replace(step.state, groups=step.state.without(_CHOSEN))
    return replace(step, state=state, metrics=first)


def _best_head(
    params: Params, solved: Params, facts: Params, uploads: Uploads[HeadLossUpload]
) -> tuple[dict[str, Tensor], dict[str, float], Params]:
    """Return a model with the best of two heads, metrics, and its clients' losses."""
    measured = [{"": upload.payload.losses} for upload in uploads]
    losses = weighted_mean(measured, weights_of(uploads))[""].tolist()
    best = losses.index(min(losses))
    factor = float(facts["scales"][best - 1]) if best else 0.0
    metrics = {"loss-before-head": losses[0], "head-loss": losses[best]}
    metrics["head-scale"] = factor
    names = sorted(solved, key=lambda name: -solved[name].dim())  # weight, bias
    own = double(params, names)
    head = {name: factor * solved[name] if best else own[name] for name in names}
    # The bound is that of the clients that sent the sums.
    steps = "majorizer" in facts and torch.equal(facts["clients"], _clients(uploads))
    if steps:
        every = [{"": upload.payload.slopes[best].double()} for upload in uploads]
        step = weighted_mean(every, weights_of(uploads))[""] @ facts["majorizer"]
        parts = torch.split(step, [v.numel() // len(v) for v in head.values()], 1)
        pairs = zip(head.items(), parts, strict=True)
        head = {k: v - part.reshape(v.shape) for (k, v), part in pairs}
    text = "head: the clients' mean loss was %.3g, and is %.3g with %s%s"
    which = "the last layer in closed form" if best else "the trained last layer"
    then = "; one more step on it follows, whose loss nobody measures" if steps else ""
    logger.info(text, losses[0], losses[best], which, then)
    chosen = [upload.payload.losses[best] for upload in uploads]
    return _with(params, head), metrics, _losses(uploads, chosen)


def _choose_start(state: ServerState, uploads: Uploads[HeadLossUpload]) -> Step:
    """Take the run's first model with its own head if its loss is not higher.

    Or if the clients, which are there, could send no losses of the last model.
    """
    solved, facts = (state.group(name) for name in _START_HEAD)
    params, metrics, own = _best_head(state.group(_START), solved, facts, uploads)
    kept = ServerState(state.params, state.without(_CHOSEN))
    last, start = math.inf, metrics["head-loss"]
    if chosen := state.group(_CHOSEN):
        last, over_both = _over_both(chosen, own)
        # Two secure sums of unlike clients are compared as they are.
        start = over_both if over_both < math.inf else start
    if last < start:
        return Step(kept, {"start-loss": start, "start-taken": 0}, quiet=True)
    if chosen:
        text = "the training has spoilt what the network knew (its loss is %.3g, and "
        text += "%.3g as it was published), so that one is taken. Try a lower learning "
        logger.warning(text + "rate", last, start)
    else:
        text = "nobody knows the loss of the trained network, for the reasons above, "
        text += "so the published one is taken (%.3g); the other is result.unrefined. "
        text += "Try a lower learning rate, if the training has spoilt it"
        logger.warning(text, start)
    copies = {name: value.clone() for name, value in params.items()}
    metrics["start-taken"] = 1
    return Step(replace(kept, params=copies), metrics, quiet=True)


def _clients(uploads: Uploads[Any]) -> Tensor:
    """Return what the uploads' clients are known by. A sum is known by its members."""
    names = [hash((upload.number, *upload.members)) for upload in uploads]
    return torch.tensor(names, dtype=torch.int64)


def _with(params: Params, changed: Params) -> dict[str, Tensor]:
    """Return parameters, some of them changed, in their dtypes."""
    return {
        k: rounded(changed[k], v.dtype) if k in changed else v
        for k, v in params.items()
    }


# --- the steps


def _step_exchanges(steps: int) -> Exchanges:
    """Return an exchange for each step's gradient, and one for the last loss."""
    asking = {"additive": Summation(), "quiet": True, **_ASKING}
    gradient: dict[str, Any] = {"job": "gradient-and-kfac"}
    kfac = {"kfac": True, **_KFAC_OPTIONS.to_options()}
    read_first = partial(GradientUpload.read_step, with_kfac=True)
    first = Exchange({**gradient, **kfac}, read_first, _begin_descent, **asking)
    later = {**asking, "start": _tried}
    read = partial(GradientUpload.read_step, with_kfac=False)
    other = Exchange(gradient, read, _go_on, **later)
    last = Exchange({"job": "mean-loss"}, LossUpload.read, _end_descent, **later)
    following: list[Exchange[Any]] = [*[other] * (steps - 1), last]
    return [first, *(replace(e, prepare=partial(_if_begun, e)) for e in following)]


def _if_begun(
    exchange: Exchange[Any], before: ServerState, now: ServerState
) -> Exchange[Any] | None:
    """Return the exchange if this round has begun a descent."""
    begun = now.group(_KFAC) and now.group(_KFAC) is not before.group(_KFAC)
    return exchange if begun else None


def _begin_descent(state: ServerState, uploads: Uploads[GradientUpload]) -> Step:
    """Keep the pooled K-FAC, and choose the first step."""
    gradient, loss, own = _pooled(uploads)
    factors = [
        double({k: v for k, v in u.payload.tensors.items() if k.startswith(PREFIX)})
        for u in uploads
    ]
    kfac = weighted_mean(factors, weights_of(uploads))
    state = replace(state, groups={**state.groups, _KFAC: kfac})
    descent = Descent.begin(gradient, loss, _inverse(state))
    return Step(_into(state, descent, own), {"loss-before-steps": loss}, quiet=True)


def _go_on(state: ServerState, uploads: Uploads[GradientUpload]) -> Step:
    """Take the step that was tried, or take it back, and choose the next."""
    gradient, _, own = _pooled(uploads)
    descent, loss, known = _descent(state, own)
    taken, same = descent.is_better(loss), torch.equal(known[_OF], own[_OF])
    state = _taken(state, descent, loss, taken)
    descent = descent.after(gradient, loss, _inverse(state), same_clients=same)
    return Step(_into(state, descent, own if taken else known))


def _end_descent(state: ServerState, uploads: Uploads[LossUpload]) -> Step:
    """Take the last step, or take it back."""
    own = _losses(uploads, [upload.payload.losses[0] for upload in uploads])
    descent, loss, _ = _descent(state, own)
    taken = descent.is_better(loss)
    params = _taken(state, descent, loss, taken).params
    metrics = {"loss-after-steps": loss if taken else descent.loss}
    state = ServerState(params, state.without(_DESCENT, _KFAC))
    return Step(state, metrics, quiet=True)


def _taken(
    state: ServerState, descent: Descent, loss: float, taken: bool
) -> ServerState:
    """Return the state with the model tried, if it is taken; tell which."""
    text = "step: %s; the clients' loss there is %.3g, and was %.3g"
    logger.info(text, "taken" if taken else "taken back", loss, descent.loss)
    return replace(state, params=_tried(state)) if taken else state


def _pooled(uploads: Uploads[GradientUpload]) -> tuple[Params, float, Params]:
    """Return the gradient and the loss of all clients' data, and the clients' own."""
    vectors = [
        {**double(u.payload.part(GRADIENT)), LOSS: u.payload.loss} for u in uploads
    ]
    mean = weighted_mean(vectors, weights_of(uploads))
    own = _losses(uploads, [upload.payload.loss for upload in uploads])
    return mean, float(mean.pop(LOSS)), own


def _inverse(state: ServerState) -> Inverse:
    kfac = checked_to_curvature(dict(state.group(_KFAC)), double(state.params))
    return damped_inverse(kfac)


def _into(state: ServerState, descent: Descent, losses: Params) -> ServerState:
    """Return the state with a descent, and the clients' losses at its model."""
    vectors: dict[str, Params] = {"gradient": descent.gradient, "step": descent.step}
    for i, (step, change) in enumerate(descent.pairs):
        vectors |= {f"s{i}": step, f"y{i}": change}
    facts = {**losses, "gamma": torch.tensor(descent.gamma, dtype=torch.float64)}
    group = facts | join_groups(vectors)
    return replace(state, groups={**state.groups, _DESCENT: group})


def _losses(uploads: Uploads[Any], losses: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the clients' losses and weights."""
    return {
        _OF: _clients(uploads),
        "losses": torch.tensor([*map(float, losses)], dtype=torch.float64),
        "weights": torch.tensor(weights_of(uploads), dtype=torch.float64),
    }


def _over_both(known: Params, own: Params) -> tuple[float, float]:
    """Return two means of losses over the clients that have sent both.

    If there is none, the first is over those that have sent it, and the second counts
    as infinite.
    """
    was, now = torch.isin(known[_OF], own[_OF]), torch.isin(own[_OF], known[_OF])
    if not now.any():
        every = known["losses"] @ known["weights"] / known["weights"].sum()
        return float(every), math.inf
    weights = own["weights"][now] / own["weights"][now].sum()
    order, again = known[_OF][was].argsort(), own[_OF][now].argsort()
    before = float(known["losses"][was][order] @ weights[again])
    return before, float(own["losses"][now] @ weights)


def _descent(state: ServerState, own: Params) -> tuple[Descent, float, Params]:
    """Return the descent, the loss at the model tried, and the losses at its own.

    Both means are over the clients that have sent both. If there is none, the loss at
    the model tried counts as infinite.
    """
    facts, vectors = split_groups(state.group(_DESCENT))
    known = {name: facts[name] for name in own}
    before, loss = _over_both(known, own)
    gamma = float(facts["gamma"])
    count = sum(name.startswith("s") for name in vectors) - 1  # but for "step"
    pairs = [(vectors[f"s{i}"], vectors[f"y{i}"]) for i in range(count)]
    descent = Descent(vectors["gradient"], before, vectors["step"], gamma, pairs)
    return descent, loss, known


def _tried(state: ServerState) -> dict[str, Tensor]:
    """Return the model that a descent tries."""
    step = split_groups(state.group(_DESCENT))[1]["step"]
    return _with(state.params, add(double(state.params, step), step))
