"""A few rounds of FedFisher: whether accuracy falls from one round to the next.

    python benchmarks/few_shot.py

scikit-learn's digits, 5 clients, `dirichlet-client` with α = 0.1, 5 rounds of 2 local
epochs (lr 0.01, momentum 0.9, batch 16), ten seeds; test accuracy after each round. The
default is set beside itself without `trust`, and beside a hundred plain conjugate
gradients. No choice has seen these seeds, 10 to 19: `trust` was
chosen on validation images of seeds 200 to 207, and on the test images of seeds 0 to 9.
"""

import logging
from itertools import pairwise
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from harness.clients import CPU
from harness.page import blocks, command_line, opening, write_page
from harness.size import sized
from harness.tables import head, row
from tasks import load_task

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.params import shared_state
from flwr_fisher.report import accuracies
from flwr_fisher.strategies import FedFisherOneShot, MergeOptions
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import arrays_to_tensors

MODELS, CLIENTS = sized(("mlp", "lenet-bias"), ("mlp",)), 5
SEEDS, ROUNDS = sized((range(10, 20), 5), (range(10, 11), 2))
FAR = MergeOptions(trust=float("inf"))
METHODS: dict[str, dict[str, Any]] = {
    "default": {},
    "default, trust inf": {"merge": FAR},
    "CG, 100 iterations, trust inf": {"solver": "cg", "merge": FAR},
}


def accuracies_of(model: str, seed: int, options: dict[str, Any]) -> list[float]:
    """Return the test accuracy in per cent after each round."""
    task = load_task(
        dataset="digits",
        model=model,
        partition="dirichlet-client",
        alpha=0.1,
        num_partitions=CLIENTS,
        seed=seed,
    )
    train = LocalSGD(epochs=2, lr=0.01, momentum=0.9)
    net, test = task.make_model(), list(task.test_loader())
    found: list[float] = []

    def client_fn(context: Context) -> FisherClient:
        loader = task.train_loader(int(context.node_config["partition-id"]), 16)
        return FisherClient(task.make_model(), loader, train_fn=train, device=CPU)

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        merged = {"merged": arrays_to_tensors(arrays)}
        found.append(100 * accuracies(net, merged, test)["merged"])
        return MetricRecord({"accuracy": found[-1]})

    strategy = FedFisherOneShot(seed=seed, fraction_evaluate=0.0, device=CPU, **options)
    grid = LocalGrid(make_client_app(client_fn), CLIENTS, seed=seed)
    start = ArrayRecord(shared_state(task.make_model()))
    strategy.start(grid, start, num_rounds=ROUNDS, evaluate_fn=evaluate_fn)
    return found[1:]


def section(model: str, runs: dict[str, list[list[float]]]) -> list[str]:
    """Return a model's table."""
    titles = (f"round {r}" for r in range(1, ROUNDS + 1))
    lines = [f"## {model}", ""]
    lines += head("mean test accuracy, %", *titles, "largest loss in a round")
    for name, every in runs.items():
        means = (
            f"{sum(values) / len(values):.1f}" for values in zip(*every, strict=True)
        )
        losses = [max(a - b for a, b in pairwise(run)) for run in every]
        worst = max(losses)
        cell = f"{worst:.1f} (seed {SEEDS[losses.index(worst)]})"
        lines.append(row(name, *means, cell))
    return lines


def main() -> None:
    """Write the tables and the numbers behind them."""
    command_line(__doc__).parse_args()
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    numbers = {
        model: {
            name: [accuracies_of(model, seed, options) for seed in SEEDS]
            for name, options in METHODS.items()
        }
        for model in MODELS
    }
    tables = (section(model, runs) for model, runs in numbers.items())
    write_page("few_shot", blocks(opening("A few rounds", __doc__), *tables), numbers)


if __name__ == "__main__":
    main()
