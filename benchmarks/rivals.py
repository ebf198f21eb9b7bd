"""Every one-shot rival of FedFisher, on the same clients' uploads.

    python benchmarks/rivals.py --data-dir DIR [--only mnist] [--parts merges students]

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
    numbers_of,
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
    LocalPosterior,
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

EPOCHS = 50  # of a student: each takes a step on all images of the former ones
# What is run, and on how many seeds: the paper's 2000 steps of Adam and the students
# take a core a quarter of an hour and more for one split of CIFAR-10.
PARTS = {
    "merges": {"mnist": 5, "cifar10": 5},
    "adam": {"mnist": 5, "cifar10": 1},
    "students": {"mnist": 1, "cifar10": 1},
    "constants": {"mnist": 5, "cifar10": 5},
}
# What rivals teach: the default's constants, and others, on the server's examples.
CONSTANTS: dict[str, dict[str, float]] = {
    "default": {},
    "5 iterations": {"iterations": 5},
    "2 iterations": {"iterations": 2},
    "robust 3": {"robust": 3},
    "robust 3, 5 iterations": {"robust": 3, "iterations": 5},
    "balance 1": {"balance": 1, "robust": 0},
    "balance 1, max_share 1": {"balance": 1, "robust": 0, "max_share": 1},
    "balance 1, 2 iterations": {"balance": 1, "robust": 0, "iterations": 2},
    "balance 1/2": {"balance": 0.5, "robust": 0},
    "balance 1/2, robust 1": {"balance": 0.5},
    "balance 1, robust 1": {"balance": 1},
}
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


def started(setting: Setting, data_dir: Path) -> Rivals:
    """Return a split on which nothing has been run."""
    task = setting.task(data_dir)
    model, held = task.make_model(), list(task.eval_loader(task.validation))
    test = list(task.test_loader())
    return Rivals(task, model, held, test, a_pass(model, task.validation))


def prepared(
    setting: Setting, data_dir: Path
) -> tuple[Rivals, dict[str, list[LocalPosterior]]]:
    """Return a split, and what its clients upload."""
    split = started(setting, data_dir)
    return split, given(setting, split.task)


def merges(setting: Setting, data_dir: Path) -> Found:
    """Return every merge's accuracy and cost on one split, but Adam's."""
    split, uploads = prepared(setting, data_dir)
    model, test = split.model, split.test
    kfac, diagonal, empirical = (uploads[k] for k in ("kfac", "diagonal", "empirical"))
    where = positions_of(model, split.held[0][0][:1])
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


def constants(setting: Setting, data_dir: Path) -> Found:
    """Return accuracies of the default's solver with other constants on one split."""
    split = started(setting, data_dir)
    uploads = posteriors(setting, split.task, "kfac")
    made = {name: fedfisher(uploads, **own).params for name, own in CONSTANTS.items()}
    made["from sums"] = from_sums(uploads, iterations=ITERATIONS)
    held = accuracies(split.model, made, split.held)
    test = accuracies(split.model, made, split.test)
    return {n: {"held": 100 * held[n], "accuracy": 100 * test[n]} for n in made}


def adam(setting: Setting, data_dir: Path) -> Found:
    """Return the accuracy and cost of the paper's solver on one split."""
    split, uploads = prepared(setting, data_dir)
    run = partial(fedfisher, solver="adam", score=split.score)
    split.run("FedFisher diagonal *", lambda: run(uploads["diagonal"]).params)
    split.run("FedFisher K-FAC, paper's Adam *", lambda: run(uploads["kfac"]).params)
    return split.found


def students(setting: Setting, data_dir: Path) -> Found:
    """Return the students' accuracy and cost on one split."""
    split = started(setting, data_dir)
    task, clients = split.task, []
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


Results = Mapping[float, Sequence[Found]]  # each α's splits


def accuracy_of(splits: Sequence[Found], name: str) -> list[float]:
    """Return a method's accuracies, one a split that it was run on."""
    return [split[name]["accuracy"] for split in splits if name in split]


def table(results: Results) -> list[str]:
    """Return the table's lines: means and standard deviations over seeds."""
    every = list(chain.from_iterable(results.values()))
    sizes = every[0]["sizes"] | {"D": 1.0}
    sizes["S"] = 1 + sizes["A"] + sizes["G"] + ITERATIONS
    columns = [f"α = {alpha}" for alpha in results]
    lines = head(
        "test accuracy, %", *columns, "default minus it", "given", "numbers", "passes"
    )
    for name in methods_of(results):
        what, sent = GIVEN[name]
        own = [split for split in every if name in split]
        gain = paired(accuracy_of(own, OURS), accuracy_of(own, name))
        fewer = "" if len(own) == len(every) else f" ({len(own)} splits)"
        lines.append(
            row(
                (f"**{name}**" if name == OURS else name) + fewer,
                *(shown(accuracy_of(splits, name)) for splits in results.values()),
                "" if name == OURS else with_error(gain, 2),
                what,
                f"{1 + sum(sizes[each] for each in sent):.1f}",
                f"{mean(split[name]['passes'] for split in own):.0f}",
            )
        )
    return lines


def shown(accuracies: Sequence[float]) -> str:
    """Return mean and standard deviation, or a single number as it is."""
    return spread(accuracies) if len(accuracies) > 1 else f"{accuracies[0]:.1f}"


def methods_of(results: Results) -> list[str]:
    """Return the methods that were run for every α."""
    return [n for n in GIVEN if all(accuracy_of(s, n) for s in results.values())]


def plot(results: Results, stem: str) -> None:
    """Draw each split as a point, and the mean over splits as a bar."""
    names = methods_of(results)
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


def joined(numbers: Mapping[str, Mapping[str, Found]], split: str) -> Found:
    """Return what all parts found on a split."""
    found: Found = {}
    for part in numbers.values():
        found |= part.get(split, {})
    return found


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
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=list(PARTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    evaluate = {
        "merges": merges,
        "adam": adam,
        "students": students,
        "constants": constants,
    }
    for name in [options.only] if options.only else PROBLEMS:
        problem = PROBLEMS[name]
        if not (options.data_dir / problem.folder).exists():
            print(f"left out, as it is not in {options.data_dir}: {problem.folder}")
            continue
        stem = f"rivals_{name}"
        numbers = numbers_of(stem)
        for part in options.parts:
            splits = splits_of(problem, ALPHAS, PARTS[part][name])
            every = sorted(chain.from_iterable(splits.values()), key=lambda s: s.seed)
            known = numbers.get(part, {})
            found = on_splits(f"rivals_{part}", evaluate[part], every, options, known)
            numbers[part] = known | {s.folder.name: v for s, v in found.items()}
        own = splits_of(problem, ALPHAS, PARTS["merges"][name])
        results = {
            alpha: [joined(numbers, s.folder.name) for s in splits]
            for alpha, splits in own.items()
        }
        title = f"FedFisher and its rivals: {problem.title}"
        picture = f"![accuracies]({stem}.png)"
        page = blocks(opening(title, __doc__), picture, table(results))
        write_page(stem, page, numbers)
        plot(results, stem)


if __name__ == "__main__":
    main()
