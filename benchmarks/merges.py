"""Every one-shot rival of FedFisher, on the same clients' uploads.

    python benchmarks/merges.py --data-dir DIR [--only mnist] [--parts merges students]

DIR/MNIST/raw has torchvision's files, DIR/CIFAR10 the images in folders by class,
`train` and `test` (20 000 and 5000 of CIFAR-10's).

5 clients, ``dirichlet-client``, 30 epochs of SGD (lr 0.01, momentum 0.9, batch 64),
LeNet and the CNN without biases. Clients are trained once and kept in
``benchmarks/cache``. K-FACs are those that ``FedFisherOneShot`` asks for by default;
FedLPA's are empirical, of all examples, as its clients take them, and once FedFisher's
own; MaTS' are empirical, of 1000 examples at most. FedBEns' clients train from three
starts, of which the first is the others'; for these pages they did so on a GPU, in
other roundings: merged by the default, the first start's are as good (+0.0 ± 0.5 points
on MNIST, 0.0 ± 0.4 on CIFAR-10). Methods marked * choose on 500 training examples that
the server holds: between RegMean's and RegMean++'s two constants, PFNM's iterations,
FedLPA's two solutions, MaTS' two starts (the mean and task arithmetic) and iterations
(10 and 100), the steps of Adam, FedBEns', too, the epochs of a student. The others show
the server no data. Settings are the papers' or their released code's, as each function
says, but for the students' (DENSE, Co-Boosting): their generator is a quarter as wide
(16 channels), a batch has 64 images in place of 256 and 128, and they end after 50
epochs (MNIST) and 30 (CIFAR-10) of 200.

RegMean++ and FENS need clients again after their uploads, on their own examples: 1000
each for RegMean++, as for RegMean's factors (the paper has 256); a tenth for FENS,
which the networks were trained on, while the paper holds it back from training. FENS's
numbers are those of 500 rounds beside the model's, and its result is six networks.
AFL, FedCGS and GH-LDA train nothing: they solve for a head, with a bias, on the network
as it was before training, which is random here and pre-trained in their papers;
whatever the split, it is the same head.

*Numbers* are those that a client uploads, as multiples of the model's, before a codec
packs them; FedFisher's default packs them into FedAvg's bytes. *Passes* are the
server's seconds (MaTS, FedBEns, RegMean++, FENS: the processor's) in forward and
backward passes of the network at batch 32, on one thread; from sums, and of RegMean++,
FENS and the three heads, with what clients do in these exchanges (heads: beside other
programmes, which lengthen it).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from harness.page import (
    blocks,
    command_line,
    keep_part,
    numbers_of,
    opening,
    with_workers,
    write_page,
)
from harness.plots import CIFAR10, MNIST
from harness.size import sized
from harness.splits import on_splits
from harness.uploads import Setting
from studies.rivals.methods import PARTS
from studies.rivals.split import Found
from studies.rivals.tables import Results, ahead, constants_table, missing, plot, table

ALPHAS = sized((0.2, 0.1, 0.05), (0.2,))
SEEDS = sized(range(5), range(2))
READING = """\
**Reading.** Clients start from one model: Git Re-Basin finds no unit to permute and
optimal transport next to none, so that both end where FedAvg does, and PFNM, which
matches units anew, ends below it. FisherMerge takes parameters to be independent, which
is worth points on MNIST and costs them on CIFAR-10 where clients are least alike.
RegMean, which has one of K-FAC's two factors, is the best of the other merges. FedLPA
solves FedFisher's equations with other factors and additive constants;
its factors are not what is amiss, since FedFisher's do as little for it. The paper's
Adam descends to the same equations' solution without regularisation, for more than a
hundred times the work (on CIFAR-10 14 000 to 67 000 passes a split, since other
programmes ran beside some). From sums, a client's size is its own to divide by
(`balance` 1), and neither `robust` nor `max_share` is possible: level with the default.
MaTS solves FedFisher's equations with empirical factors, to which it adds nothing, and
with one weight for each client; where clients are least alike it is near FisherMerge.
FedBEns has an upload from each of three starts, and descends by Adam: seven points
below the default, and level with the paper's Adam where clients are least alike; the
vote of its three models is five to six points below.
The students (a small part of the published training) end below the default, by more on
some splits than on others, for hundreds or thousands of times the default's work, on a
server that calls the clients' networks and chooses among epochs by its examples. Taught
as long as published, for some minutes of a GPU each, they come closer or are ahead
([on one split an α](students.md)).
Who may ask clients again gains most. RegMean++ takes a layer's factor of what the
*merged* layers before it make of the clients' examples: with an exchange for each layer
it is ahead of the default, by most where clients are least alike. FENS keeps all
networks, and is ahead of every single model.
A head that is solved for on a network that nobody trained is the same on every split:
80 to 82 % on MNIST, level with the default at α = 0.05 and 7 to 13 points behind it
elsewhere; 36 to 37 % on CIFAR-10, behind it everywhere."""
LEFT = """\
**Not run on every split**: {methods}.
`python benchmarks/merges.py --data-dir DIR --only {name}` runs what is left. A split's
clients train for {seconds} seconds of a core, and three times that for FedBEns."""
CONSTANTS_SAID = """\
## What rivals teach: other constants for the default

