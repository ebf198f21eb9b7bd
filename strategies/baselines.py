"""The methods with which the four algorithms are compared: FedAvg, SCAFFOLD, AFL."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flwr_fisher.errors import ConfigurationError, check_range
from flwr_fisher.params import double, norm, subtract, weighted_mean
from flwr_fisher.rounds import scaffold_step
from flwr_fisher.server.exchange import (
    Exchange,
    Groups,
    ServerState,
    Step,
    Summation,
    Uploads,
    mean_vector,
)
from flwr_fisher.server.membership import Membership, lost_states
from flwr_fisher.server.privacy import Privacy
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.strategies.exchanges.refinement import (
    check_pretrained,
    head_exchange,
    head_first,
    refinements,
    training_options,
)
from flwr_fisher.wire import Additive

_CONTROL, _MEMBERSHIP = "control", "membership"


class FedAvg(CurvatureStrategy):
    """FedAvg (McMahan et al., AISTATS 2017): the mean of the clients' models.

    The mean is the same as that of Flower's ``FedAvg``. As with all strategies of this
    library, a seed gives the same run again, a run survives a crash, and the server
    checks every reply. With `secure` the server sees the mean and no client's model.
    The clients may be of any kind, but their ``ClientApp`` must have a
    :class:`~flwr_fisher.secure.SecureSumsMod`. (Flower's own secure aggregation needs
    its legacy API.)

    Parameters
    ----------
    privacy : Privacy, optional
        With `secure`: DP-FedAvg (McMahan, Ramage, Talwar & Zhang, ICLR 2018). Each
        client clips its step, which counts once, and adds a share of the noise. Without
        secure sums, Flower's own ``FedAvg`` in its
        ``DifferentialPrivacyServerSideFixedClipping`` does the same.
    pretrained : bool, default False
        As for :class:`FedFisherOneShot`; it needs ``refine=Refinement()``.
    **kwargs
        :class:`CurvatureStrategy`'s: Flower's FedAvg's sampling keywords, ``seed`` and
        ``secure``.

    Raises
    ------
    ConfigurationError
        If an argument is out of range, or if there is `privacy` without `secure`.

    Notes
    -----
    FedProx (Li et al., MLSys 2020) is FedAvg with another training on the clients. For
    FedProx, start this strategy with
    ``train_config=ConfigRecord({"proximal-mu": 0.1})``. Flower's ``FedProx`` sends the
    same, and :class:`~flwr_fisher.client.LocalSGD` follows it.

    Examples
    --------
    ::

        app = make_client_app(client_fn, mods=[SecureSumsMod()])  # on the clients
        strategy = FedAvg(fraction_train=0.5, secure=SecureSums())
        result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=10)
    """

    def __init__(
        self, *, privacy: Privacy | None = None, pretrained: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.pretrained = check_pretrained(self, pretrained)
        self.privacy = privacy if privacy is None else Privacy.of("privacy", privacy)
        if privacy is not None and self.secure is None:
            raise ConfigurationError(
                "privacy= needs secure=SecureSums(), because clients add their noise "
                "to a secure sum"
            )
        more = self.norm_statistics == "refresh" or self.refine is not None
        if privacy is not None and more:
            raise ConfigurationError(
                "norm_statistics='refresh' or refine= with privacy=: clients would "
                "send sums without noise; leave both out"
            )

    def exchanges(self, server_round: int) -> Sequence[Exchange[Additive]]:
        """Return one exchange, which asks the sampled clients to train."""
        step = mean_model if self.privacy is None else _add
        mean = Summation[Additive](privacy=self.privacy)
        options = training_options(self)
        exchange = Exchange(options, Additive.reader("params"), step, additive=mean)
        first = head_first(self, server_round)
        return [*first, exchange, *refinements(self, server_round)]

    def settings(self) -> dict[str, Any]:
        """Return this strategy's own settings."""
        settings = {} if self.privacy is None else self.privacy.settings()
        privacy = {f"privacy.{name}": value for name, value in settings.items()}
        return {**privacy, **training_options(self)}


def mean_model(state: ServerState, uploads: Uploads[Additive]) -> Step:
    """Return a step to the mean of the clients' models, with all groups of tensors."""
    return Step(ServerState(mean_vector(uploads, "params"), state.groups))


