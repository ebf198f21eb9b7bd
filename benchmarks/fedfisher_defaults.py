"""Choose the default solver's constants on validation data alone.

    python benchmarks/fedfisher_defaults.py --data-dir DIR

`--columns N` runs the first N data sets and models alone. DIR/MNIST has torchvision's
files and DIR/CIFAR10 the images in folders by class, `train` and `test`; without one of
them its columns are left out, by name.

Splits, seeds (100 and up) and images are not those of ``merges.py``: the clients
train without the validation images, and no test image is looked at. Partitions are
`dirichlet-client`, a split for each of α = 0.2, 0.1 and 0.05. Most clients train for 12
epochs, two columns for the 30 of the final runs, which leaves some so sure of
themselves that their Fishers all but vanish. Fishers are those that
``FedFisherOneShot`` asks for by default.

The default is the candidate that attacks move least of those
that are level with the best.

A candidate is *weights* (`balance` and `robust`), `anchor`, and `shrink` with
`damping`, at four iterations; the default's constants are tried with other numbers of
iterations, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.page import blocks, command_line, opening, with_workers, write_page
from harness.size import sized
from harness.splits import on_splits
from harness.stats import paired, with_error
from harness.tables import head, row
from harness.uploads import Setting, posteriors
from rivals.regmean import regmean
from tasks import Task
from torch import Tensor

from flwr_fisher.merge import LocalPosterior, fedavg, fedfisher
from flwr_fisher.report import accuracies

ALPHAS = sized((0.2, 0.1, 0.05), (0.2, 0.1))
SCORED = sized(2000, 100)  # validation images, at most
BEFORE = "CG, 100 iterations, its own constants"
WEIGHTS = {
    "plain": {"balance": 0.0, "robust": 0.0},
    "balance 1/2": {"balance": 0.5, "robust": 0.0},
    "balance 1": {"balance": 1.0, "robust": 0.0},
    "robust 1": {"balance": 0.0, "robust": 1.0},
    "robust 3": {"balance": 0.0, "robust": 3.0},
    "balance 1/2, robust 1": {"balance": 0.5, "robust": 1.0},
    "balance 1, robust 1": {"balance": 1.0, "robust": 1.0},
    "balance 1, robust 3": {"balance": 1.0, "robust": 3.0},
}
ANCHORS = sized((0.03, 0.1, 0.3), (0.1,))
# Of shrink and damping.
CORRELATIONS = sized(((0.1, 0.3), (0.3, 0.0), (0.3, 0.1)), ((0.3, 0.0),))
ITERATIONS = sized((1, 2, 3, 4, 5, 10, 100), (4, 5))  # of the default, but for this
DEFAULT = "default, iterations 4"
REFERENCES = ("FedAvg", "RegMean, off-diagonal 0.9", BEFORE)
Scores = dict[str, list[dict[str, float]]]  # of a column's splits, by method


def columns() -> dict[str, list[Setting]]:
    """Return the splits of each column."""
    large: dict[str, Any] = {"epochs": 12, "hold_out": True, "examples": 1000}
    large["averaged"] = 5  # which changes nothing here, and is there for training.py
    digits = {"epochs": 30, "batch_size": 16, "validation": 237, "hold_out": True}
    cifar = large | {"validation": 3000}
    mnist = large | {"validation": 10_000}
    long = {"epochs": 30}

    def splits(dataset: str, model: str, first: int, **rest: Any) -> list[Setting]:
        return [
            Setting(dataset, model, alpha, first + index, **rest)
            for index, alpha in enumerate(ALPHAS)
        ]

    images = "imagefolder:CIFAR10"
    return {
        "digits, mlp": splits("digits", "mlp", 100, **digits),
        "digits, lenet-bias": splits("digits", "lenet-bias", 103, **digits),
        "MNIST, lenet": splits("mnist", "lenet", 100, **mnist),
        "CIFAR-10, cnn": splits(images, "cnn", 100, **cifar),
        "MNIST, mlp": splits("mnist", "mlp", 103, **mnist),
        "CIFAR-10, lenet": splits(images, "lenet", 103, **cifar),
        "MNIST, lenet, 20 clients": splits("mnist", "lenet", 106, clients=20, **mnist),
        "MNIST, lenet, 30 epochs": splits("mnist", "lenet", 202, **mnist | long),
        "CIFAR-10, cnn, 30 epochs": splits(images, "cnn", 202, **cifar | long),
    }


def asked_for() -> dict[str, list[Setting]]:
    """Return the same splits with the Fishers that a strategy asks for by default."""
    return {
        column: [replace(s, budget=True, averaged=0, examples=None) for s in splits]
        for column, splits in columns().items()
    }


def candidates() -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the candidates' names and options."""
    for weights, anchor, (shrink, damping) in product(WEIGHTS, ANCHORS, CORRELATIONS):
        name = f"{weights}, anchor {anchor}, shrink {shrink}, damping {damping}"
        options = WEIGHTS[weights] | {"anchor": anchor, "shrink": shrink}
        yield name, options | {"damping": damping}
    for iterations in ITERATIONS:
        yield _default_with(iterations), {"iterations": iterations}


