"""FedExP: federated averaging with a server step beyond the mean."""

from collections.abc import Sequence
from typing import Any

from flwr_fisher.errors import check_range
from flwr_fisher.params import (
    Params,
    add,
    dot,
    double,
    finite,
    select,
    shares_of,
    subtract,
    weighted_mean,
)
from flwr_fisher.rounds import stepped_names
from flwr_fisher.strategies import (
    CurvatureStrategy,
    Exchange,
    ServerState,
    Step,
    Upload,
)
from flwr_fisher.wire import Additive


def fedexp_rate(
    updates: Sequence[Params], weights: Sequence[float], *, epsilon: float
) -> float:
    r"""Return FedExP's server rate, 1 or more; 1 is FedAvg.

    .. math:: \eta_g = \max\Big(1, \frac{\sum_i p_i \|\Delta_i\|^2}
              {2 (\|\bar\Delta\|^2 + \epsilon)}\Big), \qquad
              \bar\Delta = \sum_i p_i \Delta_i

    (Jhunjhunwala, Wang & Joshi, "FedExP: Speeding Up Federated Averaging via
    Extrapolation", ICLR 2023, Algorithm 1.) The paper has equal clients. Its released
    code weights them as here, and multiplies :math:`\epsilon` by their number.
    """
    mean = weighted_mean(updates, weights)
    pairs = zip(shares_of(weights), updates, strict=True)
    squares = sum(share * float(dot(update, update)) for share, update in pairs)
    below = 2 * (float(dot(mean, mean)) + epsilon)
    return max(1.0, squares / below) if below > 0 else 1.0


class FedExP(CurvatureStrategy):
    """Train as FedAvg does, and step beyond the mean where clients disagree.

    Parameters
    ----------
    epsilon : float, default 1e-3
        On the scale of a squared update; the default is the paper's.
    average_last_two : bool, default False
        Report the mean of the last two iterates, as the paper does, because
        extrapolated iterates oscillate. Training goes on from the last.
    **kwargs
        :class:`CurvatureStrategy`'s.
    """

    def __init__(
        self, *, epsilon: float = 1e-3, average_last_two: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        check_range("epsilon", epsilon, 0)
        self.epsilon, self.average_last_two = epsilon, average_last_two

    def exchanges(self, server_round: int) -> Sequence[Exchange[Additive]]:
        """Ask for a training from the last iterate."""
        read = Additive.reader("params")
        return [Exchange({}, read, self._step, start=_iterate)]

    def _step(self, state: ServerState, uploads: Sequence[Upload[Additive]]) -> Step:
        start = _iterate(state)
        weights = [upload.num_examples for upload in uploads]
        models = [upload.payload.part("params") for upload in uploads]
        names = stepped_names(start)
        before = double(start, names)
        updates = [subtract(before, double(model, names)) for model in models]
        rate = fedexp_rate(updates, weights, epsilon=self.epsilon)
        stepped = add(before, weighted_mean(updates, weights), -rate)
        averaged = weighted_mean(models, weights)  # of which the buffers stay
        new = finite({**averaged, **stepped}, "the new model")
        last = {name: new[name].to(value.dtype) for name, value in start.items()}
        metrics = {"server-lr": rate}
        if not self.average_last_two:
            return Step(ServerState(last), metrics)
        two = [last, start] if state.groups else [last]
        mean = weighted_mean(two, [1.0] * len(two))
        return Step(ServerState(mean, {"iterate": dict(last)}), metrics)

    def settings(self) -> dict[str, Any]:
        """Return the options that a resumed run must have alike."""
        return {"epsilon": self.epsilon, "average_last_two": self.average_last_two}


def _iterate(state: ServerState) -> Params:
    """Return the last iterate, where clients start; the result may be another."""
    return select(state.group("iterate") or state.params, state.params)
