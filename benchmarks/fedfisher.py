"""One-shot merging on MNIST: every method on the same uploads.

    python benchmarks/fedfisher.py --data-dir DIR   # DIR/MNIST/raw has the files

LeNet without biases, 5 clients, ``dirichlet-client``, 30 epochs of SGD (lr 0.01,
momentum 0.9, batch 64), seeds 0-2. Clients are trained once (about 3 minutes a split on
one core) and kept in ``benchmarks/cache``. Methods marked * choose on 500 training
examples that the server holds, as the paper's do; the others see no data.
"""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from uploads import Setting, mnist_folder, posteriors

from flwr_fisher.measures import accuracies, ensemble_accuracy
from flwr_fisher.merge import fedavg, fisher_merge, merge_fisher, regmean

ALPHAS, SEEDS = (0.2, 0.1, 0.05), (0, 1, 2)
RESULTS = Path(__file__).parent / "results"
OURS, PAPER = "FedFisher K-FAC, CG (default)", "FedFisher K-FAC, paper's Adam *"


def evaluate(setting: Setting, data_dir: Path) -> dict[str, float]:
    """Return every method's test accuracy in per cent on one split."""
    task = setting.task(data_dir)
    kfac = posteriors(setting, task, "kfac")
    diagonal = posteriors(setting, task, "diagonal")
    model, held = task.make_model(), task.eval_loader(task.validation)

    def score(params: Mapping[str, Tensor]) -> float:
        return accuracies(model, {"x": params}, held)["x"]

    candidates = {
        "FedAvg": fedavg(kfac),
        "FisherMerge (diagonal, closed form)": fisher_merge(diagonal),
        "RegMean *": max(
            (regmean(kfac, off_diagonal=a) for a in (0.9, 0.1)), key=score
        ),
        "FedFisher diagonal, paper's Adam *": merge_fisher(
            diagonal, solver="adam", score=score
        ).params,
        PAPER: merge_fisher(kfac, solver="adam", score=score).params,
        "FedFisher K-FAC, CG, no regularisation": merge_fisher(
            kfac, anchor=0.0, shrink=0.0, damping=0.0, balance=0.0
        ).params,
        OURS: merge_fisher(kfac).params,
    }
    members = [p.params for p in kfac]
    weights = [p.num_examples for p in kfac]
    test = task.test_loader()
    found = accuracies(model, candidates, test)
    single = accuracies(model, {str(i): p for i, p in enumerate(members)}, test)
    found["best single client (chosen on the test set)"] = max(single.values())
    found["ensemble of clients (not one model)"] = ensemble_accuracy(
        model, members, weights, test
    )
    return {name: 100 * value for name, value in found.items()}


def table(results: Mapping[float, list[dict[str, float]]]) -> list[str]:
    """Return the table's lines: mean and standard deviation over seeds."""
    names = list(results[ALPHAS[0]][0])
    lines = ["| test accuracy, % | " + " | ".join(f"α = {a}" for a in ALPHAS) + " |"]
    lines.append("|---|" + "---|" * len(ALPHAS))
    for name in names:
        cells = []
        for alpha in ALPHAS:
            values = [split[name] for split in results[alpha]]
            spread = statistics.stdev(values)
            cells.append(f"{statistics.mean(values):.1f} ± {spread:.1f}")
        shown = f"**{name}**" if name == OURS else name
        lines.append(f"| {shown} | " + " | ".join(cells) + " |")
    cells = []
    for alpha in ALPHAS:
        gains = [split[OURS] - split[PAPER] for split in results[alpha]]
        each = ", ".join(f"{gain:+.1f}" for gain in gains)
        cells.append(f"{statistics.mean(gains):+.1f} ({each})")
    lines.append(
        "| default minus paper's Adam (each seed) | " + " | ".join(cells) + " |"
    )
    return lines


def plot(results: Mapping[float, list[dict[str, float]]]) -> None:
    """Draw each split as a point, and the mean over splits as a bar."""
    figure = Figure(figsize=(9, 4.2), dpi=150)
    names = list(results[ALPHAS[0]][0])
    for index, alpha in enumerate(ALPHAS):
        axes = figure.add_subplot(1, len(ALPHAS), index + 1)
        for row, name in enumerate(names):
            values = [split[name] for split in results[alpha]]
            color = "#d1495b" if name == OURS else "#9aa5b1"
            axes.barh(row, statistics.mean(values), color=color, height=0.65)
            axes.plot(values, [row] * len(values), ".", color="#222222", markersize=4)
        axes.set_title(f"α = {alpha}", fontsize="medium")
        axes.set_xlim(0, 100)
        axes.set_yticks(range(len(names)), names if index == 0 else [""] * len(names))
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("test accuracy, % (bars: mean of 3 splits; dots: splits)")
    figure.savefig(RESULTS / "fedfisher_mnist.png", bbox_inches="tight")


def main() -> None:
    """Write the table, the plot and the numbers behind them."""
    data_dir = mnist_folder(__doc__)
    torch.set_num_threads(1)
    results: dict[float, list[dict[str, float]]] = {}
    for alpha in ALPHAS:
        results[alpha] = []
        for seed in SEEDS:
            setting = Setting("mnist", "lenet", alpha, seed)
            results[alpha].append(evaluate(setting, data_dir))
            print(alpha, seed, json.dumps(results[alpha][-1]), flush=True)
    text = "\n".join(table(results))
    head = "# One-shot merging on MNIST\n\n" + (__doc__ or "").split("\n", 2)[2].strip(
        "\n"
    )
    (RESULTS / "fedfisher_mnist.md").write_text(f"{head}\n\n{text}\n")
    (RESULTS / "fedfisher_mnist.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results)
    print(text)


if __name__ == "__main__":
    main()
