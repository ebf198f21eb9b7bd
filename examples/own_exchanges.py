r"""
A method of several exchanges
=============================

In some methods a round has several exchanges: the server asks the same clients again,
and what it asks depends on what they have answered. :doc:`own_method` comes first.

The method here is RegMean++ (Nguyen et al., TMLR 2026, arXiv 2508.03121). Clients train
once. Then the server merges their models layer by layer, from the first to the last, by
the least squares of RegMean (Jin et al., ICLR 2023),

.. math:: W_l = \Big(\sum_i p_i W_{l,i} A_{l,i}\Big) \Big(\sum_i p_i A_{l,i}\Big)^{+},

where :math:`A_{l,i}` is the second moment of what the *merged* layers before feed the
linear layer l on client i's examples. So each layer is an exchange: clients get the
layers that are merged, and send one matrix.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.client import (
    FisherClient,
    LocalProblem,
    LocalSGD,
    Reply,
    Request,
    make_client_app,
    register_job,
)
from flwr_fisher.errors import ClientError, ConfigurationError, WireError, check_range
from flwr_fisher.params import Params, bias_of, select, shared_state, weighted_mean
from flwr_fisher.report import accuracies
from flwr_fisher.strategies import (
    CurvatureStrategy,
    Exchange,
    FedAvg,
    FedFisherOneShot,
    ServerState,
    Step,
    Upload,
)
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import Additive, Payload, arrays_to_tensors, tensors_to_arrays

# %%
# What travels
# ------------
#
# A matrix for one layer. The bias is the last column of the layer's matrix, so that
# every input ends with a 1.


@dataclass(frozen=True)
class Moments(Payload):
    """The second moment of one layer's inputs."""

    weight: str
    A: Tensor

    def layout(self) -> tuple[str, ...]:
        """Return what two uploads must have alike to be used together."""
        return (self.weight, str(self.A.shape))

    def curvature_norms(self) -> dict[str, float]:
        """Return the trace, the size of a curvature that the policy limits."""
        return {"inputs": float(self.A.diagonal().double().sum())}

    def scaled(self, factors: Mapping[str, float], like: Params) -> Self:
        """Return it as the policy limits it."""
        return replace(self, A=self.A * factors.get("inputs", 1.0))

    def to_arrays(self) -> ArrayRecord:
        """Return what is sent."""
        return tensors_to_arrays({self.weight: self.A})

    @classmethod
    def from_arrays(
        cls, record: ArrayRecord, like: Params, *, weight: str
    ) -> "Moments":
        """Read what arrived for a layer; `like` are the parameters that were sent."""
        n = like[weight].shape[1] + (bias_of(weight, like) is not None)
        arrays = arrays_to_tensors(record, limit=8 * n * n + 1000, most=1)
        A = arrays.get(weight)
        if A is None or A.shape != (n, n):
            raise WireError(f"must have one matrix [{n}, {n}]", field=weight)
        if not torch.allclose(A, A.mT) or bool((A.diagonal() < 0).any()):
            raise WireError("is no second moment", field=weight)
        return cls(weight, A)


# %%
# What a client computes
# ----------------------
#
# The training is the library's. The job for a layer finds the model with the layers
# that are merged so far. The first request also names the job in its option ``check``,
# with all layers: before a client trains, it runs that job once and throws the reply
# away. So a layer of another kind, such as a batch norm, is refused at once.


@register_job("own-moments")
def moments_job(problem: LocalProblem, request: Request) -> Reply:
    """Return the second moment of a layer's inputs on the client's own examples."""
    weights = request.options["layers"]
    find = problem.model.get_submodule
    layers = [find(weight.rpartition(".")[0]) for weight in weights]
    pairs = zip(weights, layers, strict=True)
    if odd := [weight for weight, of in pairs if not isinstance(of, nn.Linear)]:
        raise ClientError(f"layers has {odd}, which are no linear layers' weights")
    weight, layer = weights[0], layers[0]
    moments, count = [], 0

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        ones = (0, 0 if layer.bias is None else 1)
        a = F.pad(inputs[0].flatten(0, -2), ones, value=1.0)
        moments.append(a.mT @ a)

    handle = layer.register_forward_pre_hook(note)
    problem.model.eval()
    with torch.no_grad():
        for inputs, _ in problem.train_batches:
            problem.model(inputs.to(problem.device))
            count += len(inputs)
    handle.remove()
    return Reply({}, Moments(weight, sum(moments) / count).to_arrays())


# %%
# What the server does
# --------------------
#
# ``exchanges`` returns a round's exchanges in their order. A group that a step puts
# into the state is there in the next exchange. ``clients="previous"`` asks the clients
# whose uploads the previous step used: a client that failed in the training has no
# layer to merge. A step that only prepares the next one is ``quiet``, and the log has
# no line of its metrics. If a run is stopped within a round and resumed, the steps are
# taken again from the uploads on the disk, and no client does twice what it has done.


