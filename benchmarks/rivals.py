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
data. Settings are the papers' or their released code's, as each function says, but for
the students', whose generator is a quarter as wide (16 channels) and who end after 50
epochs (MNIST) and 15 (CIFAR-10) of 200.

*Numbers* are those that a client uploads, as multiples of the model's, before a codec
packs them; FedFisher's default packs them into FedAvg's bytes. *Passes* are the
server's seconds in forward and backward passes of the network at batch 32, on one
thread; from sums, with what the clients do in these exchanges.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from fedfisher import ALPHAS, PROBLEMS, Problem
from harness.page import (
    blocks,
    command_line,
    numbers_of,
    opening,
    with_workers,
    write_page,
)
from harness.splits import on_splits
from harness.uploads import Setting
from studies.rivals.methods import PARTS, Found
from studies.rivals.tables import ahead, constants_table, plot, table

# What is run, and on how many seeds: the paper's 2000 steps of Adam and the students
# take a core a quarter of an hour and more for one split of CIFAR-10.
SEEDS = {
    "merges": {"mnist": 5, "cifar10": 5},
    "adam": {"mnist": 5, "cifar10": 1},
    "students": {"mnist": 1, "cifar10": 1},
    "constants": {"mnist": 5, "cifar10": 5},
}
CONSTANTS_SAID = """\
## What rivals teach: other constants for the default

On the examples that the server holds, which clients train on, too, as in FedFisher's
code; means over splits, and no test image was looked at."""


def joined(numbers: Mapping[str, Mapping[str, Found]], split: str) -> Found:
    """Return what all parts found on a split."""
    found: Found = {}
    for part in ("merges", "adam", "students"):
        found |= numbers.get(part, {}).get(split, {})
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
    parser.add_argument("--parts", choices=PARTS, nargs="*", default=list(PARTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in [options.only] if options.only else PROBLEMS:
        problem = PROBLEMS[name]
        if not (options.data_dir / problem.folder).exists():
            print(f"left out, as it is not in {options.data_dir}: {problem.folder}")
            continue
        stem = f"rivals_{name}"
        numbers = numbers_of(stem)
        for part in options.parts:
            splits = splits_of(problem, ALPHAS, SEEDS[part][name])
            every = sorted(chain.from_iterable(splits.values()), key=lambda s: s.seed)
            known = numbers.get(part, {})
            found = on_splits(f"rivals_{part}", PARTS[part], every, options, known)
            numbers[part] = known | {s.folder.name: v for s, v in found.items()}
        own = splits_of(problem, ALPHAS, SEEDS["merges"][name])
        results = {
            alpha: [
                joined(numbers, s.folder.name)
                for s in splits
                if s.folder.name in numbers["merges"]
            ]
            for alpha, splits in own.items()
        }
        title = f"FedFisher and its rivals: {problem.title}"
        picture = f"![accuracies]({stem}.png)"
        others = numbers.get("constants", {})
        page = blocks(
            opening(title, __doc__),
            picture,
            table(results),
            ahead(results),
            *((CONSTANTS_SAID, constants_table([*others.values()])) if others else ()),
        )
        write_page(stem, page, numbers)
        plot(results, stem)


if __name__ == "__main__":
    main()
