"""The exchange that measures a merged model's batch-norm statistics, and sets them.

The clients' own statistics do not fit the merged model, so clients measure it.
"""

from collections.abc import Sequence, Set
from dataclasses import replace
from functools import partial

from flwr.app import ArrayRecord

from flwr_fisher.errors import ParamsError, WireError
from flwr_fisher.merge import batch_norms
from flwr_fisher.params import Params, double, weighted_mean
from flwr_fisher.server.exchange import (
    Exchange,
    ServerState,
    Step,
    Summation,
    Uploads,
    weights_of,
)
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.wire import Additive
from flwr_fisher.wire.additive import NORMS
from flwr_fisher.wire.arrays import check_same_keys

NAME = "norm statistics"
_READ = Additive.reader(NORMS)


def norm_exchanges(strategy: CurvatureStrategy) -> Sequence[Exchange[Additive]]:
    """Return the exchange that refreshes norms' statistics, or none.

    A strategy lists it behind its last step that changes the model's weights. It asks
    the clients of the exchange before. There is none with
    ``norm_statistics="average"``; and when its turn comes, it is left out if no norm's
    statistics have moved in the round.

    Parameters
    ----------
    strategy : CurvatureStrategy
        Its `norm_statistics` and `moves_norms` count.

    Examples
    --------
    ::

        def exchanges(self, server_round):
            return [Exchange({}, read, self.step), *norm_exchanges(self)]
    """
    if strategy.norm_statistics == "average":
        return []
    exchange = Exchange(
        {"job": "norm-statistics"},
        _READ,
        _step,
        clients="previous",
        additive=Summation(),
        name=NAME,
        optional=True,
    )
    trained = strategy.moves_norms

    def prepared(before: ServerState, now: ServerState) -> Exchange[Additive] | None:
        """Ask for the norms that the round has moved.

        If no training moves statistics, a norm is measured if its own parameters have
        changed, also one that clients do not train.
        """
        both = before.params, now.params
        prefixes = batch_norms.moved_norms(*both, in_eval=not trained)
        if not prefixes:
            return None
        options = {**exchange.options, "norms": prefixes, "frozen": trained}
        read = partial(_read, frozenset(prefixes))
        return replace(exchange, options=options, read=read)

    return [replace(exchange, prepare=prepared)]


def _read(prefixes: Set[str], record: ArrayRecord, like: Params) -> Additive:
    upload = _READ(record, like)
    shifts = upload.part(NORMS)
    wanted = batch_norms.zero_shifts(like, prefixes)
    check_same_keys(shifts.keys(), wanted.keys(), f"{NORMS}/")
    try:
        batch_norms.check_shifts(shifts)
    except ParamsError as error:
        raise WireError(str(error), field=NORMS) from error
    return upload


def _step(state: ServerState, uploads: Uploads[Additive]) -> Step:
    """Set the norms to the statistics of all clients' inputs."""
    every = [double(upload.payload.part(NORMS)) for upload in uploads]
    shifts = weighted_mean(every, weights_of(uploads))
    params = batch_norms.with_shifts(state.params, shifts)
    # A module's own `running_mean` is measured by no client, and neither is an unused
    # norm's: their shifts are 0.
    moved = {name: shift for name, shift in shifts.items() if shift.any()}
    metrics = {"num-norms-refreshed": len(batch_norms.norms_of(moved))}
    return Step(ServerState(params, state.groups), metrics, quiet=True)
