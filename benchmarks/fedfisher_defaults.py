"""Choose the default solver's regularisation on validation data alone.

Splits, seeds (100 and up) and images are not those of ``benchmarks/fedfisher.py``: the
clients train without the validation examples, and no test image is looked at.

    python benchmarks/fedfisher_defaults.py --data-dir DIR   # DIR/MNIST has the files
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from harness.page import command_line, write_page
from harness.tables import head, row
from harness.uploads import Setting, posteriors

from flwr_fisher.measures import accuracies
from flwr_fisher.merge import LocalPosterior, fedavg, fedfisher, regmean
from flwr_fisher.tasks import Task

ALPHAS = (0.2, 0.1, 0.05)
Method = Callable[[Sequence[LocalPosterior]], dict[str, torch.Tensor]]


def settings() -> dict[str, list[Setting]]:
    """Return the splits of each column."""
    digits = {"epochs": 30, "batch_size": 16, "validation": 237, "hold_out": True}
    return {
        "MNIST, lenet": [
            Setting("mnist", "lenet", alpha, seed, validation=10_000, hold_out=True)
            for seed, alpha in itertools.product(range(100, 104), ALPHAS)
        ],
        "digits, mlp": [
            Setting("digits", "mlp", alpha, seed, **digits)
            for seed, alpha in itertools.product(range(100, 106), ALPHAS)
        ],
        "digits, lenet-bias": [
            Setting("digits", "lenet-bias", alpha, seed, **digits)
            for seed, alpha in itertools.product(range(100, 106), ALPHAS)
        ],
    }


def grid() -> dict[str, Method]:
    """Return the candidates by name, the references first."""
    methods: dict[str, Method] = {
        "FedAvg": fedavg,
        "RegMean, off-diagonal 0.9": regmean,
        "no regularisation": candidate(0.0, 0.0, 0.0, 0.0),
    }
    values = {
        "anchor": (0.03, 0.1, 0.3),
        "shrink": (0.0, 0.1, 0.3),
        "damping": (0.0, 0.1, 0.3),
        "balance": (0.0, 0.5, 1.0),
    }
    for chosen in itertools.product(*values.values()):
        name = ", ".join(f"{k} {v}" for k, v in zip(values, chosen, strict=True))
        methods[name] = candidate(*chosen)
    return methods


def candidate(anchor: float, shrink: float, damping: float, balance: float) -> Method:
    """Return the default solver with these values."""

    def merge(clients: Sequence[LocalPosterior]) -> dict[str, torch.Tensor]:
        return fedfisher(
            clients, anchor=anchor, shrink=shrink, damping=damping, balance=balance
        ).params

    return merge


def column(splits: list[Setting], data_dir: Path) -> dict[str, float]:
    """Return every candidate's mean validation accuracy over the splits."""
    total = dict.fromkeys(grid(), 0.0)
    for setting in splits:
        task: Task = setting.task(data_dir)
        assert task.validation is not None
        some = task.validation.subset(list(range(min(2000, len(task.validation)))))
        clients = posteriors(setting, task)
        merged = {name: method(clients) for name, method in grid().items()}
        loader = task.eval_loader(some, 2000)
        for name, value in accuracies(task.make_model(), merged, loader).items():
            total[name] += 100 * value / len(splits)
    return total


def main() -> None:
    """Write the table, best first under the references."""
    data_dir = command_line(__doc__).parse_args().data_dir
    torch.set_num_threads(1)
    columns = {
        name: column(splits, data_dir)
        for name, splits in settings().items()
        if splits[0].dataset != "mnist" or (data_dir / "MNIST").exists()
    }
    rows = {name: [values[name] for values in columns.values()] for name in grid()}
    mean = {name: sum(values) / len(values) for name, values in rows.items()}
    order = [*list(rows)[:3], *sorted(list(rows)[3:], key=lambda n: -mean[n])]
    lines = [
        "# Choosing the default solver's regularisation",
        "",
        "Validation accuracy in per cent: the mean over "
        + ", ".join(f"{len(s)} splits of {n}" for n, s in settings().items())
        + ", each over α = 0.2, 0.1, 0.05 (`dirichlet-client`, 5 clients, 30 epochs).",
        "Made by `python benchmarks/fedfisher_defaults.py`. "
        "The 25 best of 81 and the 5 worst:",
        "",
        *head("conjugate gradients with", *columns, "mean"),
    ]
    for name in [*order[:28], *order[-5:]]:
        cells = (f"{value:.1f}" for value in rows[name])
        lines.append(row(name, *cells, f"{mean[name]:.2f}"))
    write_page("fedfisher_defaults", lines)


if __name__ == "__main__":
    main()
