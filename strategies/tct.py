"""TCT: any strategy first, and then a convex problem on its network's features.

Long: half of it is the docstring of a strategy with two stages and their options.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg, Strategy

from flwr_fisher.errors import (
    CheckpointError,
    ConfigurationError,
    check_known,
    check_whole,
)
from flwr_fisher.log_lines import logger
from flwr_fisher.randomness import derive_seed, seed_of_clients
from flwr_fisher.server.driver import Driver
from flwr_fisher.server.exchange import (
    Exchange,
    Groups,
    ServerState,
    Step,
    Summed,
    Uploads,
)
from flwr_fisher.server.membership import Membership
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.strategies.baselines.repeatable import Repeatable
from flwr_fisher.strategies.baselines.secure_fedavg import SecureFedAvg
from flwr_fisher.strategies.exchanges.tct_first_stage import FirstStage
from flwr_fisher.strategies.exchanges.tct_regression import (
    MEMBERSHIP,
    agree_on_rate,
    average,
    network,
    rate_of,
    send,
    standardise_features,
)
from flwr_fisher.tangent import check_lr
from flwr_fisher.wire import named_options
from flwr_fisher.wire.tangent_sums import read_eigenvalues, read_moment_sums
from flwr_fisher.wire.tangent_upload import (
    KEYS,
    TangentUpload,
    read_local_weight,
    read_moments,
    read_spectrum,
)

_SOLVERS, _DTYPES = ("closed-form", "steps"), ("float32", "float16")


class TCT(CurvatureStrategy):
    r"""Train, convexify, train (Yu, Wei, Karimireddy, Ma & Jordan, NeurIPS 2022).

    *TCT: Convexifying Federated Learning using Bootstrapped Neural Tangent Kernels.*

    **Stage 1**, `stage1_rounds` rounds: any strategy trains the network to
    :math:`\theta`. **Convexify**, one round with every client that is connected: the
    network's last layer gives way to a fresh one with a single output :math:`f_1`, and
    clients agree on the mean and deviation of each of the p features
    :math:`\phi(x) = \partial f_1(x) / \partial \theta` over all their examples.
    **Stage 2**, the rounds that are left: linear regression of one-hot labels less
    :math:`1/C` on the standardised features Z,

    .. math:: \min_{\Theta \in \mathbb{R}^{p \times C}} \sum_i p_i
              \frac{1}{2 n_i} \| Z_i \Theta - Y_i \|^2 ,

    by M full-batch steps a round and client, :math:`\Theta \leftarrow \Theta - \eta
    (Z_i^\top (Z_i \Theta - Y_i) / n_i - c_i + c)`, corrected as SCAFFOLD's; it is
    convex, and clients of unlike data reach one optimum. The M steps are taken at once,
    in closed form (:func:`flwr_fisher.tangent.tct_update`).

    The result's arrays are a :class:`~flwr_fisher.tangent.TCTModel`'s, network and
    ``tct/…``, from the convexifying round on, also those that `evaluate_fn` gets and
    clients evaluate.

    Parameters
    ----------
    stage1 : Strategy, optional
        Any Flower strategy whose rounds have one exchange: Flower's own, also in
        :class:`Repeatable`, or :class:`Scaffold`, …. It samples clients and evaluates
        by its own keywords. Default: Flower's ``FedAvg`` with those given here.
    stage1_rounds : int, default 20
        The paper's is 100. With 0, `initial_arrays` are the network: pre-trained.
    num_features : int, default 20000
        p, the paper's is 100 000; all, where the network has fewer parameters.
    local_steps : int, default 500
        M.
    lr : float, optional
        :math:`\eta`. Default: 5 / p, the paper's, but no more than
        :math:`1 / \lambda_\max`, of the largest eigenvalue that
        :math:`Z_i Z_i^\top / n_i` has at any client.
    head : str, optional
        The name of the layer to replace, an ``nn.Linear``. Default: the last one.
    solver : "closed-form" | "steps", default "closed-form"
        How clients take the M steps. One by one takes M passes over the features in
        place of three, and has no bound on a client's examples.
    control_variates : bool, default True
        Without them stage 2 is FedAvg, or with ``local_steps=1`` gradient descent.
    standardise : bool, default True
        Whether features are standardised. (Without it, a larger `lr` is called for.)
    feature_dtype : "float32" | "float16", default "float32"
        In which clients store features; float16 halves their disks' share.
    **kwargs
        :class:`CurvatureStrategy`'s, for stage 2: FedAvg's sampling keywords and
        ``seed``, which also determines features. With `secure`, which needs ``bits=64``
        here, `stage1` must take secure sums itself, as its default then does.

    Raises
    ------
    ConfigurationError
        If an argument is out of range, `stage1` has several exchanges a round, or
        there are too few rounds. Before stage 2, if `lr` is 2 / λ_max or more for half
        of the clients, naming them and the largest that is safe: with
        ``checkpoint_dir``, resume with another `lr`, and nothing is asked again.

    Notes
    -----
    Clients keep features (``FisherClient(cache_bytes=...)`` bounds them) and control
    variates on their disks. Those that are absent in some rounds, or lose their
    state, are treated as by :class:`Scaffold`. A client that was not there, or failed,
    when features were standardised can join later: its features are standardised as
    the others' are. Stage 2 uploads :math:`\Theta_i` alone. A client of more than
    20 000 examples, whose spectrum is out of reach, fails in the first round.

    Metrics of a round: ``stage``, 1 or 2; in stage 2 ``lr``, ``num-lost-states``,
    ``control-norm`` and ``train_loss``, half the mean squared error at the round's
    start; of the convexifying round, ``num-features``, ``lr`` and
    ``largest-eigenvalue``; ``state-lost`` is the share of clients that lost theirs.
    Clients that evaluate in stage 2 report their `loss_fn` of the regression's scores,
    which are no logits: look at ``accuracy``. ``CurvatureResult.details`` is :math:`c`.

    Resumed, stage 2 and stages of this library's strategies continue bit for bit.
    Flower's strategies that keep state of their own (FedAdam, …) start it anew when
    resumed inside stage 1; a warning says so.

    Examples
    --------
    ::

        strategy = TCT(stage1=Scaffold(fraction_train=0.4), fraction_train=0.4)
        result = strategy.start(grid, ArrayRecord(shared_state(model)), num_rounds=50)
        tensors = result.arrays.to_torch_state_dict()
        TCTModel.from_tensors(model, tensors).save("tct.safetensors")
    """

    def __init__(
        self,
        *,
        stage1: Strategy | None = None,
        stage1_rounds: int = 20,
        num_features: int = 20_000,
        local_steps: int = 500,
        lr: float | None = None,
        head: str | None = None,
        solver: str = "closed-form",
        control_variates: bool = True,
        standardise: bool = True,
        feature_dtype: str = "float32",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_whole("stage1_rounds", stage1_rounds, 0)
        check_whole("num_features", num_features, 1)
        check_whole("local_steps", local_steps, 1)
        if lr is not None:
            check_lr(lr, 0.0)
        check_known("solver", solver, _SOLVERS)
        check_known("feature_dtype", feature_dtype, _DTYPES)
        if self.fraction_train == 0.0:
            raise ConfigurationError(
                "fraction_train must be > 0: TCT has no stage 2 without training"
            )
        self.stage1_rounds, self.num_features = stage1_rounds, num_features
        self.local_steps, self.lr, self.head = local_steps, lr, head
        self.solver, self.feature_dtype = solver, feature_dtype
        self._features_seed = derive_seed(self.seed, "features")  # clients know it, too
        self.control_variates, self.standardise = control_variates, standardise
        if stage1 is None:
            same = {name: getattr(self, name) for name in signature(FedAvg).parameters}
            if self.secure is None:
                stage1 = Repeatable(FedAvg(**same), seed=self.seed)
            else:
                stage1 = SecureFedAvg(secure=self.secure, seed=self.seed, **same)
        if self.secure is not None and self.secure.bits != 64:
            raise ConfigurationError(
                f"secure=SecureSums(bits={self.secure.bits}): the squares of TCT's "
                "features span more decades than 32 bits hold; pass SecureSums(bits=64)"
            )
        self.stage1 = FirstStage(
            stage1, self.cohort, self.weighted_by_key, self.policy, self.waiting
        )

    def check_rounds(self, num_rounds: int) -> None:
        """Refuse too few rounds for a stage 2."""
        fewest = self.stage1_rounds + 2
        if num_rounds < fewest:
            raise ConfigurationError(
                f"num_rounds={num_rounds} leaves no round of stage 2: "
                f"stage1_rounds={self.stage1_rounds} and the convexifying round need "
                f"at least num_rounds={fewest}"
            )

    def check(self, state: ServerState) -> None:
        """Refuse another run's learning rate, and a TCT model to start from."""
        if (agreed := rate_of(state)) is None:
            if odd := sorted(k for k in state.params if k.startswith(KEYS)):
                raise ConfigurationError(
                    f"the initial arrays hold {odd}: start from the network alone, "
                    "shared_state(model)"
                )
        elif self.lr not in (None, agreed):
            raise CheckpointError(
                f"this run's stage 2 has begun with lr={agreed}, not {self.lr}:"
                " pass that, or none"
            )

    def may_skip(self, server_round: int) -> bool:
        """Return whether a run can go on without a round: not the convexifying one."""
        return server_round != self.stage1_rounds + 1

    def absences(self) -> dict[str, Any]:
        """Return which clients sit out, in each stage."""
        return {**super().absences(), "stage1": self.stage1.absences()}

    def recall_absences(self, record: Mapping[str, Any]) -> None:
        """Take them up."""
        super().recall_absences(record)
        self.stage1.recall_absences(record.get("stage1", {}))

    def check_secure(self) -> None:
        """Refuse a first stage whose uploads the server would see."""
        self.stage1.check_secure()

    def initial_groups(self) -> Groups:
        """Name the run: clients keep their state under its number."""
        own = {MEMBERSHIP: Membership.new().to_tensors()}
        return {**own, **self.stage1.initial_groups()}

    # What a round asks, and what comes of it

    def exchanges(self, server_round: int) -> Sequence[Exchange[TangentUpload]]:
        """Ask for features' moments and largest eigenvalue, or for a step."""
        if server_round <= self.stage1_rounds:
            raise ConfigurationError(
                f"round {server_round} of TCT is stage 1's, which it hands on to "
                f"{self.stage1.name}: use this library's `start`"
            )
        config = self._features()
        if server_round > self.stage1_rounds + 1:
            config |= {"job": "tct-step", "local-steps": self.local_steps}
            mean = Summed[TangentUpload](weighted=True)
            read, step = read_local_weight, self._average
            return [Exchange(config, read, step, send, network, summed=mean)]
        if self.secure is not None:
            config["aggregate"] = "sums"
        # Everyone's features count, and everyone's eigenvalues.
        moments = Exchange(
            config | {"job": "tct-moments"},
            read_moments(self.num_features),
            partial(
                standardise_features,
                seed=self._features_seed,
                standardise=self.standardise,
            ),
            send,
            network,
            everyone=True,
            summed=Summed(weighted=False, read=read_moment_sums(self.num_features)),
        )
        spectrum = Exchange(
            config | {"job": "tct-spectrum"},
            read_spectrum(),
            partial(agree_on_rate, lr=self.lr, control=self.control_variates),
            send,
            network,
            everyone=True,
            summed=Summed(weighted=False, read=read_eigenvalues),
        )
        return [moments, spectrum]

    def _features(self) -> dict[str, Any]:
        """Return what says which features are meant, and how they are used."""
        return {
            "num-features": self.num_features,
            "head": self.head or "",
            "solver": self.solver,
            "feature-dtype": self.feature_dtype,
            "features-seed": self._features_seed,
        }

    def _average(self, state: ServerState, uploads: Uploads[TangentUpload]) -> Step:
        connected = self.cohort.connected
        return average(state, uploads, connected, local_steps=self.local_steps)

    # The stages

    def train_round(
        self, driver: Driver, server_round: int, config: ConfigRecord
    ) -> None:
        """Do a round of the stage that it belongs to."""
        # Without one client for stage 2, stage 1 would be in vain.
        first = server_round <= self.stage1_rounds and self.stage1.is_flowers
        self.cohort.allow_foreign = "if_mixed" if first else "never"
        if server_round > self.stage1_rounds:
            name = "convexifying" if server_round == self.stage1_rounds + 1 else "2"
            logger.info("TCT: stage %s", name)
            super().train_round(driver, server_round, config)
            return
        logger.info(
            "TCT: stage 1, round %s of %s of %s",
            server_round,
            self.stage1_rounds,
            self.stage1.name,
        )
        seed = seed_of_clients(self.seed)
        options = self._features() | {"check": "tct-check", "seed": seed}
        options["local-steps"] = self.local_steps
        joined = ConfigRecord({**config, **named_options(options)})
        self.stage1.train(driver, server_round, joined)

    def evaluate_round(
        self, driver: Driver, server_round: int, config: ConfigRecord
    ) -> None:
        """Have clients evaluate, as the stage's strategy does."""
        if server_round > self.stage1_rounds:
            job = named_options({"job": "tct-evaluate"})
            config = ConfigRecord({**config, **job})
            super().evaluate_round(driver, server_round, config)
            return
        seed = named_options({"seed": seed_of_clients(self.seed)})
        seeded = ConfigRecord({**config, **seed})
        self.stage1.evaluate(driver, server_round, seeded)

    def settings(self) -> dict[str, Any]:
        """Return this strategy's own settings; `lr` is agreed on as the run goes."""
        return {
            "stage1_rounds": self.stage1_rounds,
            **self._features(),
            "local_steps": self.local_steps,
            "control_variates": self.control_variates,
            "standardise": self.standardise,
            **self.stage1.options(),
        }
