"""
A method of your own, in your app
=================================

A method is three things: what clients upload (a payload), how they compute it (a job),
and what the server asks and makes of the uploads (a strategy). Sampling, seeds, checks
of what arrives, checkpoints, resumed runs and evaluation come from the library, which
stays as it is.

The method here is signSGD with majority vote (Bernstein et al., ICLR 2019): clients
send the signs of their gradients, a byte a parameter, and the server steps against the
sign of their sum.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.client import (
    FisherClient,
    LocalProblem,
    Reply,
    Request,
    make_client_app,
    register_job,
)
from flwr_fisher.curvature import gradient
from flwr_fisher.errors import WireError, check_positive, check_range
from flwr_fisher.params import (
    Params,
    add,
    select,
    shared_state,
    subtract,
    weighted_mean,
)
from flwr_fisher.report import accuracies, plot_rounds
from flwr_fisher.rounds import stepped_names
from flwr_fisher.strategies import (
    CurvatureStrategy,
    Exchange,
    ServerState,
    Step,
    Summation,
    Upload,
    refinements,
)
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import Additive, Payload, arrays_to_tensors, tensors_to_arrays

# %%
# What travels
# ------------
#
# ``from_arrays`` trusts nothing that arrives: whatever is not as it must be is a
# ``WireError`` that names the field. It costs that client its place in the round, and
# nothing else.


@dataclass(frozen=True)
class Signs(Payload):
    """A client's gradient, as int8 signs."""

    signs: dict[str, Tensor]

    def layout(self) -> tuple[str, ...]:
        """Return what two uploads must have alike to be used together."""
        return tuple(sorted(self.signs))

    def to_arrays(self) -> ArrayRecord:
        """Return what is sent."""
        return tensors_to_arrays(self.signs)

    @classmethod
    def from_arrays(cls, record: ArrayRecord, like: Params) -> "Signs":
        """Read what arrived; `like` are the parameters that were sent."""
        # In bytes: one a parameter, and what describes each array.
        most = sum(value.numel() + 1000 for value in like.values())
        signs = arrays_to_tensors(record, limit=most)
        for key, sign in signs.items():
            if key not in like or sign.shape != like[key].shape:
                raise WireError("unexpected key or shape", field=key)
            if sign.dtype != torch.int8 or bool((sign.abs() > 1).any()):
                raise WireError("must be int8 signs", field=key)
        return cls(signs)


# %%
# What a client computes
# ----------------------
#
# A job gets the client's own problem (model, loaders, loss) and the server's request.
# The model holds the parameters that the server sent. ``train_batches`` is the client's
# data, read with its ``batch_fn``. A job that trains calls ``problem.train`` instead.


@register_job("signs")
def signs_job(problem: LocalProblem, request: Request) -> Reply:
    """Return the signs of the gradient of the client's whole loss."""
    vector, loss = gradient(
        problem.model, problem.train_batches, loss_fn=problem.differentiable_loss
    )
    signs = Signs({key: value.sign().to(torch.int8) for key, value in vector.items()})
    return Reply({"train_loss": loss}, signs.to_arrays())


# %%
# What the server does
# --------------------
#
# An exchange is a request, the reader of its replies, and the step that is taken with
# them. ``settings`` returns the strategy's own options: if you resume with other
# options, an error says so. Check the arguments where they arrive. If one of them
# depends on the model, such as a parameter's name, override ``check(state)``: it is
# called before any client trains.


