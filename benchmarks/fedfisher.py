"""One-shot merging on MNIST and CIFAR-10: every method on the same uploads.

    python benchmarks/fedfisher.py --data-dir DIR [--only mnist]

DIR/MNIST/raw has torchvision's files, DIR/CIFAR10 the images in folders by class,
`train` and `test` (20 000 and 5000 of CIFAR-10's).

5 clients, ``dirichlet-client``, 30 epochs of SGD (lr 0.01, momentum 0.9, batch 64),
six seeds of MNIST with LeNet without biases, three of CIFAR-10 with the CNN. Clients
are trained once (3 and 8 minutes a split on one core) and kept in ``benchmarks/cache``.
Methods marked * choose on 500 training examples that the server holds, as the paper's
do; the others see no data. CIFAR-10's Fishers are those of 1000 of a client's examples,
which merge as well as those of all. *Averaged* uploads are of the same training: the
mean of the parameters after each of the last five epochs, and the Fisher there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import mean

from harness.page import (
    RESULTS,
    blocks,
    command_line,
    opening,
    with_workers,
    write_page,
)
from harness.plots import bars
from harness.splits import on_splits
from harness.stats import each, paired, spread, standard_error
from harness.tables import head, row
from harness.uploads import Setting, posteriors
from torch import Tensor

from flwr_fisher.measures import accuracies, ensemble_accuracy
from flwr_fisher.merge import LocalPosterior, fedavg, fedfisher, fisher_merge, regmean
from flwr_fisher.report.style import save

ALPHAS = (0.2, 0.1, 0.05)
OURS, PAPER = "FedFisher K-FAC, PCG (default)", "FedFisher K-FAC, paper's Adam *"
BEFORE = "FedFisher K-FAC, CG, 100 iterations"
BEST = "best single client (chosen on the test set)"
ENSEMBLE = "ensemble of clients (not one model)"
AVERAGED = ", averaged"

Scores = dict[str, float]

NOTES = """\
The *ensemble* of the clients' networks is ahead of every merged model on most splits.
It need not be one network: after 30 epochs apart the clients' parameters are so far
from each other that a quadratic around each, which is all that a Fisher is, no longer
tells their losses in between. *RegMean* is ahead of the default at α = 0.05 through one
split of three, and behind it on every mean where the last epochs' mean is uploaded.

What else a client's training can do for its merge is in training.md: label smoothing,
weight decay and a floor under the model's certainty did not help this solver here.
"""


@dataclass(frozen=True)
class Problem:
    """A data set and the model for it."""

    title: str
    folder: str  # of its files
    setting: partial[Setting]
    seeds: int  # how many, from 0
    notes: str = ""  # on what was found

    @property
    def name(self) -> str:
        """The page's name."""
        return f"fedfisher_{self.folder.lower()}"


PROBLEMS = {
    "mnist": Problem("MNIST", "MNIST", partial(Setting, "mnist", "lenet"), seeds=6),
    "cifar10": Problem(
        "CIFAR-10",
        "CIFAR10",
        partial(Setting, "imagefolder:CIFAR10", "cnn", averaged=5, examples=1000),
        seeds=3,
        notes=NOTES,
    ),
}


