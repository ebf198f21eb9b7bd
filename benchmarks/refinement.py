"""What follows a merge: a head in closed form, then steps by K-FAC.

    python benchmarks/refinement.py --data-dir DIR [--only mnist] [--seeds N]

DIR is that of merges.py and of unseen.py.

The clients of merges.py (5, ``dirichlet-client``, 30 epochs, LeNet and the CNN without
biases), trained once, and the shipped strategies with their clients in memory: a client
loads what it has trained. *Head*: `Refinement()`, *k steps*: `Refinement(steps=k)`; of
the merge by ``FedFisherOneShot``, of ``FedAvg``'s mean, and of the network as it was
before training (at one α: the split does not matter to it). One run
with all steps gives the model after fewer, too. Requests are those after the training.
*kB* are what a client uploads in all of them, as they are on the wire; *passes* are a
client's passes over its data (a forward pass counts as a third).

The constants (L-BFGS's first length .05, the damping 1e-3, a K-FAC of the given labels
of at most 1000 examples; LDA, its ridge by generalised cross-validation) were chosen on
validation examples: of six other tables (three splits each), of MNIST (three splits)
and of CIFAR-10 (one), all of seeds that no page has.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean

from harness.jobs import kept_by_seed
from harness.page import (
    CACHE,
    RESULTS,
    blocks,
    command_line,
    numbers_of,
    opening,
    with_workers,
    write_page,
)
from harness.plots import CIFAR10, MNIST
from harness.size import sized
from harness.splits import on_splits
from harness.stats import paired, spread, with_error
from harness.tables import head, row
from merges import PROBLEMS, SEEDS, splits_of
from studies.refinement import steps as other_steps
from studies.refinement.pictures import plot
from studies.refinement.runs import (
    FEDAVG,
    FEDFISHER,
    STEPS,
    Scores,
    of_split,
    of_unseen,
    titled,
)
from unseen import FOLDERS, UNSEEN

RIVALS = {  # the part and the row of merges.py that has a rival's accuracies
    "RegMean++, an exchange a layer": ("exchanges", "RegMean++ *"),
    "FENS, six networks": ("exchanges", "FENS (a sixth model weighs the five)"),
    "Co-Boosting, short": ("students", "Co-Boosting *"),
}
Results = Mapping[str, Sequence[Scores]]  # of the splits of each column
ALT = "Test accuracy after the merge, the head and each step"
PICTURES = {
    "mnist": f"Five clients by Dirichlet(α); {MNIST}",
    "cifar10": f"Five clients by Dirichlet(α); {CIFAR10}",
    "unseen": "Five clients by Dirichlet(0.1); all test examples of each data set",
}


def table(results: Results, key: str, digits: int) -> list[str]:
    """Return means over splits, a row for each model."""
    title = {"accuracy": "test accuracy, %", "loss": "cross-entropy"}[key]
    lines = head(title, *results, "mean")
    for name in dict.fromkeys(chain(*chain(*results.values()))):
        own = [
            [split[name][key] for split in splits if key in split.get(name, {})]
            for splits in results.values()
        ]
        if any(own):
            cells = [spread(values, digits) if values else "" for values in own]
            mean = f"{fmean(map(fmean, own)):.{digits}f}" if all(own) else ""
            lines.append(row(name, *cells, mean))
    return lines


def costs(results: Results) -> list[str]:
    """Return what a client does and sends after its training."""
    lines = head(
        "after the merge", "requests", "passes", *(f"kB, {k}" for k in results)
    )
    for steps in STEPS:
        name = f"{FEDFISHER}, {titled(steps)}"
        sent = [
            f"{fmean(split[name]['kB'] for split in own):.0f}"
            for own in results.values()
        ]
        passes = f"{1 + steps:.1f}, and one of at most 1000 examples"
        requests = str(3 + steps if steps else 2)
        lines.append(row(titled(steps), requests, passes if steps else "0.7", *sent))
    return lines


def lead(results: Results) -> str:
    """Return how far FedFisher is ahead of FedAvg, with the same requests."""
    every, parts = [*chain.from_iterable(results.values())], []
    for steps in STEPS:
        ours, theirs = (
            [split[f"{start}, {titled(steps)}"]["accuracy"] for split in every]
            for start in (FEDFISHER, FEDAVG)
        )
        parts.append(f"{titled(steps)} {with_error(paired(ours, theirs), 1)}")
    return (
        "FedFisher's lead over FedAvg with the same requests, in points ± its standard "
        f"error over all {len(every)} splits: {'; '.join(parts)}."
    )


def with_rivals(name: str, split: str, scores: Scores) -> Scores:
    """Return a split's scores, and those of rivals that merges.py has for it."""
    known, found = numbers_of(f"rivals_{name}"), dict(scores)
    for title, (part, method) in RIVALS.items():
        own = known.get(part, {}).get(split, {}).get(method)
        if own is not None:
            found[title] = {"accuracy": own["accuracy"]}
    return found