class SignSGD(CurvatureStrategy):
    """Step against the sign of the clients' vote."""

    def __init__(self, *, lr: float = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_positive("lr", lr)
        self.lr = lr

    def exchanges(self, server_round: int) -> Sequence[Exchange[Signs]]:
        """Return what a round asks, here one thing."""
        return [Exchange({"job": "signs"}, Signs.from_arrays, self.vote)]

    def vote(self, state: ServerState, uploads: Sequence[Upload[Signs]]) -> Step:
        """Return the next state, and metrics of the round."""
        params = dict(state.params)
        for key in uploads[0].payload.signs:
            total = sum(upload.payload.signs[key].int() for upload in uploads)
            params[key] = params[key] - self.lr * torch.sign(torch.as_tensor(total))
        return Step(ServerState(params), {"voters": len(uploads)})

    def settings(self) -> dict[str, Any]:
        """Return the options that a resumed run must have alike."""
        return {"lr": self.lr}


# %%
# The :class:`~flwr_fisher.strategies.Policy`, which limits a single client's influence,
# shortens what a payload's ``step_norms`` measures. ``Signs`` has none, and needs none:
# all votes are equally long, and this step does not use the clients' weights.
#
# A server that remembers
# -----------------------
#
# If the server must remember something, put tensors into a named group of the new
# state, and read them with ``state.group(name)`` in the next round. In the first round,
# the group is empty. Checkpoints contain it. If one step does not return it, it is
# lost, and no error says so.
#
# Here it is the velocity of FedAvg with server momentum (Hsu et al., "Measuring the
# Effects of Non-Identical Data Distribution", 2019): :math:`v \leftarrow \beta v +
# (\theta - \bar\theta)`, then :math:`\theta \leftarrow \theta - \eta v`, where
# :math:`\bar\theta` is the mean of the clients' models. The request ``{}`` asks clients
# to train, so there is no job and no payload to write.
#
# An uploaded model also has buffers, such as a batch norm's statistics. The server only
# averages these. With ``additive=Summation()``, ``uploads`` may be one upload, the mean
# of all. Write the step with ``weighted_mean``, and it is right in both cases. So the
# strategy takes ``secure=``, too.
#
# ``refinements(self, server_round)``, behind the last step, are the exchanges of the
# options ``refine=`` and ``norm_statistics="refresh"``. A strategy that does not list
# them refuses ``refine=``.


class HeavyBall(CurvatureStrategy):
    """FedAvg with momentum on the server."""

    def __init__(self, *, lr: float = 1.0, beta: float = 0.9, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_positive("lr", lr)
        check_range("beta", beta, 0, 1)
        self.lr, self.beta = lr, beta

    def exchanges(self, server_round: int) -> Sequence[Exchange[Additive]]:
        """Ask every sampled client to train."""
        train = Exchange({}, Additive.reader("params"), self.move, additive=Summation())
        return [train, *refinements(self, server_round)]

    def move(self, state: ServerState, uploads: Sequence[Upload[Additive]]) -> Step:
        """Return the next model and velocity."""
        weights = [upload.num_examples for upload in uploads]
        models = [upload.payload.part("params") for upload in uploads]
        means = weighted_mean(models, weights)
        names = stepped_names(state.params)
        start, mean = (select(params, names) for params in (state.params, means))
        velocity = subtract(start, mean)
        if before := state.group("velocity"):
            velocity = add(velocity, before, self.beta)
        params = {**means, **add(start, velocity, -self.lr)}
        return Step(ServerState(params, {"velocity": velocity}))

    def settings(self) -> dict[str, Any]:
        """Return the options that a resumed run must have alike."""
        return {"lr": self.lr, "beta": self.beta}


# %%
# A run
# -----
#
# Ten virtual clients with digits, all of them in each of sixty rounds.

# Flower logs every step of a round, which this page has no need of.
logging.getLogger("flwr").setLevel(logging.ERROR)

CLIENTS, ROUNDS = 10, 60
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


def client_fn(context: Context) -> FisherClient:
    """Return the client of a node."""
    return FisherClient(make_model(), load_data(context, 64))


def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Return the accuracy of the server's model on the test images."""
    params = arrays.to_torch_state_dict()
    return MetricRecord(accuracies(make_model(), {"accuracy": params}, test))


grid = LocalGrid(make_client_app(client_fn), num_supernodes=CLIENTS)
torch.manual_seed(0)
start = ArrayRecord(shared_state(make_model()))
strategy = SignSGD(lr=0.002, fraction_evaluate=0.0)
result = strategy.start(grid, start, num_rounds=ROUNDS, evaluate_fn=evaluate_fn)

history = result.evaluate_metrics_serverapp
for server_round in (1, 10, 30, ROUNDS):
    print(f"round {server_round:2}: {history[server_round]['accuracy']:.1%}")
plot_rounds(Path("own_method.png"), {"signSGD": history}, ["accuracy"])

# %%
# In an app of your own
# ---------------------
#
# Put ``Signs`` and the job into a module that both ``client_app.py`` and
# ``server_app.py`` import, and ``SignSGD`` into ``server_app.py`` or the same module.
# Importing the module registers the job. The server does not need it, but it does no
# harm there. The library needs no change.
#
# :doc:`/testing` has a file of tests to copy, which tests ``HeavyBall``. If you have a
# payload of your own, let a client also send something that is none: the server must
# skip the upload, log the client's name, and go on with the round.
# :doc:`/adding-a-method` says what else a method can do.
