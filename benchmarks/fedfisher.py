"""One-shot merging on MNIST: every method on the same uploads.

    python benchmarks/fedfisher.py --data-dir DIR   # DIR/MNIST/raw has the files

LeNet without biases, 5 clients, ``dirichlet-client``, 30 epochs of SGD (lr 0.01,
momentum 0.9, batch 64), seeds 0-2. Clients are trained once (about 3 minutes a split on
one core) and kept in ``benchmarks/cache``. Methods marked * choose on 500 training
examples that the server holds, as the paper's do; the others see no data.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import torch
from harness.page import (
    RESULTS,
    blocks,
    command_line,
    mnist_folder,
    opening,
    write_page,
)
from harness.plots import without_frame
from harness.stats import each, paired, spread, standard_error
from harness.tables import head, row
from harness.uploads import Setting, posteriors
from matplotlib.figure import Figure
from torch import Tensor

from flwr_fisher.measures import accuracies, ensemble_accuracy
from flwr_fisher.merge import fedavg, fedfisher, fisher_merge, regmean
from flwr_fisher.report.style import save

ALPHAS, SEEDS = (0.2, 0.1, 0.05), (0, 1, 2)
OURS, PAPER = "FedFisher K-FAC, PCG (default)", "FedFisher K-FAC, paper's Adam *"
BEFORE = "FedFisher K-FAC, CG, 100 iterations"


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
        "FedFisher diagonal, paper's Adam *": fedfisher(
            diagonal, solver="adam", score=score
        ).params,
        PAPER: fedfisher(kfac, solver="adam", score=score).params,
        "FedFisher K-FAC, CG, no regularisation": fedfisher(
            kfac, solver="cg", anchor=0.0, shrink=0.0, damping=0.0, balance=0.0
        ).params,
        BEFORE: fedfisher(kfac, solver="cg").params,
        OURS: fedfisher(kfac).params,
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
    lines = head("test accuracy, %", *(f"α = {alpha}" for alpha in ALPHAS))
    for name in results[ALPHAS[0]][0]:
        shown = f"**{name}**" if name == OURS else name
        lines.append(row(shown, *(spread(of(results[a], name)) for a in ALPHAS)))
    for name in (PAPER, BEFORE):
        gains = [paired(of(results[a], OURS), of(results[a], name)) for a in ALPHAS]
        lines.append(row(f"default minus {name}", *(each(gain, 1) for gain in gains)))
    every = [value for gain in gains for value in gain]
    over = f"{mean(every):+.2f} ± {standard_error(every):.2f} (standard error)"
    return [*lines, "", f"Default minus {BEFORE}: {over}, {len(every)} splits."]


def of(splits: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """Return a method's accuracies, one a split."""
    return [split[name] for split in splits]


def plot(results: Mapping[float, list[dict[str, float]]]) -> None:
    """Draw each split as a point, and the mean over splits as a bar."""
    figure = Figure(figsize=(9, 4.2), dpi=150)
    names = list(results[ALPHAS[0]][0])
    for index, alpha in enumerate(ALPHAS):
        axes = figure.add_subplot(1, len(ALPHAS), index + 1)
        for place, name in enumerate(names):
            values = of(results[alpha], name)
            color = "#d1495b" if name == OURS else "#9aa5b1"
            axes.barh(place, mean(values), color=color, height=0.65)
            axes.plot(values, [place] * len(values), ".", color="#222222", markersize=4)
        axes.set_title(f"α = {alpha}", fontsize="medium")
        axes.set_xlim(0, 100)
        axes.set_yticks(range(len(names)), names if index == 0 else [""] * len(names))
        axes.invert_yaxis()
        without_frame(axes)
    figure.supxlabel("test accuracy, % (bars: mean of 3 splits; dots: splits)")
    save(figure, RESULTS / "fedfisher_mnist.png")


def main() -> None:
    """Write the table, the plot and the numbers behind them."""
    data_dir = mnist_folder(command_line(__doc__).parse_args())
    torch.set_num_threads(1)
    results: dict[float, list[dict[str, float]]] = {}
    for alpha in ALPHAS:
        results[alpha] = []
        for seed in SEEDS:
            setting = Setting("mnist", "lenet", alpha, seed)
            results[alpha].append(evaluate(setting, data_dir))
            print(alpha, seed, json.dumps(results[alpha][-1]), flush=True)
    lines = blocks(opening("One-shot merging on MNIST", __doc__), table(results))
    write_page("fedfisher_mnist", lines, results)
    plot(results)


if __name__ == "__main__":
    main()
