"""Every one-shot rival of FedFisher, on the same clients' uploads.

    python benchmarks/rivals.py --data-dir DIR [--only mnist] [--seeds 3] [--distil]

DIR/MNIST/raw has torchvision's files, DIR/CIFAR10 the images in folders by class,
`train` and `test` (20 000 and 5000 of CIFAR-10's).

5 clients, ``dirichlet-client``, 30 epochs of SGD (lr 0.01, momentum 0.9, batch 64),
LeNet and the CNN without biases. Clients are trained once and kept in
``benchmarks/cache``. K-FACs are those that ``FedFisherOneShot`` asks for by default;
FedLPA's are empirical, of all examples, as its clients take them, and once FedFisher's
own. Methods marked * choose on 500 training examples that the server holds: between
RegMean's two constants, PFNM's iterations, OTFusion and its neighbour Git Re-Basin,
FedLPA's two solutions, the steps of Adam, the epochs of a student. The others see no
data. Settings are the papers' or their released code's, as each function says.

*Numbers* are those that a client uploads, as multiples of the model's, before a codec
packs them; FedFisher's default packs them into FedAvg's bytes. *Passes* are the
server's seconds in forward and backward passes of the network at batch 32, on one
thread; from sums, with what the clients do in these exchanges.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from fedfisher import ALPHAS, PROBLEMS, Problem
from harness.page import (
    RESULTS,
    blocks,
    command_line,
    opening,
    with_workers,
    write_page,
)
from harness.plots import without_frame
from harness.splits import on_splits
from harness.stats import paired, spread, with_error
from harness.tables import head, row
from harness.uploads import Setting, posteriors
from kfac_sums import from_sums
from matplotlib.figure import Figure
from studies.rivals.split import Rivals, a_pass, given, positions_of

from flwr_fisher.curvature import Kronecker
from flwr_fisher.distillation import Normalised, co_boosting, dense
from flwr_fisher.measures import accuracies, ensemble_accuracy
from flwr_fisher.merge import (
    fedavg,
    fedfisher,
    fedlpa,
    fisher_merge,
    matched,
    otfusion,
    pfnm,
    regmean,
)
from flwr_fisher.report.style import save

SEEDS = 5
EPOCHS = 50  # of a student: each takes a step on all images of the former ones
ITERATIONS = 4
OURS = "FedFisher K-FAC (default)"
MATCHED = f"{OURS}, matched first"
SUMS = "FedFisher K-FAC from sums"
MODELS, FACTORS, DIAGONAL = "models", "models, K-FAC", "models, diagonal"
DATA = ", 500 examples"
CALLED = "models that can be called, an image's shape"
# What each is given, and the numbers that a client uploads, in those of the model.
GIVEN = {
    "FedAvg": (MODELS, ""),
    "OTFusion": (MODELS, ""),
    "Git Re-Basin, then FedAvg": (MODELS, ""),
    "PFNM, FedMA's for convolutions *": (MODELS + DATA, ""),
    "FisherMerge": (DIAGONAL, "D"),
    "RegMean *": ("models, input factors" + DATA, "A"),
    "FedLPA, as released *": ("models, empirical K-FAC" + DATA, "AG"),
    "FedLPA, with FedFisher's factors *": (FACTORS + DATA, "AG"),
    "FedFisher diagonal *": (DIAGONAL + DATA, "D"),
    "FedFisher K-FAC, paper's Adam *": (FACTORS + DATA, "AG"),
    OURS: (FACTORS, "AG"),
    MATCHED: (FACTORS, "AG"),
    SUMS: (f"sums over clients, in {2 + ITERATIONS} exchanges", "S"),
    "DENSE *": (CALLED + DATA, ""),
    "Co-Boosting *": (CALLED + DATA, ""),
    "best single client (chosen on the test set)": (MODELS, ""),
    "ensemble of clients (not one model)": (MODELS, ""),
}
Found = dict[str, dict[str, float]]  # accuracy and passes, by method


def evaluate(setting: Setting, data_dir: Path) -> Found:
    """Return every method's accuracy and cost on one split."""
    task = setting.task(data_dir)
    uploads, model = given(setting, task), task.make_model()
    held, test = list(task.eval_loader(task.validation)), list(task.test_loader())
    split = Rivals(task, model, held, test, a_pass(model, task.validation))
    kfac, diagonal, empirical = (uploads[k] for k in ("kfac", "diagonal", "empirical"))
    where = positions_of(model, held[0][0][:1])
    by_adam = {"solver": "adam", "score": split.score}
    split.run("FedAvg", lambda: fedavg(kfac))
    split.run("OTFusion", lambda: otfusion(kfac))
    split.run("Git Re-Basin, then FedAvg", lambda: fedavg(matched(kfac)))
    split.run(
        "PFNM, FedMA's for convolutions *",
        *(partial(pfnm, kfac, iterations=i) for i in (0, 3)),
    )
    split.run("FisherMerge", lambda: fisher_merge(diagonal))
    split.run(
        "RegMean *", *(partial(regmean, kfac, off_diagonal=a) for a in (0.9, 0.1))
    )
    for name, own in (("as released", empirical), ("with FedFisher's factors", kfac)):
        split.run(
            f"FedLPA, {name} *",
            *(partial(fedlpa, own, steps=k, positions=where) for k in (0, 10_000)),
        )
    split.run("FedFisher diagonal *", lambda: fedfisher(diagonal, **by_adam).params)
    split.run(
        "FedFisher K-FAC, paper's Adam *", lambda: fedfisher(kfac, **by_adam).params
    )
    split.run(OURS, lambda: fedfisher(kfac).params)
    split.run(MATCHED, lambda: fedfisher(matched(kfac)).params)
    split.run(SUMS, lambda: from_sums(kfac, iterations=ITERATIONS))
    params = [upload.params for upload in kfac]
    weights = [upload.num_examples for upload in kfac]
    single = accuracies(model, {str(i): p for i, p in enumerate(params)}, test)
    split.found["best single client (chosen on the test set)"] = {
        "accuracy": 100 * max(single.values()),
        "passes": 0.0,
    }
    together = ensemble_accuracy(model, params, weights, test)
    split.found["ensemble of clients (not one model)"] = {
        "accuracy": 100 * together,
        "passes": 0.0,
    }
    size = sum(value.numel() for value in params[0].values())
    layers = [b.made() for b in kfac[0].curvature.blocks()]
    found = [layer for layer in layers if isinstance(layer, Kronecker)]
    sizes = {"A": sum(x.A.numel() for x in found), "G": sum(x.G.numel() for x in found)}
    return {**split.found, "sizes": {k: n / size for k, n in sizes.items()}}