def evaluate(setting: Setting, data_dir: Path) -> Scores:
    """Return every method's test accuracy in per cent on one split."""
    task = setting.task(data_dir)
    kfac = posteriors(setting, task, "kfac")
    diagonal = posteriors(setting, task, "diagonal")
    model, held = task.make_model(), list(task.eval_loader(task.validation))

    def score(params: Mapping[str, Tensor]) -> float:
        return accuracies(model, {"x": params}, held)["x"]

    def models(uploads: Sequence[LocalPosterior]) -> dict[str, Mapping[str, Tensor]]:
        of_regmean = (regmean(uploads, off_diagonal=a) for a in (0.9, 0.1))
        return {
            "FedAvg": fedavg(uploads),
            "RegMean *": max(of_regmean, key=score),
            BEFORE: fedfisher(uploads, solver="cg").params,
            OURS: fedfisher(uploads).params,
        }

    plain = models(kfac)
    candidates = {
        "FedAvg": plain["FedAvg"],
        "FisherMerge (diagonal, closed form)": fisher_merge(diagonal),
        "RegMean *": plain["RegMean *"],
        "FedFisher diagonal, paper's Adam *": fedfisher(
            diagonal, solver="adam", score=score
        ).params,
        PAPER: fedfisher(kfac, solver="adam", score=score).params,
        "FedFisher K-FAC, CG, no regularisation": fedfisher(
            kfac, solver="cg", anchor=0.0, shrink=0.0, damping=0.0, balance=0.0
        ).params,
        BEFORE: plain[BEFORE],
        OURS: plain[OURS],
    }
    test = list(task.test_loader())

    def members(uploads: Sequence[LocalPosterior]) -> Scores:
        params = [upload.params for upload in uploads]
        weights = [upload.num_examples for upload in uploads]
        single = accuracies(model, {str(i): p for i, p in enumerate(params)}, test)
        together = ensemble_accuracy(model, params, weights, test)
        return {BEST: max(single.values()), ENSEMBLE: together}

    found = accuracies(model, candidates, test) | members(kfac)
    if setting.averaged:
        means = posteriors(setting, task, "kfac", averaged=True)
        of_means = accuracies(model, models(means), test) | members(means)
        found |= {f"{name}{AVERAGED}": value for name, value in of_means.items()}
    return {name: 100 * value for name, value in found.items()}


def table(results: Mapping[float, list[Scores]]) -> list[str]:
    """Return the table's lines: mean and standard deviation over seeds."""
    lines = head("test accuracy, %", *(f"α = {alpha}" for alpha in ALPHAS))
    names = list(results[ALPHAS[0]][0])
    for name in names:
        shown = f"**{name}**" if name.startswith(OURS) else name
        lines.append(row(shown, *(spread(of(results[a], name)) for a in ALPHAS)))
    totals = []
    for other in (PAPER, BEST, ENSEMBLE, BEFORE):
        for ending in ("", AVERAGED):
            ours, theirs = OURS + ending, other + ending
            if theirs not in names:
                continue
            gains = [
                paired(of(results[a], ours), of(results[a], theirs)) for a in ALPHAS
            ]
            against = f"default minus {theirs}"
            lines.append(row(against, *(each(gain, 1) for gain in gains)))
            every = [value for gain in gains for value in gain]
            over = f"{mean(every):+.2f} ± {standard_error(every):.2f}"
            totals.append(f"- {against}: {over}")
    splits = sum(len(scores) for scores in results.values())
    return [
        *lines,
        "",
        f"Over all {splits} splits, paired, ± the standard error:",
        "",
        *totals,
    ]


def of(splits: Sequence[Scores], name: str) -> list[float]:
    """Return a method's accuracies, one a split."""
    return [split[name] for split in splits]


def plot(results: Mapping[float, list[Scores]], stem: str) -> None:
    """Draw each split as a point, and the mean over splits as a bar."""
    names = list(results[ALPHAS[0]][0])
    columns = {
        f"α = {alpha}": {name: of(results[alpha], name) for name in names}
        for alpha in ALPHAS
    }
    ours = [name for name in names if name.startswith(OURS)]
    save(bars(columns, ours), RESULTS / f"{stem}.png")


def main() -> None:
    """Write each data set's table, plot and the numbers behind them."""
    parser = with_workers(command_line(__doc__))
    parser.add_argument("--only", choices=PROBLEMS)
    options = parser.parse_args()
    for name in [options.only] if options.only else PROBLEMS:
        problem = PROBLEMS[name]
        if not (options.data_dir / problem.folder).exists():
            print(f"left out, as it is not in {options.data_dir}: {problem.folder}")
            continue
        splits = {
            a: [problem.setting(a, i) for i in range(problem.seeds)] for a in ALPHAS
        }
        every = chain.from_iterable(splits.values())
        found = on_splits("fedfisher", evaluate, every, options)
        results = {a: [found[split] for split in splits[a]] for a in ALPHAS}
        title = f"One-shot merging on {problem.title}"
        page = blocks(opening(title, __doc__), table(results), problem.notes)
        write_page(problem.name, page, results)
        plot(results, problem.name)


if __name__ == "__main__":
    main()
