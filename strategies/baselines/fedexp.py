"""FedExP: federated averaging with a server step beyond the mean."""

from collections.abc import Collection, Sequence
from typing import Any

from flwr_fisher.errors import ConfigurationError, check_range
from flwr_fisher.params import Params, double
from flwr_fisher.rounds import fedexp_step, last_two_mean, stepped_names
from flwr_fisher.rounds.updates import updates, with_averages
from flwr_fisher.server.exchange import Exchange, ServerState, Step, Uploads, weights_of
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.wire import Additive

_ITERATE = "iterate"


class FedExP(CurvatureStrategy):
    r"""Federated averaging with extrapolation (Jhunjhunwala et al., ICLR 2023).

    Algorithm 1 of *FedExP: Speeding Up Federated Averaging via Extrapolation*: clients
    train as usual, with any loop, and the server takes the step

    .. math:: \theta \leftarrow \theta - \eta_g \bar\Delta, \qquad
              \eta_g = \max\Big(1, \frac{\sum_i p_i \|\Delta_i\|^2}
              {2 (\|\bar\Delta\|^2 + \epsilon)}\Big)

    with :math:`\Delta_i = \theta - \theta_i` and clients weighted by examples. Uploads
    are FedAvg's.

    Parameters
    ----------
    epsilon : float, default 1e-3
        :math:`\epsilon`. The default is the paper's. Its scale is that of a squared
        update.
    average_last_two : bool, default False
        Report and evaluate the mean of the last two iterates, as the paper does,
        since extrapolated iterates oscillate. Training goes on from the last.
    trained : Collection[str], optional
        The names of the trained parameters (``trainable_names(model)``): the norms are
        taken over them, and buffers are averaged. By default, these are all
        floating-point tensors except those that are named like the statistics of
        torch's batch norm.
    **kwargs
        :class:`CurvatureStrategy`'s: FedAvg's sampling keywords and ``seed``.

    Raises
    ------
    ConfigurationError
        If an argument is out of range, or the model lacks a parameter of `trained`.

    Notes
    -----
    A round's metrics have ``server-lr``, :math:`\eta_g`; 1 is FedAvg.
    ``CurvatureResult.details`` is the last :class:`~flwr_fisher.rounds.FedExpStep`,
    with the last iterate's trained parameters. With ``average_last_two`` the
    checkpoints keep both iterate and mean; clients evaluate the mean.

    Examples
    --------
    ::

        strategy = FedExP(fraction_train=0.2)
        result = strategy.start(grid, ArrayRecord(shared_state(model)), num_rounds=100)
    """

    def __init__(
        self,
        *,
        epsilon: float = 1e-3,
        average_last_two: bool = False,
        trained: Collection[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_range("epsilon", epsilon, 0)
        self.epsilon, self.average_last_two = epsilon, average_last_two
        self.trained = None if trained is None else sorted(trained)

    def check(self, state: ServerState) -> None:
        """Raise an error for names that the model does not have."""
        missing = [n for n in self.trained or () if n not in state.params]
        if missing:
            raise ConfigurationError(
                f"trained names {missing}, which the model lacks: pass names of its "
                "parameters"
            )

    def exchanges(self, server_round: int) -> Sequence[Exchange[Additive]]:
        """Return one exchange, which asks the sampled clients to train."""
        read = Additive.reader("params")
        return [Exchange({}, read, self._step, start=_iterate)]

    def _step(self, state: ServerState, uploads: Uploads[Additive]) -> Step:
        """Return the extrapolated step along the mean update."""
        start, weights = _iterate(state), weights_of(uploads)
        names = stepped_names(start, self.trained)
        models = [upload.payload.part("params") for upload in uploads]
        step = fedexp_step(
            double(start, names),
            updates(start, models, names),
            weights,
            epsilon=self.epsilon,
        )
        last = with_averages(start, step.params, models, weights)
        metrics = {"server-lr": step.lr}
        if not self.average_last_two:
            return Step(ServerState(last), metrics, step)
        mean = last_two_mean(last, start if state.groups else None)
        iterate = {key: value.clone() for key, value in last.items()}
        return Step(ServerState(mean, {_ITERATE: iterate}), metrics, step)

    def settings(self) -> dict[str, Any]:
        """Return this strategy's own settings."""
        return {
            "epsilon": self.epsilon,
            "average_last_two": self.average_last_two,
            "trained": self.trained,
        }


def _iterate(state: ServerState) -> Params:
    """Return the last iterate, where clients start; the result may be another."""
    return state.group(_ITERATE) or state.params