def distilled(setting: Setting, data_dir: Path) -> Found:
    """Return the students' accuracy and cost on one split."""
    task = setting.task(data_dir)
    model, held = task.make_model(), list(task.eval_loader(task.validation))
    split = Rivals(
        task, model, held, list(task.test_loader()), a_pass(model, task.validation)
    )
    clients = []
    for upload in posteriors(setting, task, "kfac"):
        clients.append(task.make_model())
        clients[-1].load_state_dict(dict(upload.params))
    images = task.data.train
    channels, height, width = images[[0]][0].shape[1:]
    shown = Normalised((channels, height, width), images.mean, images.std)
    for name, method in (("DENSE *", dense), ("Co-Boosting *", co_boosting)):
        student = task.make_model()
        run = partial(
            method, clients, student, shown, num_classes=task.data.num_outputs
        )
        split.run(name, partial(run, epochs=EPOCHS, score=split.score, seed=0))
    return split.found


def accuracy_of(splits: Sequence[Found], name: str) -> list[float]:
    """Return a method's accuracies, one a split."""
    return [split[name]["accuracy"] for split in splits]


def table(results: Mapping[float, list[Found]]) -> list[str]:
    """Return the table's lines: means and standard deviations over seeds."""
    every = list(chain.from_iterable(results.values()))
    sizes = every[0]["sizes"] | {"D": 1.0}
    sizes["S"] = 1 + sizes["A"] + sizes["G"] + ITERATIONS
    columns = [f"α = {alpha}" for alpha in results]
    lines = head(
        "test accuracy, %", *columns, "default minus it", "given", "numbers", "passes"
    )
    ours = accuracy_of(every, OURS)
    for name, (what, sent) in GIVEN.items():
        if name not in every[0]:
            continue
        shown = [spread(accuracy_of(splits, name)) for splits in results.values()]
        gain = with_error(paired(ours, accuracy_of(every, name)), 2)
        numbers = 1 + sum(sizes[each] for each in sent)
        passes = mean(split[name]["passes"] for split in every)
        lines.append(
            row(
                f"**{name}**" if name == OURS else name,
                *shown,
                "" if name == OURS else gain,
                what,
                f"{numbers:.1f}",
                f"{passes:.0f}",
            )
        )
    return lines


