"""How little of a client's data its Fisher needs, by the merge's accuracy.

    python benchmarks/budget.py --data-dir DIR   # data as for merges.py

Splits and images are those of `fedfisher_defaults.py`, three a data set (α = 0.2): no
test image is looked at. The clients' models are the same in every row; K-FAC is that of
all of a client's examples, over its most likely classes up to the default tolerance, or
that of a budget. Rows are drawn anew for every client. The default solver merges.
``FedFisherOneShot`` asks clients as large as these for 1000 examples, 32 positions and
3 passes.

The last table has K-FAC's relative errors (Frobenius) to those of all examples in the
worst layer, a mean over the clients of the first split. What 1000 examples leave out is
more than what positions do, down to 32 of them (64 for G).
"""

from itertools import chain
from pathlib import Path
from statistics import fmean

import torch
from fedfisher_defaults import ALPHAS, asked_for, scored
from harness.page import blocks, command_line, opening, with_workers, write_page
from harness.size import sized
from harness.splits import on_splits
from harness.stats import paired, with_error
from harness.tables import head, row
from harness.uploads import Setting, posteriors
from tasks import Task

from flwr_fisher.curvature import Curvature, FisherOptions, Kronecker, fisher
from flwr_fisher.merge import LocalPosterior, fedfisher
from flwr_fisher.report import accuracies

COLUMNS = {
    "MNIST": ("MNIST, lenet", "MNIST, mlp", "MNIST, lenet, 30 epochs"),
    "CIFAR-10": ("CIFAR-10, cnn", "CIFAR-10, lenet", "CIFAR-10, cnn, 30 epochs"),
}
ALL = "all examples"
EVERY_CLASS = f"{ALL}, all classes"
REDUCED = f"{ALL}, weight_sharing='reduce'"
BUDGETS = {
    ALL: FisherOptions.full(),
    EVERY_CLASS: FisherOptions.full(tolerance=0),
    REDUCED: FisherOptions.full(weight_sharing="reduce"),
    "1000 examples": FisherOptions.full(examples=1000),
    "500 examples": FisherOptions.full(examples=500),
    "300 examples": FisherOptions.full(examples=300),
} | {
    f"{examples} examples, {positions} positions, {passes} passes": FisherOptions(
        examples=examples, max_positions=positions, max_passes=passes
    )
    for examples, positions, passes in (
        (1000, 64, 3),
        (1000, 32, 3),
        (1000, 16, 3),
        (1000, 32, 2),
        (800, 32, 3),
        (500, 32, 3),
        (500, 16, 3),
    )
}
BUDGETS["1000 examples, 32 positions, one sampled label"] = FisherOptions(
    expectation="sampled", examples=1000, max_positions=32
)
BUDGETS = sized(BUDGETS, {name: BUDGETS[name] for name in (ALL, "1000 examples")})


def with_budget(
    uploads: list[LocalPosterior], setting: Setting, task: Task, budget: FisherOptions
) -> list[LocalPosterior]:
    """Return the clients' trained models, each with its Fisher within a budget."""
    model, clients = task.make_model(), []
    for client, trained in enumerate(uploads):
        model.load_state_dict(trained.params)
        own = task.eval_loader(task.train_images(client), setting.batch_size)
        count = int(trained.num_examples)
        curvature = fisher(model, own, options=budget, num_examples=count, seed=client)
        clients.append(LocalPosterior(trained.params, curvature, count))
    return clients


def evaluate(setting: Setting, data_dir: Path) -> dict[str, float]:
    """Return the merge's validation accuracy in per cent with every budget."""
    task = setting.task(data_dir)
    model, loader = task.make_model(), scored(task)
    uploads, found = posteriors(setting, task), {}
    for name, budget in BUDGETS.items():
        params = fedfisher(with_budget(uploads, setting, task, budget)).params
        found[name] = 100 * accuracies(model, {"x": params}, loader)["x"]
    return found


def errors(setting: Setting, data_dir: Path) -> dict[str, list[float]]:
    """Return the errors of A and G in the worst layer, a mean over clients."""
    task = setting.task(data_dir)
    uploads, found = posteriors(setting, task), {}
    whole = with_budget(uploads, setting, task, BUDGETS[ALL])
    for name, budget in BUDGETS.items():
        if name in (ALL, EVERY_CLASS, REDUCED):
            continue
        close = with_budget(uploads, setting, task, budget)
        pairs = zip(whole, close, strict=True)
        each = [_worst(a.curvature, b.curvature) for a, b in pairs]
        found[name] = [fmean(values) for values in zip(*each, strict=True)]
    return found


def _worst(exact: Curvature, close: Curvature) -> list[float]:
    pairs = list(zip(exact.blocks(), close.blocks(), strict=True))
    kfac = [(a, b) for a, b in pairs if isinstance(a, Kronecker)]
    return [
        max(
            float(torch.dist(a := getattr(x, name), getattr(y, name)) / a.norm())
            for x, y in kfac
        )
        for name in ("A", "G")
    ]


def table(splits: list[dict[str, float]]) -> list[str]:
    """Return a data set's means, and the differences to all examples."""
    lines = head("Fisher of", "validation accuracy, %", f"minus {ALL} ± s.e.")
    whole = [split[ALL] for split in splits]
    for name in BUDGETS:
        values = [split[name] for split in splits]
        lost = "" if name == ALL else with_error(paired(values, whole), 2)
        lines.append(row(name, f"{fmean(values):.2f}", lost))
    return lines


def errors_table(found: dict[str, dict[str, list[float]]]) -> list[str]:
    """Return each data set's errors of A and of G."""
    titles = [f"{data}, {factor}" for data in found for factor in ("A", "G")]
    lines = head("Fisher of", *titles)
    for name in next(iter(found.values())):
        cells = (f"{value:.3f}" for each in found.values() for value in each[name])
        lines.append(row(name, *cells))
    return lines


def main() -> None:
    """Write a table for each data set, and one of errors."""
    options = with_workers(command_line(__doc__)).parse_args()
    known = asked_for()
    splits = {
        data: [s for column in names for s in known[column] if s.alpha == ALPHAS[0]]
        for data, names in COLUMNS.items()
    }
    every = chain.from_iterable(splits.values())
    each = on_splits("budget", evaluate, every, options)
    found = {data: [each[split] for split in own] for data, own in splits.items()}
    tables = [part for data in COLUMNS for part in (f"## {data}", table(found[data]))]
    first = {data: own[0] for data, own in splits.items()}
    off = on_splits("budget-errors", errors, first.values(), options)
    of_data = {data: off[split] for data, split in first.items()}
    tables += ["## Errors of the factors", errors_table(of_data)]
    lines = blocks(opening("A Fisher's budget", __doc__), *tables)
    write_page("budget", lines, {"accuracy": found, "errors": of_data})


if __name__ == "__main__":
    main()