On the examples that the server holds, which clients train on, too, as in FedFisher's
code; means over splits, and no test image was looked at."""


@dataclass(frozen=True)
class Problem:
    """A data set and the model for it."""

    title: str
    folder: str  # of its files
    training: int  # seconds of a core, for a split's clients
    tested: str
    setting: partial[Setting]


PROBLEMS = {
    "mnist": Problem(
        "MNIST", "MNIST", 200, MNIST, partial(Setting, "mnist", "lenet", budget=True)
    ),
    "cifar10": Problem(
        "CIFAR-10",
        "CIFAR10",
        500,
        CIFAR10,
        partial(Setting, "imagefolder:CIFAR10", "cnn", budget=True),
    ),
}


def joined(numbers: Mapping[str, Mapping[str, Found]], split: str) -> Found:
    """Return what all parts found on a split."""
    found: Found = {"sizes": {}}
    for part in (part for part in PARTS if part != "constants"):
        own = numbers.get(part, {}).get(split, {})
        found |= own | {"sizes": found["sizes"] | own.get("sizes", {})}
    return found


def splits_of(problem: Problem) -> dict[float, list[Setting]]:
    """Return the seeds' splits for each α."""
    return {alpha: [problem.setting(alpha, seed) for seed in SEEDS] for alpha in ALPHAS}


def results_in(numbers: Mapping[str, Mapping[str, Found]], name: str) -> Results:
    """Return what all parts found on a data set's splits, for each α."""
    return {
        alpha: [
            joined(numbers, split.folder.name)
            for split in splits
            if split.folder.name in numbers["merges"]
        ]
        for alpha, splits in splits_of(PROBLEMS[name]).items()
    }


def draw(name: str, results: Results) -> None:
    """Draw a data set's accuracies."""
    title = f"Five clients by Dirichlet(α); {PROBLEMS[name].tested}"
    plot(results, f"rivals_{name}", title)


def main() -> None:
    """Write each data set's table, plot and the numbers behind them."""
    parser = with_workers(command_line(__doc__))
    parser.add_argument("--only", choices=PROBLEMS)
    parser.add_argument("--parts", choices=PARTS, nargs="*", default=list(PARTS))
    parser.add_argument(
        "--alphas", type=float, choices=ALPHAS, nargs="*", default=ALPHAS
    )
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="of each α")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in [options.only] if options.only else sized([*PROBLEMS], ["mnist"]):
        problem = PROBLEMS[name]
        if not (options.data_dir / problem.folder).exists():
            print(f"left out, as it is not in {options.data_dir}: {problem.folder}")
            continue
        stem, splits = f"rivals_{name}", splits_of(problem)
        asked = (splits[alpha][: options.seeds] for alpha in options.alphas)
        every = sorted(chain.from_iterable(asked), key=lambda s: s.seed)
        for part in options.parts:
            known = numbers_of(stem).get(part, {})
            keep = partial(keep_part, stem, part)
            on_splits(f"rivals_{part}", PARTS[part], every, options, known, keep)
        numbers = numbers_of(stem)
        results = results_in(numbers, name)
        title = f"FedFisher and its rivals: {problem.title}"
        picture = f"![accuracies]({stem}.png)"
        others = numbers.get("constants", {})
        left = "; ".join(missing(results))
        told = LEFT.format(methods=left, name=name, seconds=problem.training)
        page = blocks(
            opening(title, __doc__),
            picture,
            table(results),
            ahead(results),
            *((told,) if left else ()),
            READING,
            *((CONSTANTS_SAID, constants_table([*others.values()])) if others else ()),
        )
        write_page(stem, page)
        draw(name, results)


if __name__ == "__main__":
    main()