def _add(state: ServerState, uploads: Uploads[Additive]) -> Step:
    """Return a step by the mean of the clients' steps; integers do not change.

    Nor does a variance of a norm where the noise would make it 0 or less.
    """
    (summed,) = uploads
    step = summed.payload.part("params")
    old = state.params.items()
    params = {k: v + step[k] if v.is_floating_point() else v for k, v in old}
    variances = [name for name in params if name.endswith("running_var")]
    params |= {k: params[k].where(params[k] > 0, state.params[k]) for k in variances}
    model = replace(summed, payload=Additive({"params": params}))  # as without privacy
    return Step(ServerState(params), summed=model)


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
    A client keeps the weight of its first round: if it would have more later, the log
    says so, and the optimum is that of the first weights. If the policy allows less in
    a round, the client's change counts by as much less there. Accordingly,
    :math:`|S|/N` is the cohort's share of all clients' weight. N is the number of nodes
    that are connected, or of those that have taken part, whichever is larger. Nodes
    that have never replied count with the mean weight of the others. When the server
    knows more, it rescales :math:`c`.

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
        exchange = Exchange(request, read, self._step, send=_send, kept=_CONTROL)
        return [exchange, *refinements(self, server_round)]

    def _step(self, state: ServerState, uploads: Uploads[Additive]) -> Step:
        """Return a step to the mean model, with the new control variate."""
        changes = [upload.payload.part(_CONTROL) for upload in uploads]
        models = [upload.payload.part("params") for upload in uploads]
        before = Membership.from_tensors(state.group(_MEMBERSHIP))
        members = before.after(uploads, self.cohort.connected)
        weights = members.weights_of(uploads)
        names = changes[0].keys()
        known = state.group(_CONTROL) if before.steps else changes[0]
        start = double(state.params, names)
        stepped, control = scaffold_step(
            start,
            members.rescaled(double(known, names), before),
            [subtract(start, double(params, names)) for params in models],
            [double(change, names) for change in changes],
            weights,
            participation=members.participation(weights),
            lr=self.server_lr,
        )
        control = {n: v.to(changes[0][n].dtype) for n, v in control.items()}
        groups = {_MEMBERSHIP: members.to_tensors(), _CONTROL: control}
        averaged = weighted_mean(models, weights)
        params = {
            k: stepped[k].to(v.dtype) if k in stepped else averaged[k]
            for k, v in state.params.items()
        }
        length = float(norm(double(control, names)))
        metrics = {"num-lost-states": lost_states(uploads), "control-norm": length}
        return Step(ServerState(params, groups), metrics, control)

    def settings(self) -> dict[str, Any]:
        """Return this strategy's own settings."""
        return {"server_lr": self.server_lr}


def _send(state: ServerState) -> Groups:
    """Return the control variate, and the tensors by which a client finds its own."""
    membership = Membership.from_tensors(state.group(_MEMBERSHIP))
    return {"": membership.sent(), _CONTROL: state.group(_CONTROL)}


class AFL(CurvatureStrategy):
    r"""Analytic federated learning (He et al., CVPR 2025): a head in closed form.

    Clients do not train. Each sends :math:`\sum x x^\top` and :math:`\sum x y^\top`
    over the features x of its data, the inputs of the model's last linear layer, and
    one-hot labels y; the server sets that layer to the pooled data's ridge regression,

    .. math:: W = \Big(\sum x x^\top + \lambda I\Big)^{-1} \sum x y^\top,

    which is the same however the data are split. The rest of the model is a frozen
    backbone. AFL is the right method if that backbone is good, such as one that was
    pre-trained on public images. It takes one round; a second would give the same.

    Difference from the paper: there, clients send their own solutions, from which the
    server computes the same head. Here they send the sums, so that `secure` can add
    them.

    Parameters
    ----------
    ridge : float, optional
        :math:`\lambda` as a share of the mean diagonal entry of :math:`\sum x x^\top`
        over the features. Default: the one of least generalised cross-validation error
        (:func:`flwr_fisher.tangent.chosen_ridge`), from the sums.
    head : str, optional
        The linear layer to set; by default the one that computes the outputs.
    **kwargs
        :class:`CurvatureStrategy`'s: FedAvg's sampling keywords, ``seed``, ``secure``.

    Raises
    ------
    ConfigurationError
        If an argument is out of range.

    Notes
    -----
    An upload has 4 (f + 1) (f + 2) + 8 (f + 1) C bytes for f features, C classes, and
    no parameters.

    Examples
    --------
    ::

        strategy = AFL(fraction_evaluate=0.0)
        result = strategy.start(grid, ArrayRecord(shared_state(pretrained)))
    """

    def __init__(
        self, *, ridge: float | None = None, head: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.check_weighted_by_examples("AFL")
        if ridge is not None:
            check_range("ridge", ridge, 0)
        self.ridge, self.head = ridge, head

    def exchanges(self, server_round: int) -> Sequence[Exchange[Any]]:
        """Return one exchange, which asks for sums over every client's data."""
        exchange = head_exchange(ridge=self.ridge, head=self.head)
        return [exchange, *refinements(self, server_round)]

    def settings(self) -> dict[str, Any]:
        """Return this strategy's own settings."""
        return {"ridge": self.ridge, "head": self.head}
