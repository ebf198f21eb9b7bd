"""One-shot merging away from the main tables: more clients, rounds, other starts.

    python benchmarks/one_shot.py --data-dir DIR

DIR/MNIST/raw has torchvision's files, DIR/CIFAR10 the images in folders by class.
`--only clients`, `rounds` or `pretrained` runs a part; the page has all that were ever
run. ``dirichlet-client``; SGD with momentum 0.9 in batches of 64 at rate
0.01; K-FACs as ``FedFisherOneShot`` asks for them; no method sees server data. Mean ±
standard deviation over three seeds.

**Clients**: MNIST, LeNet, α = 0.3, 30 epochs, 10, 20 and 30 clients (FedFisher's figure
3). **Rounds**: MNIST, LeNet, 5 clients, α = 0.1, 20 000 images, five rounds of 10
epochs (figure 2); the head and the steps of ``refine=``. **Pretrained**: CIFAR-10, 5
clients, α = 0.1; a CNN, and a residual network of 7 convolutions with group norm, are
trained for 20 epochs on 10 000 images that no client has, and tuned by the clients on
the other 10 000 for 10 epochs at rate 0.001 (table 3, whose ResNet-18 comes from Tiny-
ImageNet).
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from harness.jobs import kept_by_seed
from harness.page import CACHE, Page, opening
from harness.size import sized
from harness.splits import on_splits
from harness.stats import paired, spread, with_error
from harness.tables import head, row
from harness.uploads import Setting
from studies.one_shot.merges import OURS, ROUNDS, RUNS, once, pretrained, rounds

SEEDS = sized((0, 1, 2), (0, 1))
CLIENTS = sized((10, 20, 30), (10,))
NETWORKS = ("cnn", "small ResNet")
Scores = Mapping[str, float]
Columns = Mapping[str, Sequence[Scores]]  # each column's seeds


def clients(options: Namespace) -> Columns:
    """Return every merge's accuracies, by the number of clients."""
    own = {f"{m} clients": {"alpha": 0.3, "clients": m} for m in CLIENTS}
    return merges_of(own, options)


def merges_of(columns: Mapping[str, dict[str, Any]], options: Namespace) -> Columns:
    """Return the merges' accuracies, by column."""
    made = partial(Setting, "mnist", "lenet", budget=True)
    splits = {n: [made(seed=s, **own) for s in SEEDS] for n, own in columns.items()}
    found = on_splits("one_shot", once, chain(*splits.values()), options)
    return {name: [found[s] for s in settings] for name, settings in splits.items()}


def in_processes(
    run: Callable[..., Any], names: Sequence[str], options: Namespace
) -> dict[str, list[Any]]:
    """Return what runs give for each name and seed, by name."""
    return kept_by_seed(CACHE / "one_shot" / run.__name__, run, names, SEEDS, options)


def every_round(options: Namespace) -> dict[str, list[list[float]]]:
    """Return the rows of all runs of some rounds, each with its seeds."""
    found = in_processes(rounds, list(RUNS), options)
    return {
        name: [seed[index] for seed in found[run]]
        for run, names in RUNS.items()
        for index, name in enumerate(names)
    }


def table(title: str, columns: Columns) -> list[str]:
    """Return a section of accuracies, and of the default's lead in each column."""
    names = list(next(iter(columns.values()))[0])
    lines = [f"## {title}", "", *head("test accuracy, %", *columns, "default minus it")]
    for name in names:
        cells = (spread([each[name] for each in own]) for own in columns.values())
        own, theirs = (
            [each[key] for seeds in columns.values() for each in seeds]
            for key in (OURS, name)
        )
        gain = "" if name == OURS else with_error(paired(own, theirs), 2)
        lines.append(row(f"**{name}**" if name == OURS else name, *cells, gain))
    return lines


def rounds_table(methods: Mapping[str, Sequence[Sequence[float]]]) -> list[str]:
    """Return a section of accuracies, round by round."""
    titles = (f"round {index + 1}" for index in range(ROUNDS))
    lines = ["## Rounds", "", *head("test accuracy, %", *titles)]
    for name, seeds in methods.items():
        cells = (spread(each) for each in zip(*seeds, strict=True))
        lines.append(row(f"**{name}**" if name == OURS else name, *cells))
    return lines


PAGE = Page(
    name="one_shot",
    opening=opening("One-shot merging, further afield", __doc__),
    sections={
        "clients": lambda found: table("Clients", found),
        "rounds": rounds_table,
        "pretrained": lambda found: table("From a pre-trained start", found),
    },
    plots={},
)
PARTS: dict[str, Callable[[Namespace], Any]] = {
    "clients": clients,
    "rounds": every_round,
    "pretrained": lambda options: in_processes(pretrained, NETWORKS, options),
}
DATA = {"pretrained": "CIFAR10"}


def main() -> None:
    """Run what is asked for, and write the page of all that was ever run."""
    options = PAGE.command_line(__doc__).parse_args()
    for name in PAGE.asked(options):
        folder = DATA.get(name, "MNIST")
        if (options.data_dir / folder).exists():
            PAGE.keep(name, PARTS[name](options))
        else:
            print(f"{folder} is not in {options.data_dir}: {name} is skipped")
    PAGE.write()


if __name__ == "__main__":
    main()
