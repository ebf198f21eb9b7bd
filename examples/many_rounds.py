"""
Many rounds, and how to compare methods
=======================================

Twenty clients, five of them in each round: FedAvg, FedFish, SCAFFOLD and FAGH train the
same model on the same data. This page runs all four, and says what makes such a
comparison fair: equal cohorts, equal work, several seeds, and learning rates that were
not chosen on the test set.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.client import (
    FisherClient,
    LocalSGD,
    cross_entropy,
    make_client_app,
    score,
)
from flwr_fisher.errors import RoundError
from flwr_fisher.report import plot_rounds
from flwr_fisher.strategies import (
    FAGH,
    CurvatureStrategy,
    FedAvg,
    FedFish,
    Scaffold,
    shared_state,
)
from flwr_fisher.testing import LocalGrid

# Flower logs every step of a round and every failure. This page prints both itself.
logging.getLogger("flwr").setLevel(logging.CRITICAL)

CLIENTS, ROUNDS, EPOCHS = 20, 10, 2

# %%
# One task for all
# ----------------
#
# Every fifth of scikit-learn's digits is for the test. Of the others, 200 are kept for
# validation, and no client gets them. The rest is sorted by label and cut into shards,
# of which each client has three. Everything random comes from the seed: which client
# has which shards, the first model, which clients a round asks, and each client's order
# of batches. The same seed gives the same numbers again.

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
is_test = torch.arange(len(labels)) % 5 == 0


class Task:
    """A split of the data, and a small model."""

    def __init__(self, seed: int) -> None:
        self.seed, rest = seed, (~is_test).nonzero().flatten()
        generator = torch.Generator().manual_seed(seed)
        rest = rest[torch.randperm(len(rest), generator=generator)]
        self.validation, rest = rest[:200], rest[200:]
        shards = rest[labels[rest].argsort(stable=True)].chunk(3 * CLIENTS)
        dealt = torch.randperm(len(shards), generator=generator).chunk(CLIENTS)
        self.parts = [torch.cat([shards[i] for i in own]) for own in dealt]

    def make_model(self) -> nn.Module:
        """Return the first model."""
        torch.manual_seed(self.seed)
        hidden = nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU()
        return nn.Sequential(*hidden, nn.Linear(200, 10))


def loader(rows: Tensor, batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return batches of some rows, in random order."""
    data = TensorDataset(images[rows], labels[rows])
    return DataLoader(data, batch_size, shuffle=True)


# %%
# Equal work
# ----------
#
# What a round costs a client is counted in gradients of its whole loss. A local epoch
# is one, so FedAvg and SCAFFOLD with two local epochs cost two. FedFish needs the
# Fisher information as well. An extra pass over the data would make it three, but
# ``fisher_source="last-epoch"`` takes it from the gradients of the last local epoch, at
# no cost. FAGH's clients do not train: they report a gradient and the Hessian's product
# with one vector, in a pass that takes as long as two gradients. So all four cost two
# gradients a round here. Where methods differ, give each as many rounds as come to the
# same total.


def grid_of(task: Task, folder: str) -> LocalGrid:
    """Return virtual clients; what SCAFFOLD has them remember is in the folder."""

    def client_fn(context: Context) -> FisherClient:
        rows = task.parts[int(context.node_config["partition-id"])]
        train = LocalSGD(epochs=EPOCHS, momentum=0.0)
        return FisherClient(
            task.make_model(), loader(rows, 16), train_fn=train, state_dir=folder
        )

    return LocalGrid(make_client_app(client_fn), num_supernodes=CLIENTS)


# %%
# Equal cohorts
# -------------
#
# This library's strategies choose a round's clients by ``seed`` and round alone.
# Flower's choose by node ids, which differ in every run. With this library's
# :class:`~flwr_fisher.strategies.FedAvg`, all methods ask the same clients, and none is
# lucky in its choice.


def strategy_of(method: str, lr: float, seed: int) -> CurvatureStrategy:
    """Return a strategy; `lr` is the server's for FAGH, and the clients' for others."""
    asked = {"fraction_train": 0.25, "fraction_evaluate": 0.0}
    if method == "FedFish":
        return FedFish(fisher_source="last-epoch", seed=seed, **asked)
    if method == "SCAFFOLD":
        return Scaffold(seed=seed, **asked)
    if method == "FAGH":
        return FAGH(lr=lr, rho=1.0, probe="momentum", seed=seed, **asked)
    return FedAvg(seed=seed, **asked)


