"""What a Fisher of few passes costs the merge of small clients.

    python benchmarks/small_clients.py --data-dir DIR   # data as for merges.py

Five clients of 300 to 600 images (the digits' have 280 at most) train for 12 epochs
each, from one start. Splits are by `dirichlet-client`; validation images are apart, and
no test image is looked at. The clients' models are the same in every row; their K-FACs
are of all their examples, three passes each, or of as many, at random, as the passes
allow that a row names, in multiples of a client's number of examples. Half as many is
what ``FedFisherOneShot()`` asks for. The default solver merges.
"""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from fedfisher_defaults import ALPHAS, scored
from harness.page import blocks, command_line, opening, with_workers, write_page
from harness.size import sized
from harness.splits import on_splits
from harness.stats import paired, with_error
from harness.tables import head, row
from harness.uploads import Setting
from tasks import Task

from flwr_fisher.client.training import LocalSGD
from flwr_fisher.curvature import FisherOptions, fisher
from flwr_fisher.merge import LocalPosterior, fedavg, fedfisher
from flwr_fisher.params import shared_state
from flwr_fisher.report import accuracies

SIZES = sized((300, 375, 450, 525, 600), (30, 40, 50, 60, 70))
DATA = {
    "digits": ("digits", "mlp", 16, 397),
    "MNIST": ("mnist", "lenet", 64, 10_000),
    "CIFAR-10": ("imagefolder:CIFAR10", "cnn", 64, 3000),
}
ALL, MEAN = "all examples", "none: FedAvg"
SHARES = {"as many passes": 1.0, "half as many": 0.5, "a quarter": 0.25}
DEFAULT = FisherOptions(examples=None).for_client(None)


def settings(data: str, seeds: int) -> list[Setting]:
    """Return a data set's splits."""
    dataset, model, batch_size, validation = DATA[data]
    return [
        Setting(
            dataset,
            model,
            ALPHAS[index % len(ALPHAS)],
            300 + index,
            epochs=sized(12, 1),
            batch_size=batch_size,
            validation=validation,
            hold_out=True,
        )
        for index in range(seeds)
    ]


def small(task: Task) -> Task:
    """Return a task whose clients have few images, drawn from their own."""
    draw = torch.Generator().manual_seed(task.seed)
    parts = []
    for part, size in zip(task.parts, SIZES, strict=True):
        order = torch.randperm(len(part), generator=draw)[:size]
        parts.append([part[i] for i in order.tolist()])
    return replace(task, parts=parts)


def trained(setting: Setting, task: Task) -> Iterator[tuple[int, dict[str, Any], Any]]:
    """Yield each client's number of images, its trained model and its images."""
    for client in range(setting.clients):
        torch.manual_seed(1000 * setting.seed + client)
        model = task.make_model()
        loader = task.train_loader(client, setting.batch_size)
        LocalSGD(epochs=setting.epochs)(model, loader, torch.device("cpu"), {})
        own = task.eval_loader(task.train_images(client), setting.batch_size)
        yield task.num_examples(client), shared_state(model), own


def evaluate(setting: Setting, data_dir: Path) -> dict[str, float]:
    """Return the merges' validation accuracy in per cent."""
    torch.set_num_threads(1)
    task = small(setting.task(data_dir))
    model, loader = task.make_model(), scored(task)
    clients: dict[str, list[LocalPosterior]] = {name: [] for name in (ALL, *SHARES)}
    for client, (count, params, own) in enumerate(trained(setting, task)):
        model.load_state_dict(params)
        params = {name: value.clone() for name, value in params.items()}
        for name, uploads in clients.items():
            passes = int(SHARES[name] * count) if name in SHARES else None
            options = DEFAULT | {"total_passes": passes, "seed": client}
            uploads.append(LocalPosterior(params, fisher(model, own, **options), count))
    merged = {name: fedfisher(uploads).params for name, uploads in clients.items()}
    merged[MEAN] = fedavg(clients[ALL])
    found = accuracies(model, merged, loader)
    return {name: 100 * value for name, value in found.items()}


def table(found: dict[str, list[dict[str, float]]]) -> list[str]:
    """Return the means, and the differences to a Fisher of all examples."""
    lines = head("Fisher of", *(f"{d}, % (minus {ALL} ± s.e.)" for d in found))
    for name in (ALL, *SHARES, MEAN):
        cells = []
        for splits in found.values():
            values, whole = ([split[n] for split in splits] for n in (name, ALL))
            lost = "" if name == ALL else f" ({with_error(paired(values, whole), 2)})"
            cells.append(f"{fmean(values):.2f}{lost}")
        lines.append(row(name, *cells))
    return lines


def main() -> None:
    """Write the page, without the data sets that are not there."""
    parser = with_workers(command_line(__doc__))
    parser.add_argument("--splits", type=int, default=sized(6, 2))
    options: Namespace = parser.parse_args()
    found = {}
    for data, (dataset, *_) in DATA.items():
        folder = {"mnist": "MNIST", "imagefolder:CIFAR10": "CIFAR10"}.get(dataset)
        if folder and not (options.data_dir / folder).exists():
            print(f"{folder} is not in {options.data_dir}: {data} is left out")
            continue
        splits = settings(data, options.splits)
        each = on_splits("small-clients", evaluate, splits, options)
        found[data] = [each[split] for split in splits]
    note = f"{options.splits} splits a data set."
    lines = blocks(opening("Small clients", __doc__), note, table(found))
    write_page("small_clients", lines, found)


if __name__ == "__main__":
    main()
