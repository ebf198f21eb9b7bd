"""Clients measure a merged model's batch norms, which no client's statistics are of."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from flwr.app import ArrayRecord

from flwr_fisher.errors import ParamsError, WireError
from flwr_fisher.merge.norms import check_shifts, norms_of, with_shifts
from flwr_fisher.params import Params, double, weighted_mean
from flwr_fisher.server.exchange import Exchange, ServerState, Step, Summation, Uploads
from flwr_fisher.wire import Additive, ConfigValue
from flwr_fisher.wire.additive import NORMS

_READ = Additive.reader(NORMS)


def norm_exchange(
    prefixes: Sequence[str], weights: Mapping[int, float]
) -> Exchange[Additive]:
    """Return the request for norms' shifts, whose mean over clients is what counts.

    Parameters
    ----------
    prefixes : Sequence[str]
        Of which norms; empty: of those that a client does not freeze.
    weights : Mapping[int, float]
        Those of the clients that are asked, by their numbers: as in the merge.
    """
    asked: dict[str, ConfigValue] = {"job": "norm-statistics"}
    asked |= {"norms": list(prefixes)} if prefixes else {}
    return Exchange(
        asked,
        _read,
        partial(_step, weights),
        clients=lambda state: weights.keys(),
        additive=Summation(),
    )


def _read(record: ArrayRecord, like: Params) -> Additive:
    own = _READ(record, like)
    try:
        check_shifts(own.part(NORMS))
    except ParamsError as error:
        raise WireError(str(error), field=NORMS) from error
    return own


def _step(
    weights: Mapping[int, float], state: ServerState, uploads: Uploads[Additive]
) -> Step:
    """Give the norms the statistics of all clients' inputs."""
    each = [double(upload.payload.part(NORMS)) for upload in uploads]
    own = [weights.get(upload.number, 1.0) for upload in uploads]  # a secure sum is one
    shifts = weighted_mean(each, own)
    params = with_shifts(state.params, shifts)
    metrics: dict[str, Any] = {"num-norms-refreshed": len(norms_of(shifts))}
    return Step(ServerState(params, state.groups), metrics)