def plot(results: Mapping[float, list[Found]], stem: str) -> None:
    """Draw each split as a point, and the mean over splits as a bar."""
    names = [name for name in GIVEN if name in next(iter(results.values()))[0]]
    figure = Figure(figsize=(9, 1.2 + 0.3 * len(names)), dpi=150)
    for index, (alpha, splits) in enumerate(results.items()):
        axes = figure.add_subplot(1, len(results), index + 1)
        for place, name in enumerate(names):
            values = accuracy_of(splits, name)
            color = "#d1495b" if name == OURS else "#9aa5b1"
            axes.barh(place, mean(values), color=color, height=0.65)
            axes.plot(values, [place] * len(values), ".", color="#222222", markersize=4)
        axes.set_title(f"α = {alpha}", fontsize="medium")
        axes.set_xlim(0, 100)
        axes.set_yticks(range(len(names)), names if index == 0 else [""] * len(names))
        axes.invert_yaxis()
        without_frame(axes)
    figure.supxlabel("test accuracy, % (bars: means; dots: splits)")
    save(figure, RESULTS / f"{stem}.png")


def splits_of(
    problem: Problem, alphas: Sequence[float], seeds: int
) -> dict[float, list[Setting]]:
    """Return the seeds' splits for each α."""
    own: dict[str, Any] = {"budget": True, "averaged": 0, "examples": None}
    return {
        alpha: [problem.setting(alpha, seed, **own) for seed in range(seeds)]
        for alpha in alphas
    }


def main() -> None:
    """Write each data set's table, plot and the numbers behind them."""
    parser = with_workers(command_line(__doc__))
    parser.add_argument("--only", choices=PROBLEMS)
    parser.add_argument("--alphas", type=float, nargs="+", default=ALPHAS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--distil", action="store_true", help="and students: hours")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in [options.only] if options.only else PROBLEMS:
        problem = PROBLEMS[name]
        if not (options.data_dir / problem.folder).exists():
            print(f"left out, as it is not in {options.data_dir}: {problem.folder}")
            continue
        splits = splits_of(problem, options.alphas, options.seeds)
        every = list(chain.from_iterable(splits.values()))
        found = on_splits("rivals", evaluate, every, options)
        if options.distil:
            students = on_splits("rivals_distilled", distilled, every, options)
            found = {s: found[s] | students[s] for s in every}
        results = {a: [found[s] for s in own] for a, own in splits.items()}
        title = f"FedFisher and its rivals: {problem.title}"
        page = blocks(opening(title, __doc__), table(results))
        write_page(f"rivals_{name}", page, results)
        plot(results, f"rivals_{name}")


if __name__ == "__main__":
    main()
