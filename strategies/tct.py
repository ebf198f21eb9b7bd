"""TCT: FedAvg in stage 1, and a convex problem on its network's features in stage 2."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from flwr.app import ConfigRecord

from flwr_fisher.errors import CheckpointError, ConfigurationError, check_whole
from flwr_fisher.randomness import derive_seed
from flwr_fisher.server.exchange import (
    Exchange,
    Groups,
    ServerState,
    Step,
    Summation,
    Uploads,
)
from flwr_fisher.server.membership import Membership
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.strategies.baselines import mean_model
from flwr_fisher.strategies.exchanges.refinement import refinements
from flwr_fisher.strategies.exchanges.tct_regression import (
    MEMBERSHIP,
    Regression,
    agree_on_rate,
    average,
    network,
    rate_of,
    send,
    standardise_features,
)
from flwr_fisher.tangent import check_lr
from flwr_fisher.wire import Additive, named_options
from flwr_fisher.wire.tct_upload import (
    KEYS,
    EigenvalueCounts,
    EigenvalueUpload,
    FeatureUpload,
    WeightUpload,
)


class TCT(CurvatureStrategy):
    r"""Train, convexify, train (Yu, Wei, Karimireddy, Ma & Jordan, NeurIPS 2022).

    *TCT: Convexifying Federated Learning using Bootstrapped Neural Tangent Kernels.*

    **Stage 1**, `stage1_rounds` rounds: FedAvg trains the network to :math:`\theta`.
    **Convexify**, one round with every client that is connected: a fresh layer with a
    single output :math:`f_1` replaces the network's last layer, and clients agree on
    the mean and deviation of each of the p features
    :math:`\phi(x) = \partial f_1(x) / \partial \theta` over all their examples. **Stage
    2**, the remaining rounds: linear regression of the labels (one-hot, minus
    :math:`1/C`) on the standardised features Z,

    .. math:: \min_{\Theta \in \mathbb{R}^{p \times C}} \sum_i p_i
              \frac{1}{2 n_i} \| Z_i \Theta - Y_i \|^2 ,

    by M full-batch steps a round and client, :math:`\Theta \leftarrow \Theta - \eta
    (Z_i^\top (Z_i \Theta - Y_i) / n_i - c_i + c)`, corrected as in SCAFFOLD. The
    problem is convex, and clients with unlike data reach one optimum. A client takes
    the M steps at once, in closed form (:func:`flwr_fisher.tangent.tct_update`).

    From the convexifying round on, the arrays are those of a
    :class:`~flwr_fisher.tangent.TCTModel`: the network's, and ``tct/…``. This holds for
    the result, for what `evaluate_fn` gets, and for what clients evaluate.

    Parameters
    ----------
    stage1_rounds : int, default 20
        The paper takes 100. With 0, `initial_arrays` must be a trained network's, from
        an earlier run of any strategy or from pre-training.
    num_features : int, default 20000
        p. The paper takes 100 000. If the network has fewer parameters, all are taken.
    local_steps : int, default 500
        M.
    lr : float, optional
        :math:`\eta`. Default: the paper's 5 / p, but no more than
        :math:`1 / \lambda_\max`, where :math:`\lambda_\max` is the largest eigenvalue
        of :math:`Z_i Z_i^\top / n_i` at any client.
    regression : Regression, optional
        Which features, and how clients take the steps.
    **kwargs
        :class:`CurvatureStrategy`'s: FedAvg's sampling keywords and ``seed``, which
        also determines features.

    Raises
    ------
    ConfigurationError
        If an argument is out of range, or there are too few rounds. Before stage 2, if
        `lr` is 2 / λ_max or more for half of the clients. The error names them and the
        largest safe rate. With ``checkpoint_dir``, resume with another `lr`: the server
        repeats no request.

    Notes
    -----
    Clients keep features (``FisherClient(state_bytes=...)`` bounds them) and control
    variates on their disks. Clients that are absent in some rounds, or lose their
    state, are treated as in :class:`Scaffold`. A client that was absent, or failed,
    when features were standardised can join later: its features are standardised as the
    others' are. If the rate is too large for a client's features, the client takes
    shorter steps, and accordingly more of them. In stage 2 a client uploads only
    :math:`\Theta_i`. A client with more than 20 000 examples fails in the first round,
    because its spectrum would take too long; with ``Regression(solver="steps")`` it
    takes part.

    Metrics of a round: ``stage``, 1 or 2. In stage 2 also ``lr``, ``num-lost-states``,
    ``control-norm`` and ``train_loss``, half the mean squared error at the round's
    start. In the convexifying round also ``num-features``, ``lr`` and
    ``largest-eigenvalue``. ``state-lost`` is the share of clients that lost their
    state. Clients that evaluate in stage 2 report their `loss_fn` of the regression's
    scores, which are no logits: look at ``accuracy``. ``CurvatureResult.details`` is
    :math:`c`.

    A resumed run continues bit for bit, in either stage.

    Examples
    --------
    ::

        start = ArrayRecord(shared_state(model))
        result = TCT(fraction_train=0.4).start(grid, start, num_rounds=50)
        tensors = result.arrays.to_torch_state_dict()
        TCTModel.from_tensors(model, tensors).save("tct.safetensors")

    After another strategy than FedAvg::

        trained = Scaffold(fraction_train=0.4).start(grid, start, num_rounds=20).arrays
        result = TCT(stage1_rounds=0).start(grid, trained, num_rounds=30)
    """

    grouped: ClassVar[Mapping[str, str]] = {
        name: f"regression=Regression({name}=…)" for name in Regression.names()
    }

    def __init__(
        self,
        *,
        stage1_rounds: int = 20,
        num_features: int = 20_000,
        local_steps: int = 500,
        lr: float | None = None,
        regression: Regression | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if self.refine is not None:
            raise ConfigurationError(
                "refine= with TCT: its last rounds fit another model; leave refine out"
            )
        self.check_weighted_by_examples("TCT")
        check_whole("stage1_rounds", stage1_rounds, 0)
        check_whole("num_features", num_features, 1)
        check_whole("local_steps", local_steps, 1)
        if lr is not None:
            check_lr(lr, 0.0)
        self.stage1_rounds, self.num_features = stage1_rounds, num_features
        self.local_steps, self.lr = local_steps, lr
        self.regression = Regression.of("regression", regression)
        self._features_seed = derive_seed(self.seed, "features")  # clients use the same

    def check(self, state: ServerState) -> None:
        """Raise an error for too few rounds, or for another `lr` than the run's."""
        fewest = self.stage1_rounds + 2
        if self.num_rounds < fewest:
            raise ConfigurationError(
                f"num_rounds={self.num_rounds} leaves no round of stage 2: "
                f"stage1_rounds={self.stage1_rounds} and the convexifying round need "
                f"at least num_rounds={fewest}"
            )
        agreed = rate_of(state)
        if agreed is not None and self.lr not in (None, agreed):
            raise CheckpointError(
                f"this run's stage 2 began with lr={agreed}, not {self.lr}: pass "
                f"lr={agreed}, or leave lr out"
            )

    def may_skip(self, server_round: int) -> bool:
        """Return whether a run can skip a round: every one but the convexifying one."""
        return server_round != self.stage1_rounds + 1

    def initial_groups(self) -> Groups:
        """Return the run's number, under which clients keep their state."""
        return {MEMBERSHIP: Membership.new().to_tensors()}

    def exchanges(self, server_round: int) -> Sequence[Exchange[Any]]:
        """Return a round's exchanges: training, features and eigenvalues, or a step."""
        if server_round <= self.stage1_rounds:
            return [self._training(), *refinements(self, server_round)]
        if server_round == self.stage1_rounds + 1:
            return self._convexifying()
        weights = Exchange(
            self._features() | {"job": "tct-step", "local-steps": self.local_steps},
            WeightUpload.read,
            self._average,
            send,
            network,
            additive=Summation(),
            kept=f"{KEYS}weight",
        )
        return [weights]

    def _training(self) -> Exchange[Additive]:
        """Return one exchange: training of the clients that can also do stage 2."""
        # Stage 1 would be useless without any client for stage 2.
        return Exchange(
            self._features() | {"check": "tct-check", "local-steps": self.local_steps},
            Additive.reader("params"),
            _mean_model,
            additive=Summation(),
        )

    def _convexifying(self) -> Sequence[Exchange[Any]]:
        """Return the exchanges of the convexifying round, which ask all clients."""
        config, options = self._features(), self.regression
        of_all = partial(Exchange[Any], send=send, start=network, clients="all")
        features = of_all(
            config | {"job": "tct-features"},
            partial(FeatureUpload.read, p=self.num_features),
            partial(
                standardise_features,
                seed=self._features_seed,
                standardise=options.standardise,
            ),
            additive=Summation(weighted=False, bits=64),
        )
        # The largest of all clients' eigenvalues is no sum, but a histogram has one.
        if self.secure is not None:
            config["aggregate"] = "sums"
        spectrum = of_all(
            config | {"job": "tct-spectrum"},
            EigenvalueUpload.read,
            partial(agree_on_rate, lr=self.lr, control=options.control_variates),
            additive=Summation[Any](False, read=EigenvalueCounts.read, bits=64),
        )
        return [features, spectrum]

    def _features(self) -> dict[str, Any]:
        """Return the options that define the features and their use."""
        return {
            "num-features": self.num_features,
            "head": self.regression.head or "",
            "solver": self.regression.solver,
            "feature-dtype": self.regression.feature_dtype,
            "features-seed": self._features_seed,
        }

    def _average(self, state: ServerState, uploads: Uploads[WeightUpload]) -> Step:
        connected = self.cohort.connected
        return average(state, uploads, connected, local_steps=self.local_steps)

    def evaluation_config(
        self, server_round: int, config: ConfigRecord
    ) -> ConfigRecord:
        """Return the config for evaluating the network, or the regression."""
        if server_round > self.stage1_rounds:
            config = ConfigRecord({**config, **named_options({"job": "tct-evaluate"})})
        return config

    def settings(self) -> dict[str, Any]:
        """Return this strategy's settings, without `lr`, which is agreed in the run."""
        return {
            "stage1_rounds": self.stage1_rounds,
            "num_features": self.num_features,
            "local_steps": self.local_steps,
            **self.regression.settings(),
        }


def _mean_model(state: ServerState, uploads: Uploads[Additive]) -> Step:
    """Return a step to FedAvg's mean, with the stage among the metrics."""
    return replace(mean_model(state, uploads), metrics={"stage": 1})
