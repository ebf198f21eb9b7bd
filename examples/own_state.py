r"""
A method whose clients remember
===============================

In some methods a client keeps something from one of its rounds to the next: a control
variate, a correction, a personal part. :class:`~flwr_fisher.client.ClientState` keeps
it on the client's own disk, and :class:`~flwr_fisher.strategies.Membership` tells each
client from which of its rounds to go on, so that a round that failed, was repeated or
lost a reply leaves no trace. :doc:`own_method` comes first.

The method here is FedDyn (Acar et al., "Federated Learning Based on Dynamic
Regularization", ICLR 2021, Algorithm 1). A client minimises its loss :math:`L_k` with
two more terms,

.. math:: L_k(\theta) - \langle g_k, \theta \rangle
          + \frac{\alpha}{2} \|\theta - \theta^{t-1}\|^2, \qquad
          g_k \leftarrow g_k - \alpha (\theta_k - \theta^{t-1})

and the server corrects the mean of the models that come back. Clients with different
data then agree on the optimum of all data. FedAvg's mean is another point.
"""

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.client import (
    ClientState,
    FisherClient,
    LocalProblem,
    LocalSGD,
    Reply,
    Request,
    make_client_app,
    register_job,
)
from flwr_fisher.errors import ConfigurationError, check_positive
from flwr_fisher.params import (
    add,
    select,
    shared_state,
    subtract,
    trainable_names,
    weighted_mean,
)
from flwr_fisher.report import accuracies, plot_rounds
from flwr_fisher.strategies import (
    CurvatureStrategy,
    Exchange,
    FedAvg,
    Membership,
    ServerState,
    Step,
    Summation,
    Upload,
    lost_states,
)
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import Additive

# %%
# The client's half
# -----------------
#
# ``state.load()`` returns what the client kept, and whether it was lost. It was lost if
# the server has had a reply of this client, and the client's disk has nothing of it.
# The first time, it is zeros, or what you give: ``state.load(first=start)`` starts a
# personal part from the server's. The training calls ``on_gradients`` before each step,
# when the gradients are there. If your function remembers something from step to step
# (this one does not), put it into its ``state_dict``. Then a training can continue
# after a crash.


@register_job("own-feddyn")
def feddyn_job(problem: LocalProblem, request: Request) -> Reply:
    """Train with FedDyn's two terms, and keep the new g_k."""
    alpha = float(request.options["alpha"])
    parameters = problem.trainable()
    start = {name: p.detach().clone() for name, p in parameters.items()}
    state = ClientState.of(problem, request, "feddyn", start)
    g, lost = state.load()

    def add_terms(epoch: int, step: int) -> None:
        for name, p in parameters.items():
            p.grad += alpha * (p.detach() - start[name]) - g[name]

    metrics = problem.train(request.config, on_gradients=add_terms)
    moved = {name: p.detach() - start[name] for name, p in parameters.items()}
    state.save(add(g, moved, -alpha))
    upload = Additive({"params": problem.state_like(request.params)})
    return Reply({**metrics, "state-lost": int(lost)}, upload.to_arrays())


# %%
# The server's half
# -----------------
#
# The server's own memory, h, is the mean of all clients' g_k. The library keeps groups
# of tensors from round to round, and in checkpoints. A client finds in
# ``request.facts`` what ``send`` returns in group ``""``. The paper divides by numbers
# of clients. We divide by their weights, the numbers of examples. ``members.rescaled``
# makes h a mean over more clients when more are known, and zeros at first.
# ``additive=Summation()`` says that the step needs only a mean of the models, so the
# strategy takes ``secure=``, too.
#
# The :class:`~flwr_fisher.strategies.Policy` limits a single client's influence: it may
# shorten the way from the model that was sent to a client's model. ``"kept":
# "parameters"`` says that clients also keep this part of the upload. A client then
# learns with its next request how much of it the server used. Its g_k changes by no
# more than that, and h remains the mean.


