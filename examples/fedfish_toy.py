"""
FedFish's toy regression
========================

Two clients fit one curve, each on its own inputs. Their supports overlap in full, in
part, or not at all, and their models are merged once, by FedAvg and by FedFish (Dhawan
et al., "Leveraging Function Space Aggregation for Federated Learning at Scale", TMLR
2024, section 5.1 and Figure 2).

The paper states the clients, the supports, the single round, and the measure: the
client-server barrier (eq. 5) of the mean squared error. The curve, the network and its
training are ours, and the gain depends on them: ``python examples/fedfish_toy.py
--momentum 0.9``, or tanh for units, and FedFish gains nothing.
"""

from argparse import ArgumentParser
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call

from flwr_fisher.client import LocalSGD
from flwr_fisher.curvature import FisherOptions, fisher
from flwr_fisher.params import Params, shared_state, subtract, weighted_mean
from flwr_fisher.rounds import fedfish_average

SUPPORTS: dict[str, list[tuple[float, float]]] = {
    "full overlap": [(-4, 4), (-4, 4)],
    "partial overlap": [(-4, 1.3), (-1.3, 4)],
    "disjoint": [(-4, -0.4), (0.4, 4)],
}
CLIENTS, METHODS, SEEDS = ("client 1", "client 2"), ("FedAvg", "FedFish"), range(4)
LINES: dict[str, dict[str, Any]] = {
    "client 1": {"color": "#2a7f9e", "lw": 1.4},
    "client 2": {"color": "#e0912f", "lw": 1.4},
    "FedAvg": {"color": "#4a5560", "lw": 2.6, "ls": "--"},
    "FedFish": {"color": "#d1495b", "lw": 2.6},
}


# %%
# One round
# ---------
#
# Both clients train from a common start. FedAvg takes the mean of their steps, FedFish
# weights each entry of a step by the client's Fisher information there.
# ``fedfish_average`` is what the strategy :class:`~flwr_fisher.strategies.FedFish`
# calls; by itself it needs no Flower, and computes the paper's formula.


class Outcome(NamedTuple):
    """What one round left; the barriers are by method, one a client."""

    data: list[tuple[Tensor, Tensor]]
    models: dict[str, dict[str, Tensor]]
    barriers: dict[str, list[float]]


def network() -> nn.Module:
    """Return two hidden layers of 64 rectified units."""
    hidden = [nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(64, 1))


@torch.no_grad()
def predict(params: Params, x: Tensor) -> Any:
    """Return what the network with these parameters makes of inputs ``[n, 1]``."""
    return functional_call(network(), dict(params), (x,))


def one_round(support: str, seed: int, momentum: float = 0.0) -> Outcome:
    """Train both clients from a common start, and merge their models."""
    torch.manual_seed(seed)
    start = {name: value.clone() for name, value in shared_state(network()).items()}
    train = LocalSGD(epochs=200, lr=0.01, momentum=momentum, loss_fn=F.mse_loss)
    # Algorithm 2's Fisher: squared gradients of mini-batches, with their labels.
    of_batches = FisherOptions.full(expectation="empirical-batch")
    empirical = partial(
        fisher, structure="diagonal", options=of_batches, likelihood="gaussian"
    )
    data, clients, deltas, fishers = [], [], [], []
    for low, high in SUPPORTS[support]:
        x = low + (high - low) * torch.rand(100, 1)
        y = torch.sin(x + 1) + 0.1 * torch.randn(100, 1)
        batches = [(x[i : i + 10], y[i : i + 10]) for i in range(0, 100, 10)]
        model = network()
        model.load_state_dict(start)
        train(model, batches, torch.device("cpu"), {})
        data.append((x, y))
        clients.append(shared_state(model))
        deltas.append(subtract(start, clients[-1]))
        fishers.append(empirical(model, batches).diagonal())

    fedavg = subtract(start, weighted_mean(deltas, weights=[100, 100]))
    fedfish = subtract(start, fedfish_average(deltas, fishers, weights=[100, 100]))
    models = dict(zip(LINES, (*clients, fedavg, fedfish), strict=True))
    barriers: dict[str, list[float]] = {method: [] for method in METHODS}
    for (x, y), own in zip(data, clients, strict=True):
        for method in METHODS:
            loss = F.mse_loss(predict(models[method], x), y)
            barriers[method].append(float(loss - F.mse_loss(predict(own, x), y)))
    return Outcome(data, models, barriers)


