"""The run of `make demo`, in three pictures for the documentation.

    python benchmarks/demo.py

``docs/demo_accuracy.png`` is the app's own. ``docs/demo_labels.png`` has what each
client holds, and ``docs/demo_residual.png`` what each iteration of the merge brings.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, RecordDict
from harness.page import command_line
from harness.plots import BEST, INK, QUIET, RUNS, dress, save
from harness.size import SMOKE, sized
from matplotlib.figure import Figure
from torch import Tensor

from flwr_fisher.merge import fedavg, fedfisher
from flwr_fisher.params import shared_state
from flwr_fisher.report import accuracies, report_one_shot
from flwr_fisher.strategies import FedFisherOneShot
from flwr_fisher.testing import LocalGrid

ROOT = Path(__file__).parents[1]
DOCS, WORK = SMOKE or ROOT / "docs", (SMOKE or ROOT / "outputs") / "demo"
CLIENTS, ITERATIONS = 5, 12
CONFIG = {"alpha": 0.1, "seed": 0, "batch-size": 16, "lr": 0.01, "momentum": 0.9}
CONFIG |= {"local-epochs": sized(30, 1), "test-path": ""}

sys.path.insert(0, str(ROOT / "apps" / "fedfisher"))

from fedfisher import client_app, task  # noqa: E402


def counts() -> list[Tensor]:
    """Return how many training images of each digit each client holds."""
    nodes = (
        {"partition-id": client, "num-partitions": CLIENTS} for client in range(CLIENTS)
    )
    held = (task.load_data(Context(1, 1, n, RecordDict(), CONFIG)) for n in nodes)
    return [torch.cat([y for _, y in own]).bincount(minlength=10) for own in held]


def draw_labels(rows: Sequence[Tensor], title: str, path: Path) -> None:
    """Draw a number a client and digit; the shade repeats what the number says."""
    figure = Figure(figsize=(6.4, 3.4), dpi=150, layout="constrained")
    axes, table = figure.subplots(), torch.stack([*rows])
    axes.imshow(table, cmap="Blues", vmin=0, aspect="auto")
    for (client, digit), count in zip(
        torch.cartesian_prod(*map(torch.arange, table.shape)).tolist(),
        table.flatten().tolist(),
        strict=True,
    ):
        color = "white" if count > 0.6 * table.max() else INK if count else QUIET
        axes.text(digit, client, count, color=color, ha="center", va="center_baseline")
    names = [f"client {i}: {int(own.sum())}" for i, own in enumerate(rows)]
    axes.set_xticks(range(10))
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("digit")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    save(figure, path, title)


def draw_residual(
    residuals: Sequence[float],
    scores: Sequence[float],
    stop: int,
    title: str,
    path: Path,
) -> None:
    """Draw the solver's residual and the merge's accuracy by iteration."""
    figure = Figure(figsize=(10.0, 3.4), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    curves = {"residual, 1 at the start": residuals, "test accuracy, %": scores}
    for axes, (name, values), color in zip(
        (left, right), curves.items(), (RUNS[1], BEST), strict=True
    ):
        axes.plot(values, "o-", color=color)
        axes.axvline(stop, color=INK, ls="--", lw=1)
        dress(axes, "iterations of the merge", name)
        axes.set_xticks(range(0, len(values), 2))
    left.set_yscale("log")
    left.axhline(residuals[stop], color=INK, ls="--", lw=1)
    text = f"{residuals[stop]:.2f}: the default stops here,\n"
    text += f"by design, after {stop} iterations"
    place = stop + 0.3, residuals[stop] * 1.15
    left.text(*place, text, va="bottom", fontsize="small")
    more = "more iterations are no better"
    right.annotate(more, (stop + 0.3, 75), fontsize="small")
    right.annotate("FedAvg's mean", (0.4, scores[0]), va="center", fontsize="small")
    save(figure, path, title)


def main() -> None:
    """Run the demo, and draw its pictures."""
    command_line(__doc__).parse_args()
    torch.set_num_threads(1)
    rows = counts()
    images = int(sum(own.sum() for own in rows))
    split = f"{CLIENTS} clients by Dirichlet({CONFIG['alpha']})"
    title = f"scikit-learn's digits: {images} training images, {split}"
    draw_labels(rows, title, DOCS / "demo_labels.png")

    torch.manual_seed(CONFIG["seed"])
    model = task.Net()
    loader = task.load_test(Context(1, 1, {}, RecordDict(), CONFIG))
    grid = LocalGrid(client_app.app, CLIENTS, run_config=CONFIG)
    strategy = FedFisherOneShot(fraction_evaluate=0.0, seed=CONFIG["seed"])
    result = strategy.start(grid, ArrayRecord(shared_state(model)))
    title = task.title(Context(1, 1, {}, RecordDict(), CONFIG), loader, CLIENTS)
    report_one_shot(WORK, model, loader, result, title=title)
    (WORK / "accuracy.png").replace(DOCS / "demo_accuracy.png")

    posteriors = [u.payload.posterior(u.num_examples) for u in result.uploads]
    longest = range(1, ITERATIONS + 1)
    merged = [fedfisher(posteriors, iterations=count) for count in longest]
    models = {0: fedavg(posteriors), **dict(zip(longest, merged, strict=True))}
    params = {str(k): getattr(m, "params", m) for k, m in models.items()}
    found = accuracies(model, params, loader)
    scores = [100 * accuracy for accuracy in found.values()]
    residuals, stop = merged[-1].residuals, result.details.iterations
    title = f"FedFisher's merge: {title}"
    draw_residual(residuals, scores, stop, title, DOCS / "demo_residual.png")


if __name__ == "__main__":
    main()