class FedDyn(CurvatureStrategy):
    """Dynamic regularisation of the parameters `trained`; buffers are averaged."""

    def __init__(
        self, *, trained: Sequence[str], alpha: float = 0.1, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        check_positive("alpha", alpha)
        self.trained, self.alpha = list(trained), alpha

    def check(self, state: ServerState) -> None:
        """Raise an error, before any client trains, for names of another model."""
        if unknown := sorted(set(self.trained) - state.params.keys()):
            raise ConfigurationError(f"trained has {unknown}, which the model lacks")

    def initial_groups(self) -> dict[str, Any]:
        """Name the run: clients keep their state under its number."""
        return {"membership": Membership.new().to_tensors()}

    def exchanges(self, server_round: int) -> Sequence[Exchange[Additive]]:
        """Ask every sampled client to train."""
        request = {"job": "own-feddyn", "alpha": self.alpha}
        read = Additive.reader("params")
        of_all = {"additive": Summation(), "kept": "parameters"}
        return [Exchange(request, read, self.renew, send, **of_all)]

    def renew(self, state: ServerState, uploads: Sequence[Upload[Additive]]) -> Step:
        """Return the next model and h."""
        before = Membership.from_tensors(state.group("membership"))
        members = before.after(uploads, self.cohort.connected)
        weights = members.weights_of(uploads)
        models = [upload.payload.part("params") for upload in uploads]
        means = weighted_mean(models, weights)
        start, mean = (select(params, self.trained) for params in (state.params, means))
        h = members.rescaled(state.group("h") if before.steps else start, before)
        share = members.participation(weights)
        h = add(h, subtract(mean, start), -self.alpha * share)
        params = {**means, **add(mean, h, -1 / self.alpha)}
        groups = {"membership": members.to_tensors(), "h": h}
        metrics = {"num-lost-states": lost_states(uploads)}
        return Step(ServerState(params, groups), metrics)

    def settings(self) -> dict[str, Any]:
        """Return the options that a resumed run must have alike."""
        return {"trained": self.trained, "alpha": self.alpha}


def send(state: ServerState) -> dict[str, Any]:
    """Return what a client finds its own state by."""
    return {"": Membership.from_tensors(state.group("membership")).sent()}


# %%
# Two runs
# --------
#
# Ten virtual clients have digits of about two classes each, and half of them take part
# in a round. FedAvg has the same training.

# Flower logs every step of a round, which this page has no need of.
logging.getLogger("flwr").setLevel(logging.ERROR)

CLIENTS, ROUNDS = 10, 30
# Each client has two of the ten digits. Every fifth image is for the test.
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
is_test = torch.arange(len(labels)) % 5 == 0
test = [(images[is_test], labels[is_test])]
train_images, train_labels = images[~is_test], labels[~is_test]
shards = train_labels.argsort(stable=True).chunk(2 * CLIENTS)


def make_model() -> nn.Module:
    """Return a perceptron with two hidden layers."""
    hidden = nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(200, 10))


def load_data(context: Context, batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return batches of a client's images."""
    client = int(context.node_config["partition-id"])
    mine = torch.cat([shards[client], shards[client + CLIENTS]])
    data = TensorDataset(train_images[mine], train_labels[mine])
    return DataLoader(data, batch_size, shuffle=True)


state_dir = tempfile.mkdtemp()


def client_fn(context: Context) -> FisherClient:
    """Return the client of a node; each keeps its state in a folder of its own."""
    training = LocalSGD(epochs=5, lr=0.05, momentum=0.0)
    return FisherClient(
        make_model(), load_data(context, 32), train_fn=training, state_dir=state_dir
    )


def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Return the accuracy of the server's model on the test images."""
    params = arrays.to_torch_state_dict()
    return MetricRecord(accuracies(make_model(), {"accuracy": params}, test))


grid = LocalGrid(make_client_app(client_fn), num_supernodes=CLIENTS)
torch.manual_seed(0)
model = make_model()
start, trained = ArrayRecord(shared_state(model)), trainable_names(model)
half = {"fraction_train": 0.5, "fraction_evaluate": 0.0}
histories = {}
for name, strategy in {
    "FedDyn": FedDyn(trained=trained, alpha=0.1, **half),
    "FedAvg": FedAvg(**half),
}.items():
    result = strategy.start(grid, start, num_rounds=ROUNDS, evaluate_fn=evaluate_fn)
    histories[name] = result.evaluate_metrics_serverapp
    ends = [histories[name][t]["accuracy"] for t in (5, 10, 20, ROUNDS)]
    print(name, *(f"{accuracy:.1%}" for accuracy in ends))
plot_rounds(Path("own_state.png"), histories, ["accuracy"])

# %%
# To test such a method, copy the file of :doc:`/testing`. Add a test that the server
# counts a client whose disk is lost.