# %%
# A run
# -----
#
# ``evaluate_fn`` is called with the server's model after each round. The result says
# how many bytes a client uploaded in a round.

History = Mapping[int, Mapping[str, float]]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord]


def scoring(task: Task, rows: Tensor) -> EvaluateFn:
    """Return what scores a model on some images."""

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model, batches = task.make_model(), loader(rows, 512)
        model.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy, _ = score(model, batches, torch.device("cpu"), cross_entropy)
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    return evaluate_fn


def run(method: str, lr: float, seed: int, *, on_test: bool) -> tuple[History, float]:
    """Return the scores after each round, and the megabytes that clients uploaded."""
    task = Task(seed)
    rows = is_test.nonzero().flatten() if on_test else task.validation
    with TemporaryDirectory() as folder:
        result = strategy_of(method, lr, seed).start(
            grid_of(task, folder),
            ArrayRecord(shared_state(task.make_model())),
            num_rounds=ROUNDS,
            train_config=ConfigRecord({"lr": lr}),
            evaluate_fn=scoring(task, rows),
        )
    megabytes = ROUNDS * CLIENTS / 4 * result.upload_bytes / 1e6
    return result.evaluate_metrics_serverapp, megabytes


# %%
# Learning rates, on validation images
# ------------------------------------
#
# Every method gets three rates, each about three times the one before. The one with the
# lowest loss on the validation images is taken. That uses one split, seed 0, which is
# not used again, and no test image. If the best rate is the first or the last of its
# row, try further ones: a better rate may lie outside. A rate can also be so large that
# the clients' models are no numbers any more. Then the server has no usable reply, and
# the round fails.

RATES = {
    "FedFish": (0.1, 0.3, 1.0),
    "SCAFFOLD": (0.03, 0.1, 0.3),
    "FAGH": (0.3, 1.0, 3.0),
    "FedAvg": (0.1, 0.3, 1.0),
}


def validation_loss(method: str, lr: float) -> float:
    """Return the last round's loss, or infinity where the run failed."""
    try:
        loss = run(method, lr, 0, on_test=False)[0][ROUNDS]["loss"]
    except RoundError:
        return inf
    return loss if isfinite(loss) else inf


chosen = {}
for method, rates in RATES.items():
    losses = {lr: validation_loss(method, lr) for lr in rates}
    chosen[method] = min(losses, key=lambda lr: losses[lr])
    row = "  ".join(f"lr {lr:g}: {loss:.3f}" for lr, loss in losses.items())
    print(f"{method:10}{row}   taken: {chosen[method]:g}")

# %%
# The comparison, on test images
# ------------------------------
#
# Three other seeds are three other splits, first models and cohorts, the same for all
# methods. The table has the mean and the standard deviation over the seeds: a lead that
# is smaller than the deviation is not a lead.

SEEDS = (1, 2, 3)


def mean_of(histories: Sequence[History]) -> History:
    """Return the mean of every number, by round."""
    return {
        number: {key: mean(h[number][key] for h in histories) for key in metrics}
        for number, metrics in histories[0].items()
    }


curves = {}
for method, lr in chosen.items():
    runs = [run(method, lr, seed, on_test=True) for seed in SEEDS]
    histories = [history for history, _ in runs]
    curves[method] = mean_of(histories)
    last = [100 * history[ROUNDS]["accuracy"] for history in histories]
    uploaded = f"{mean(megabytes for _, megabytes in runs):7.1f} MB uploaded"
    print(f"{method:10}{mean(last):5.1f} ± {stdev(last):4.1f} %{uploaded}")

# %%
# The curves say more than the last round does: who is ahead early, and whose model is
# better in one round and worse in the next.

plot_rounds(Path("many_rounds.png"), curves, ["accuracy", "loss"])

# %%
# What this does not show
# -----------------------
#
# Equal gradients are not equal bytes: SCAFFOLD and FAGH upload two vectors a round, and
# the table counts them. FAGH takes one step in a round, where the others take many
# small ones in two epochs; :doc:`its page </fagh>` has the problems for which it was
# made. This page is one small task. :doc:`/benchmarks/chooser` says which method to
# take when, from larger ones, compared by the same rules.
#
# ``apps/fagh`` and ``apps/fedfish`` run the same methods under ``flwr run``.