def _default_with(iterations: int) -> str:
    return f"default, iterations {iterations}"


def merges(
    clients: Sequence[LocalPosterior],
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield every method's name and model."""
    references = fedavg(clients), regmean(clients), fedfisher(clients, solver="cg")
    yield from zip(REFERENCES, (*references[:2], references[2].params), strict=True)
    for name, options in candidates():
        yield name, fedfisher(clients, **options).params


def scored(task: Task) -> list[tuple[Tensor, Tensor]]:
    """Return the validation images that models are scored on, in batches."""
    assert task.validation is not None
    some = task.validation.subset(list(range(min(SCORED, len(task.validation)))))
    return list(task.eval_loader(some, SCORED))


def evaluate(setting: Setting, data_dir: Path) -> dict[str, float]:
    """Return every method's validation accuracy in per cent."""
    task = setting.task(data_dir)
    clients, loader = posteriors(setting, task), scored(task)
    model, found = task.make_model(), {}
    for name, params in merges(clients):
        found[name] = 100 * accuracies(model, {"x": params}, loader)["x"]
    return found


def missing(setting: Setting, data_dir: Path) -> bool:
    """Return whether a split's files are not there."""
    folder = {"mnist": "MNIST", "imagefolder:CIFAR10": "CIFAR10"}.get(setting.dataset)
    return folder is not None and not (data_dir / folder).exists()


def table(scores: Scores, names: Sequence[str]) -> list[str]:
    """Return the table of some methods, over all columns."""
    last = ("mean", "minus the default ± s.e.")
    lines = head("validation accuracy, %", *scores, *last)
    default = _on_every_split(scores, DEFAULT)
    for name in names:
        cells = [
            f"{fmean(split[name] for split in each):.1f}" for each in scores.values()
        ]
        values = _on_every_split(scores, name)
        away = "" if values == default else with_error(paired(values, default), 2)
        lines.append(row(name, *cells, f"{fmean(values):.2f}", away))
    return lines


def _on_every_split(scores: Scores, name: str) -> list[float]:
    return [split[name] for column in scores.values() for split in column]


def page(scores: Scores) -> list[str]:
    """Return the page's lines."""
    splits = sum(len(column) for column in scores.values())
    methods = next(iter(scores.values()))[0]
    grid = [name for name in methods if name.startswith(tuple(WEIGHTS))]
    best = sorted(grid, key=lambda name: -fmean(_on_every_split(scores, name)))
    of_each = [next(n for n in best if n.startswith(f"{kind}, a")) for kind in WEIGHTS]
    return blocks(
        opening("Choosing the default solver's constants", __doc__),
        f"Means over three splits a column, and differences over all {splits}; the "
        f"default's row has none. The 20 best of {len(best)}, and the 3 worst:",
        table(scores, [*REFERENCES, *best[:20], *best[-3:]]),
        "The best of each kind of weights:",
        table(scores, of_each),
        "The default's constants, by the number of iterations:",
        table(scores, [_default_with(iterations) for iterations in ITERATIONS]),
    )


def main() -> None:
    """Write the tables."""
    parser = with_workers(command_line(__doc__))
    parser.add_argument(
        "--columns",
        type=int,
        default=sized(None, 3),
        help="only so many; by default all",
    )
    options = parser.parse_args()
    data_dir: Path = options.data_dir
    scores: Scores = {}
    for column, splits in islice(asked_for().items(), options.columns):
        if missing(splits[0], data_dir):
            print(f"left out, as {data_dir} has not its files: {column}", flush=True)
            continue
        found = on_splits("defaults", evaluate, splits, options)
        scores[column] = list(found.values())
    write_page("fedfisher_defaults", page(scores), scores)


if __name__ == "__main__":
    main()
