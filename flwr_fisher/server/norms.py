"""The request for a merged model's batch-norm statistics, and the step that sets them.

The clients' own statistics do not fit the merged model, so clients measure it.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial

from flwr.app import ArrayRecord

from flwr_fisher.errors import ParamsError, WireError, listed
from flwr_fisher.log_lines import logger
from flwr_fisher.merge.batch_norms import (
    check_shifts,
    norms_of,
    with_shifts,
    zero_shifts,
)
from flwr_fisher.params import Params, double, weighted_mean
from flwr_fisher.server.cohort import Cohort
from flwr_fisher.server.exchange import Exchange, ServerState, Step, Summation, Uploads
from flwr_fisher.wire import Additive, ConfigValue
from flwr_fisher.wire.additive import NORMS
from flwr_fisher.wire.arrays import check_same_keys

_READ = Additive.reader(NORMS)
_ONLY_TRAINS = (
    "norm statistics: clients that can only train: %s. Use a FisherClient there, with "
    "model and loader, or call merge.refresh_norms(model, loader) afterwards"
)


def who_can_measure(
    cohort: Cohort, present: Iterable[int], clients: Mapping[str, tuple[int, float]]
) -> dict[int, float]:
    """Return the weights of the clients that can measure; log those that cannot.

    `present` are the connected nodes, and `clients` has the numbers and weights of a
    round's clients by name.
    """
    nodes = {cohort.identity(node).number: node for node in present}
    if gone := [c for c, (number, _) in clients.items() if number not in nodes]:
        logger.warning("norm statistics: disconnected: %s", listed(gone))
    there = {c: own for c, own in clients.items() if own[0] in nodes}
    able = cohort.do_any_job
    measuring = {c: own for c, own in there.items() if nodes[own[0]] in able}
    if others := there.keys() - measuring.keys():
        logger.warning(_ONLY_TRAINS, listed(others))
    return dict(measuring.values())


def norm_exchange(
    prefixes: Sequence[str], weights: Mapping[int, float], *, frozen: bool
) -> Exchange[Additive]:
    """Return the exchange that asks for norms' shifts, and takes their mean.

    Parameters
    ----------
    prefixes : Sequence[str]
        The norms to measure; at least one.
    weights : Mapping[int, float]
        The clients' weights in the merge, by their numbers. A secure sum is weighted by
        the clients' examples.
    frozen : bool
        Whether to measure norms whose parameters a client does not train, as where a
        training has changed their statistics.
    """
    options: dict[str, ConfigValue] = {"job": "norm-statistics", "norms": [*prefixes]}
    options["frozen"] = frozen
    return Exchange(
        options,
        partial(_read, frozenset(prefixes)),
        partial(_step, weights),
        clients=lambda state: weights.keys(),
        additive=Summation(),
    )


def _read(prefixes: Set[str], record: ArrayRecord, like: Params) -> Additive:
    own = _READ(record, like)
    shifts = own.part(NORMS)
    check_same_keys(shifts.keys(), zero_shifts(like, prefixes).keys(), f"{NORMS}/")
    try:
        check_shifts(shifts)
    except ParamsError as error:
        raise WireError(str(error), field=NORMS) from error
    return own


def _step(
    weights: Mapping[int, float], state: ServerState, uploads: Uploads[Additive]
) -> Step:
    """Set the norms to the statistics of all clients' inputs."""
    each = [double(upload.payload.part(NORMS)) for upload in uploads]
    # A secure sum is one upload, without a client's number.
    own = [weights.get(upload.number, 1.0) for upload in uploads]
    shifts = weighted_mean(each, own)
    params = with_shifts(state.params, shifts)
    metrics = {"num-norms-refreshed": len(norms_of(shifts))}
    return Step(ServerState(params, state.groups), metrics)
