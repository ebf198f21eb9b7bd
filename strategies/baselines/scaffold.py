"""SCAFFOLD: control variates against the drift of clients' local steps."""

from collections.abc import Sequence
from typing import Any

from flwr_fisher.errors import check_range
from flwr_fisher.params import double, norm
from flwr_fisher.rounds import scaffold_step
from flwr_fisher.rounds.updates import updates, with_averages
from flwr_fisher.server.exchange import (
    Exchange,
    Groups,
    ServerState,
    Step,
    Uploads,
    weights_of,
)
from flwr_fisher.server.membership import Membership, lost_states
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.wire import Additive

_CONTROL, _MEMBERSHIP = "control", "membership"


class Scaffold(CurvatureStrategy):
    r"""Stochastic controlled averaging (Karimireddy et al., ICML 2020).

    Algorithm 1, option II. A client's steps follow :math:`g_i(y) - c_i + c`; then

    .. math:: c_i^+ = c_i - c + \frac{\theta - \theta_i}{K \eta_l}, \qquad
              \theta \leftarrow \theta - \eta_g \sum_{i \in S} p_i (\theta - \theta_i),
              \qquad c \leftarrow c + \frac{|S|}{N} \sum_{i \in S} p_i (c_i^+ - c_i)

    so that clients with unlike data agree on one optimum, however long they train.
    FedAvg's result is another one.

    Clients must train with ``LocalSGD(momentum=0)``, and upload twice a model's size.
    Each keeps :math:`c_i` on its own disk (``FisherClient(state_dir=...)``). With a
    request, the server names the last round from which it has the client's reply. So a
    round that failed, was repeated, or lost a reply leaves no trace in :math:`c_i`.

    Parameters
    ----------
    server_lr : float, default 1.0
        :math:`\eta_g`.
    **kwargs
        :class:`CurvatureStrategy`'s: FedAvg's sampling keywords and ``seed``.

    Raises
    ------
    ConfigurationError
        If an argument is out of range.

    Notes
    -----
    The paper weights clients equally. Here :math:`c` is the mean of all clients'
    :math:`c_i` weighted by their examples, as the model is, so that the optimum is that
    of the mean over examples. For the paper's method, give all clients the same weight.
    Accordingly, :math:`|S|/N` is the cohort's share of all clients' weight. N is the
    number of nodes that are connected, or of those that have taken part, whichever is
    larger. Nodes that have never replied count with the mean weight of the others. When
    the server knows more, it rescales :math:`c`.

    A client whose disk lost its :math:`c_i` starts from zero, and its log says so. What
    it had added to :math:`c` stays there, and shifts the optimum: look at
    ``num-lost-states`` among a round's metrics. Another metric is ``control-norm``. If
    the policy cuts a change of :math:`c_i`, the client's next request says so, and the
    client keeps the same part of the change. So :math:`c` remains the mean of all
    :math:`c_i`, and the optimum is that of all clients' data. Buffers are averaged.
    ``CurvatureResult.details`` is :math:`c`, by parameter.

    Examples
    --------
    ::

        strategy = Scaffold(fraction_train=0.2)
        result = strategy.start(grid, ArrayRecord(shared_state(model)), num_rounds=100)
    """

    def __init__(self, *, server_lr: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("server_lr", server_lr, 0)
        self.server_lr = server_lr

    def initial_groups(self) -> Groups:
        """Return the run's number, under which clients keep their state."""
        return {_MEMBERSHIP: Membership.new().to_tensors()}

    def exchanges(self, server_round: int) -> Sequence[Exchange[Additive]]:
        """Return one exchange: training with corrected steps."""
        read = Additive.reader("params", _CONTROL)
        request = {"job": "scaffold"}
        return [Exchange(request, read, self._step, send=_send, kept=_CONTROL)]

    def _step(self, state: ServerState, uploads: Uploads[Additive]) -> Step:
        """Return a step to the mean model, with the new control variate."""
        weights = weights_of(uploads)
        changes = [upload.payload.part(_CONTROL) for upload in uploads]
        models = [upload.payload.part("params") for upload in uploads]
        before = Membership.from_tensors(state.group(_MEMBERSHIP))
        members = before.after(uploads, self.cohort.connected)
        names = changes[0].keys()
        known = state.group(_CONTROL) if before.steps else changes[0]
        stepped, control = scaffold_step(
            double(state.params, names),
            members.rescaled(double(known, names), before),
            updates(state.params, models, names),
            [double(change, names) for change in changes],
            weights,
            participation=members.participation(weights),
            lr=self.server_lr,
        )
        control = {n: v.to(changes[0][n].dtype) for n, v in control.items()}
        groups = {_MEMBERSHIP: members.to_tensors(), _CONTROL: control}
        params = with_averages(state.params, stepped, models, weights)
        lost = lost_states(uploads)
        metrics = {
            "num-lost-states": lost,
            "control-norm": float(norm(double(control, names))),
        }
        return Step(ServerState(params, groups), metrics, control)

    def settings(self) -> dict[str, Any]:
        """Return this strategy's own settings."""
        return {"server_lr": self.server_lr}


def _send(state: ServerState) -> Groups:
    """Return the control variate, and the tensors by which a client finds its own."""
    membership = Membership.from_tensors(state.group(_MEMBERSHIP))
    return {"": membership.sent(), _CONTROL: state.group(_CONTROL)}