class RegMeanPlusPlus(CurvatureStrategy):
    """Train once, then merge layer by layer, in the order of `layers`.

    Everything else is averaged. The layers are linear.
    """

    def __init__(
        self, *, layers: Sequence[str], off_diagonal: float = 0.95, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        check_range("off_diagonal", off_diagonal, 0, 1)
        self.layers, self.off_diagonal = list(layers), off_diagonal

    def check(self, state: ServerState) -> None:
        """Raise an error, before any client trains, for layers of another model."""
        if unknown := sorted(set(self.layers) - state.params.keys()):
            raise ConfigurationError(f"layers has {unknown}, which the model lacks")

    def exchanges(self, server_round: int) -> Sequence[Exchange[Any]]:
        """Ask for a training, then for each layer's second moments."""
        check = {"check": "own-moments", "layers": self.layers}
        training = Exchange(check, Additive.reader("params"), self.average)
        return [training, *map(self._of_layer, self.layers)]

    def _of_layer(self, weight: str) -> Exchange[Moments]:
        return Exchange(
            {"job": "own-moments", "layers": [weight]},
            partial(Moments.from_arrays, weight=weight),
            partial(self.solve, weight),
            clients="previous",
        )

    def average(self, state: ServerState, uploads: Sequence[Upload[Additive]]) -> Step:
        """Begin with the mean, and keep each client's layers for the next exchanges."""
        models = [upload.payload.part("params") for upload in uploads]
        mean = weighted_mean(models, [upload.num_examples for upload in uploads])
        names = {n for w in self.layers for n in (w, bias_of(w, mean)) if n}
        groups = {
            f"client {upload.number}": select(model, names)
            for upload, model in zip(uploads, models, strict=True)
        }
        return Step(ServerState(mean, groups), quiet=True)

    def solve(
        self, weight: str, state: ServerState, uploads: Sequence[Upload[Moments]]
    ) -> Step:
        """Solve for one layer, with the clients that have sent its second moments."""
        bias = bias_of(weight, state.params)
        total = sum(upload.num_examples for upload in uploads)
        gram, product = [], []
        for upload in uploads:
            A = upload.num_examples / total * upload.payload.A.double()
            A = self.off_diagonal * A + (1 - self.off_diagonal) * A.diagonal().diag()
            own = state.group(f"client {upload.number}")
            columns = [own[weight]] + ([own[bias].unsqueeze(1)] if bias else [])
            gram.append(A)
            product.append(torch.cat(columns, dim=1).double() @ A)
        # The rounding of float32 must not be inverted.
        least = len(A) * torch.finfo(torch.float32).eps
        inverse = torch.linalg.pinv(sum(gram), rtol=least, hermitian=True)
        W = (sum(product) @ inverse).to(state.params[weight])
        width = state.params[weight].shape[1]
        params = {**state.params, weight: W[:, :width]}
        if bias:
            params[bias] = W[:, width]
        if weight == self.layers[-1]:
            return Step(ServerState(params), {"clients-merged": len(uploads)})
        return Step(ServerState(params, state.groups), quiet=True)

    def settings(self) -> dict[str, Any]:
        """Return the options that a resumed run must have alike."""
        return {"layers": self.layers, "off_diagonal": self.off_diagonal}


# %%
# Three runs
# ----------
#
# Ten virtual clients with digits of few classes each, trained once. FedFisher asks them
# once, too, and for nothing else. RegMean++ asks them again for each layer.

# Flower logs every step of a round, which this page has no need of.
logging.getLogger("flwr").setLevel(logging.ERROR)

CLIENTS = 10
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
    return FisherClient(
        make_model(), load_data(context, 32), train_fn=LocalSGD(epochs=10, lr=0.05)
    )


torch.manual_seed(0)
model = make_model()
layers = [name for name in shared_state(model) if name.endswith("weight")]
grid = LocalGrid(make_client_app(client_fn), num_supernodes=CLIENTS)
start = ArrayRecord(shared_state(model))
for strategy in (
    FedAvg(fraction_evaluate=0.0),
    FedFisherOneShot(fraction_evaluate=0.0),
    RegMeanPlusPlus(layers=layers, fraction_evaluate=0.0),
):
    result = strategy.start(grid, start, num_rounds=1)
    params = result.arrays.to_torch_state_dict()
    accuracy = accuracies(model, {"it": params}, test)["it"]
    print(f"{type(strategy).__name__}: {accuracy:.1%}")

# %%
# To test such a method, copy the file of :doc:`/testing`. Add a test with a client that
# fails in the second exchange, and one that stops the run within the round, by a
# ``KeyboardInterrupt`` in a step, and resumes it.
