"""
Many rounds, and how to compare methods
=======================================

Twenty clients, five of them in each round: FedAvg, FedFish, SCAFFOLD and FAGH train the
same model on the same data. This page runs all four, and says what makes such a
comparison fair: equal cohorts, equal work, several seeds, and learning rates that were
not chosen on the test set.
"""

import logging
from collections.abc import Mapping, Sequence
from math import inf, isfinite
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp.strategy import Strategy

from flwr_fisher.client import (
    FisherClient,
    LocalSGD,
    cross_entropy,
    make_client_app,
    score,
)
from flwr_fisher.errors import RoundError
from flwr_fisher.measures import EvaluateFn, MeasuredGrid, combine, costs
from flwr_fisher.report import plot_rounds
from flwr_fisher.strategies import FAGH, FedAvg, FedFish, Scaffold, shared_state
from flwr_fisher.tasks import Task, load_task
from flwr_fisher.testing import LocalGrid

# Flower logs every step of a round and every failure. This page prints both itself.
logging.getLogger("flwr").setLevel(logging.CRITICAL)

CLIENTS, ROUNDS, EPOCHS = 20, 10, 2

# %%
# One task for all
# ----------------
#
# :func:`~flwr_fisher.tasks.load_task` splits scikit-learn's digits among the clients.
# It keeps 200 training images for validation, which no client gets. Everything random
# comes from the seed: which client has which images, the first model, which clients a
# round asks, and each client's order of batches. The same seed gives the same numbers
# again.


def task_of(seed: int) -> Task:
    """Return the data, shared out, with a small model."""
    return load_task(
        dataset="digits",
        model="mlp",
        partition="dirichlet-class",
        alpha=0.5,
        num_partitions=CLIENTS,
        validation=200,
        seed=seed,
    )


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
        loader = task.train_loader(int(context.node_config["partition-id"]), 16)
        train = LocalSGD(epochs=EPOCHS, momentum=0.0)
        model = task.make_model()
        return FisherClient(model, loader, train_fn=train, state_dir=folder)

    return LocalGrid(make_client_app(client_fn), num_supernodes=CLIENTS)


# %%
# Equal cohorts
# -------------
#
# This library's strategies choose a round's clients by ``seed`` and round alone.
# Flower's choose by node ids, which differ in every run. With this library's
# :class:`~flwr_fisher.strategies.FedAvg`, all methods ask the same clients, and none is
# lucky in its choice.


def strategy_of(method: str, lr: float, seed: int) -> Strategy:
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
# ``evaluate_fn`` is called with the server's model after each round. One part of it
# scores the model; :func:`~flwr_fisher.measures.costs` counts what was uploaded, which
# the :class:`~flwr_fisher.measures.MeasuredGrid` sees, and the gradients.

History = Mapping[int, Mapping[str, float]]


def scoring(task: Task, *, on_test: bool) -> EvaluateFn:
    """Return what scores a model on the test images, or on those for validation."""
    images = task.data.test if on_test else task.validation
    loader = task.eval_loader(images)

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model = task.make_model()
        model.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy, _ = score(model, loader, torch.device("cpu"), cross_entropy)
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    return evaluate_fn


def run(method: str, lr: float, seed: int, *, on_test: bool) -> History:
    """Return the scores and costs after each round."""
    task = task_of(seed)
    with TemporaryDirectory() as folder:
        grid = MeasuredGrid(grid_of(task, folder))
        result = strategy_of(method, lr, seed).start(
            grid,
            ArrayRecord(shared_state(task.make_model())),
            num_rounds=ROUNDS,
            train_config=ConfigRecord({"lr": lr}),
            evaluate_fn=combine(scoring(task, on_test=on_test), costs(grid, EPOCHS)),
        )
    return result.evaluate_metrics_serverapp


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
        loss = run(method, lr, 0, on_test=False)[ROUNDS]["loss"]
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
    histories = [run(method, lr, seed, on_test=True) for seed in SEEDS]
    curves[method] = mean_of(histories)
    last = [100 * history[ROUNDS]["accuracy"] for history in histories]
    spent = curves[method][ROUNDS]
    print(
        f"{method:10}{mean(last):5.1f} ± {stdev(last):4.1f} %"
        f"{spent['gradient-evaluations']:6.0f} gradients a client asked"
        f"{spent['uploaded-bytes'] / 1e6:7.1f} MB uploaded"
    )

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