# %%
# The picture
# -----------
#
# Three panels have the functions of the first seed: each client's data and model, in
# the colour of its support, and the two merged models. The last panel has every client
# of every seed.


def draw(path: Path, outcomes: dict[str, list[Outcome]]) -> None:
    """Draw the first seed's functions, and every client's barriers in all seeds."""
    figure = Figure(figsize=(10, 7.2), dpi=130, layout="constrained")
    *panels, last = figure.subplots(2, 2).flat
    x = torch.linspace(-4.3, 4.3, 400).unsqueeze(1)
    for axes, (support, runs) in zip(panels, outcomes.items(), strict=True):
        data, models, barriers = runs[0]
        for span, xy, client in zip(SUPPORTS[support], data, CLIENTS, strict=True):
            axes.axvspan(*span, color=LINES[client]["color"], alpha=0.13, lw=0)
            axes.scatter(*xy, color=LINES[client]["color"], alpha=0.55, lw=0, s=10)
        for name, params in models.items():
            axes.plot(x, predict(params, x), label=name, **LINES[name])
        found = ", ".join(f"{m} {mean(barriers[m]):.3f}" for m in METHODS)
        title = f"{support}\nbarrier: {found}"
        axes.set(title=title, xlim=(-4.3, 4.3), ylim=(-1.7, 1.7))
        avg, fish = ([b for run in runs for b in run.barriers[m]] for m in METHODS)
        last.scatter(fish, avg, s=40, alpha=0.7, lw=0, label=support)
    last.axline((0, 0), (1, 1), color="#9aa5b1", lw=1, zorder=0)
    last.set_xscale("symlog", linthresh=0.01)
    last.set_yscale("symlog", linthresh=0.01)
    title = "each client, all seeds\nabove the line, FedFish is closer"
    last.set(title=title, xlabel="FedFish's barrier", ylabel="FedAvg's barrier")
    last.legend(frameon=False, loc="lower right")
    handles = panels[0].get_lines()
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


# %%
# All supports and seeds
# ----------------------


def main() -> None:
    """Run all supports and seeds, print the table, draw the picture."""
    parser = ArgumentParser(description="FedFish's toy regression")
    parser.add_argument("path", nargs="?", type=Path, default="outputs/fedfish_toy.png")
    parser.add_argument("--momentum", type=float, default=0.0, help="of local SGD")
    args = parser.parse_args()
    seeds = f"{len(SEEDS)} seeds"
    print(f"client-server barrier, mean ± sd of {seeds}; how often FedFish's is lower")
    outcomes = {}
    for support in SUPPORTS:
        runs = [one_round(support, seed, args.momentum) for seed in SEEDS]
        avg, fish = ([mean(run.barriers[method]) for run in runs] for method in METHODS)
        row = f"{support:<18}FedAvg {mean(avg):.3f} ± {stdev(avg):.3f}   FedFish "
        lower = sum(f < a for a, f in zip(avg, fish, strict=True))
        print(f"{row}{mean(fish):.3f} ± {stdev(fish):.3f}   {lower:>2}")
        outcomes[support] = runs
    draw(args.path, outcomes)
    print(f"picture: {args.path}")


if __name__ == "__main__":
    main()

# %%
# Where the supports are the same, both merges are as good as the clients' own models.
# Where they are not, the mean of the models is a bad model on either client's inputs,
# and FedFish's stays near each client's function where that client has data.
# :doc:`The benchmark </benchmarks/fedfish_toy>` has 20 seeds, and momentum.
# :doc:`/fedfish` says what is left of this on images.