def write(name: str, title: str, results: Results, numbers: object) -> None:
    """Write a page."""
    counts = ", ".join(f"{len(own)} of {column}" for column, own in results.items())
    sections = (
        opening(f"After the merge: {title}", __doc__),
        f"Splits: {counts}. Means ± standard deviations.",
        table(results, "accuracy", 1),
        lead(results),
        f"![{ALT}](refinement_{name}.png)",
        table(results, "loss", 2),
        costs(results),
    )
    write_page(f"refinement_{name}", blocks(*sections), numbers)
    draw(name, results)


def draw(name: str, results: Results) -> None:
    """Draw the accuracy after each exchange."""
    plot(results, RESULTS / f"refinement_{name}.png", PICTURES[name])


def page(name: str, options: Namespace) -> None:
    """Evaluate a data set's splits, and write its page."""
    asked = {
        alpha: splits[: options.seeds]
        for alpha, splits in splits_of(PROBLEMS[name]).items()
    }
    every = sorted(chain.from_iterable(asked.values()), key=lambda s: s.seed)
    known = numbers_of(f"refinement_{name}")
    if options.trained:
        last = [s.folder / f"client-{s.clients - 1}.safetensors" for s in every]
        every = [
            split
            for split, path in zip(every, last, strict=True)
            if path.exists() or split.folder.name in known
        ]
    found = on_splits("refinement", of_split, every, options, known)
    numbers = {split.folder.name: scores for split, scores in found.items()}
    write(name, PROBLEMS[name].title, by_alpha(name, numbers), known | numbers)


def by_alpha(name: str, numbers: Scores) -> Results:
    """Return a data set's scores for each α, from those by the names of splits."""
    results = {
        f"α = {alpha:g}": [
            with_rivals(name, split.folder.name, numbers[split.folder.name])
            for split in splits
            if split.folder.name in numbers
        ]
        for alpha, splits in splits_of(PROBLEMS[name]).items()
    }
    return {column: own for column, own in results.items() if own}


def unseen_page(options: Namespace) -> None:
    """Evaluate the splits on which no constant was chosen, and write their page."""
    folder, seeds = CACHE / "refinement" / "unseen", SEEDS[: options.seeds]
    names, last = UNSEEN, f"-s{seeds[-1]}.json"
    if options.trained:
        names = tuple(n for n in UNSEEN if (folder / f"{n}{last}").exists())
    results = kept_by_seed(folder, of_unseen, names, seeds, options)
    write("unseen", "data on which no constant was chosen", results, results)


def steps_page(options: Namespace) -> None:
    """Compare other steps after the head, and write their page."""
    tried, found = other_steps.compared(options.data_dir)
    sections = (
        opening(
            "After the head: steps at the same number of requests", other_steps.__doc__
        ),
        other_steps.table(tried, found),
    )
    write_page("refinement_steps", blocks(*sections), {"tried": tried, "found": found})


OTHERS = {"unseen": unseen_page, "steps": steps_page}


def main() -> None:
    """Write each data set's page."""
    parser = with_workers(command_line(__doc__))
    parser.add_argument("--only", choices=[*PROBLEMS, *OTHERS])
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="of each α")
    parser.add_argument(
        "--trained",
        action="store_true",
        help="only splits whose clients are trained, and unseen data that were refined",
    )
    options = parser.parse_args()
    folders = {name: [problem.folder] for name, problem in PROBLEMS.items()}
    folders |= {"unseen": [*FOLDERS], "steps": ["MNIST"]}
    every = sized([*folders], ["mnist", "steps"])
    for name in [options.only] if options.only else every:
        missing = [
            own for own in folders[name] if not (options.data_dir / own).exists()
        ]
        if missing:
            print(f"{name} is left out: there is no {', '.join(missing)}")
        elif name in OTHERS:
            OTHERS[name](options)
        else:
            page(name, options)


if __name__ == "__main__":
    main()
