"""Which method for which situation, each with the figure that speaks for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import mean
from typing import Any

from harness.stats import paired, with_error
from starts import PLAIN
from transfer import OWN, lead, runs_in

from studies.attacks.tables import BOTH
from studies.fedfish.choice import EPOCHS, HIGH, LOW, found_in
from studies.fedfish.runs import SHIFT, SKEW
from studies.fedfish.strategies import AVG, FISH, MENDED
from studies.fedfish.tables import GLOBAL
from studies.papers.fagh import NEVER, rounds_to
from studies.papers.fedfisher import OURS, beside_ours, of
from studies.papers.found import ahead, listed
from studies.papers.quotes import DATA
from studies.pretrained.published import AFL_ROW, ONCE
from studies.rivals.exchanges import PLUS
from studies.rivals.students import CO_BOOSTING
from studies.rounds.runs import MLR
from studies.tct.tables import final
from studies.unseen.data import IMAGES

Numbers = Callable[[str], Any]
NO_DATA = ("FedAvg", "OTFusion", "Git Re-Basin, then FedAvg", "FisherMerge")
MERGES = ("FedAvg", "FisherMerge", "FedFisher diagonal", "RegMean")
HEAD, STEPS = "FedFisher, head", "FedFisher, head, 3 steps"
OF_MEAN = "FedAvg, head, 3 steps"
SUMS = "FedFisher K-FAC from sums"
PAGES = {f"rivals_{name}": title for name, title in DATA.items()}


@dataclass(frozen=True)
class Choice:
    """What to take, and whether the tables still say so."""

    situation: str
    method: str
    figure: str
    page: str
    holds: bool


def merges(numbers: Numbers, page: str) -> list[Mapping[str, Any]]:
    """Return what all merges found, one a split."""
    return list(numbers(page)["merges"].values())


def gain(splits: Sequence[Mapping[str, Any]], ours: str, theirs: str) -> list[float]:
    """Return the points by which a method is ahead, split by split."""
    return paired(of(splits, ours), of(splits, theirs))


def once(numbers: Numbers) -> Choice:
    """One round, nothing known of the server."""
    splits = merges(numbers, "rivals_mnist")
    best = max(NO_DATA, key=lambda name: mean(of(splits, name)))
    leads = gain(splits, OURS, best)
    return Choice(
        "Clients connect once; the server has no data",
        "`FedFisherOneShot()`",
        f"MNIST: {with_error(leads, 1)} points over the best of those that see no data "
        f"either ({best}), {with_error(gain(splits, OURS, 'FedAvg'), 1)} over FedAvg",
        "rivals_mnist",
        all(ahead(gain(splits, OURS, name)) for name in NO_DATA),
    )


def with_server_data(numbers: Numbers) -> Choice:
    """One round, and some hundred labelled examples on the server."""
    splits = merges(numbers, "rivals_mnist")
    chosen = [name for name in splits[0] if name.endswith("*")]
    best = max(chosen, key=lambda name: mean(of(splits, name)))
    leads = gain(splits, OURS, best)
    return Choice(
        "The same, and the server has 500 labelled examples",
        "`FedFisherOneShot()`: it makes no use of them, and is ahead of other merges",
        f"MNIST: {with_error(leads, 1)} points over the best that chooses by them "
        f"({best.removesuffix(' *')})",
        "rivals_mnist",
        ahead(leads),
    )


def distilled(numbers: Numbers) -> Choice:
    """One round, and a server that trains for long."""
    long = numbers("students")
    pairs = (beside_ours(numbers, page, long, CO_BOOSTING) for page in PAGES)
    leads = [theirs - ours for theirs, ours in chain.from_iterable(pairs)]
    headed = [
        own[HEAD]["accuracy"] - long[split][CO_BOOSTING]["accuracy"]
        for name in DATA
        for split, own in numbers(f"refinement_{name}").items()
        if split in long
    ]
    return Choice(
        "The same, they are images, no client stays after its upload, and the server "
        "has a GPU and may call the clients' networks",
        "Co-Boosting for its published 200 epochs (`benchmarks/rivals/co_boosting.py`)",
        f"{with_error(leads, 1)} points over FedFisher's merge on {len(leads)} splits "
        f"of MNIST and CIFAR-10, and ahead on {sum(lead > 0 for lead in leads)}; where "
        f"clients stay, FedFisher with its head is {with_error(headed, 1)} ahead of it",
        "students",
        mean(leads) > 0,
    )


def after_merges(numbers: Numbers) -> dict[str, list[Mapping[str, Any]]]:
    """Return what follows a merge scores, and RegMean++, one a split, by data set."""
    found = {}
    for name, title in DATA.items():
        theirs = numbers(f"rivals_{name}")["exchanges"]
        own = numbers(f"refinement_{name}")
        both = [split for split in own if split in theirs]
        found[title] = [own[split] | {PLUS: theirs[split][PLUS]} for split in both]
    return found


def asked_again(numbers: Numbers) -> Choice:
    """One training, and two short requests."""
    splits = after_merges(numbers)
    leads = {data: gain(own, HEAD, PLUS) for data, own in splits.items()}
    shown = (f"{data} {with_error(each, 1)}" for data, each in leads.items())
    return Choice(
        "One training, and clients stay for two short requests without training",
        "`FedFisherOneShot()`, which solves for the head after the merge",
        "points over RegMean++, which asks once for each layer: " + ", ".join(shown),
        "refinement_mnist",
        all(map(ahead, leads.values())),
    )


def some_requests(numbers: Numbers) -> Choice:
    """One training, and some requests for gradients."""
    splits = after_merges(numbers)
    gains = {data: gain(own, STEPS, HEAD) for data, own in splits.items()}
    shown = (f"{data} {with_error(each, 1)}" for data, each in gains.items())
    other = [lead for own in splits.values() for lead in gain(own, STEPS, OF_MEAN)]
    return Choice(
        "One training, and clients stay for six requests, four of them for a gradient "
        "or a loss",
        "`FedFisherOneShot(refine=Refinement(steps=3))`",
        f"points over the head alone: {', '.join(shown)}; over FedAvg with the same "
        f"requests {with_error(other, 1)}",
        "refinement_cifar10",
        all(map(ahead, gains.values())),
    )


def six_exchanges(numbers: Numbers) -> Choice:
    """One training, several short exchanges."""
    splits = list(chain.from_iterable(merges(numbers, page) for page in PAGES))
    leads = gain(splits, SUMS, OURS)
    return Choice(
        "One training, but clients stay for six short exchanges; no upload of a client "
        "may be seen; or there are a thousand of them",
        '`FedFisherOneShot(structure="kfac", aggregate="sums", secure=SecureSums())`',
        f"as good as from parts: {with_error(leads, 1)} points from the default on "
        f"{len(splits)} splits of MNIST and CIFAR-10",
        "rivals_cifar10",
        not ahead([-lead for lead in leads]),
    )


def tables_and_texts(numbers: Numbers) -> Choice:
    """One round, no images."""
    sets = numbers("unseen")["unseen"]
    tables = (found for name, found in sets.items() if name not in IMAGES)
    splits = list(chain.from_iterable(tables))
    best = max(MERGES, key=lambda name: mean(split[name] for split in splits))
    ours = [split[OURS] for split in splits]
    leads = {
        name: paired(ours, [split[name] for split in splits])
        for name in (best, "FedAvg")
    }
    return Choice(
        "Clients connect once, and have tables or texts",
        "`FedFisherOneShot()`",
        f"three tables and two texts: {with_error(leads[best], 1)} points over the "
        f"best other merge ({best}), {with_error(leads['FedAvg'], 1)} over FedAvg",
        "unseen",
        all(map(ahead, leads.values())),
    )


def pretrained(numbers: Numbers) -> Choice:
    """One training from published weights."""
    leads, over_mean, shown, (fedavg, default) = [], [], [], ONCE
    for kind, parts in numbers("published").items():
        splits = [split for part in parts.values() for split in part]
        ours, heads, means = (
            [split[name]["accuracy"] for split in splits]
            for name in (default, AFL_ROW, fedavg)
        )
        leads.append(paired(ours, heads))
        over_mean += paired(ours, means)
        shown.append(f"{kind} {with_error(leads[-1], 1)}")
    return Choice(
        "Clients start from a published network, and answer six requests, one of them "
        "to train",
        "`FedFisherOneShot(pretrained=True)`; `AFL()` where they cannot train",
        f"points over AFL: {', '.join(shown)}; over FedAvg with the same requests "
        f"{with_error(over_mean, 1)}",
        "published",
        all(map(ahead, leads)),
    )


def extreme_skew(numbers: Numbers) -> Choice:
    """Fifty rounds, one or two classes a client."""
    shown, leads = [], []
    for classes, split in (("one class", "c1"), ("two classes", "c2")):
        runs = numbers("tct")["accuracy"][split]["runs"]
        ends = {name: final(runs[name]) for name in ("TCT", "FedAvg", "SCAFFOLD")}
        leads.append(paired(ends["TCT"], ends["FedAvg"]))
        shown.append(
            f"{classes}: {with_error(leads[-1], 1)} points over FedAvg, "
            f"{with_error(paired(ends['TCT'], ends['SCAFFOLD']), 1)} over SCAFFOLD"
        )
    return Choice(
        "Some 50 rounds, all ten clients in each, one or two classes a client",
        "`TCT()`",
        "; ".join(shown),
        "tct",
        all(map(ahead, leads)),
    )


def many_epochs(numbers: Numbers) -> Choice:
    """Few rounds of several local epochs, inputs that differ."""
    runs, texts = found_in(numbers("fedfish")).runs, runs_in(numbers("transfer"))
    leads = {
        epochs: GLOBAL.gap(runs[SHIFT, epochs, MENDED], runs[SHIFT, epochs, AVG])
        for epochs in EPOCHS
        if epochs > LOW
    }
    return Choice(
        "5 to 20 rounds of 4 to 16 local epochs, ten of eighty clients in each, whose "
        "images are turned and faded in ways of their own",
        "`FedFish()`; for other data compare it with FedAvg first",
        "points over FedAvg: "
        + ", ".join(f"E = {e} {GLOBAL.shown(own)}" for e, own in leads.items())
        + f"; where clients differ by the topics of a text, E = {HIGH} "
        + with_error(lead(texts, OWN, "as it is", HIGH, MENDED), 1),
        "fedfish",
        all(map(ahead, leads.values())),
    )


def one_epoch(numbers: Numbers) -> Choice:
    """Many rounds of one epoch."""
    runs = found_in(numbers("fedfish")).runs
    leads = {
        f"{method}, {kind}": GLOBAL.gap(runs[kind, LOW, AVG], runs[kind, LOW, method])
        for method in (FISH, MENDED)
        for kind in (SKEW, SHIFT)
    }
    return Choice(
        "80 rounds of one local epoch",
        "Flower's `FedAdam`",
        "points of FedAvg with Adam on the server over FedFish with the same: "
        + "; ".join(f"{name} {GLOBAL.shown(own)}" for name, own in leads.items()),
        "fedfish",
        all(map(ahead, leads.values())),
    )


def convex(numbers: Numbers) -> Choice:
    """Logistic regression."""
    rounds = {
        split: {
            name: rounds_to(method, MLR.targets)[-1] for name, method in methods.items()
        }
        for split, methods in numbers("rounds")["mlr"].items()
    }
    ours = [found["FedPM"] for found in rounds.values()]
    others = [
        min(each for name, each in found.items() if name != "FedPM")
        for found in rounds.values()
    ]
    return Choice(
        "Logistic regression, and rounds are what is dear",
        "FedPM (`benchmarks/rivals/fedpm.py`)",
        f"rounds to 90 %: {listed(ours, 0)} on two splits, the next best "
        f"{listed(others, 0)}; an upload is 76 times FedAvg's",
        "rounds",
        max(ours) < NEVER and all(a <= b for a, b in zip(ours, others, strict=True)),
    )


def unlike_starts(numbers: Numbers) -> Choice:
    """Clients that did not start from one model."""
    splits = list(numbers("starts").values())
    apart, matched = (
        [split[f"FedFisher (default), unlike starts{more}"] for split in splits]
        for more in ("", ", matched")
    )
    leads = paired(matched, apart)
    return Choice(
        "Clients connect once, and did not start from one model",
        "`rivals.git_rebasin.matched`; from one start, if that can be had",
        f"{with_error(leads, 1)} points over merging without matching; from one start "
        f"{mean(split[PLAIN] for split in splits):.1f} %, "
        f"from unlike ones {mean(matched):.1f}",
        "starts",
        ahead(leads),
    )


def liars(numbers: Numbers) -> Choice:
    """Hostile clients."""
    by_skew = numbers("attacks")
    splits = list(chain(*by_skew.values()))
    kinds = [
        kind
        for kind, found in splits[0].items()
        if kind[0] in "12" and "triggered" not in kind and BOTH in found
    ]
    methods = list(splits[0][kinds[0]])
    worst = {
        n: min(mean(s[kind][n] for s in splits) for kind in kinds) for n in methods
    }
    hardest = min(
        (mean(s[kind][BOTH] for s in found), f"{kind}, α = {alpha}")
        for alpha, found in by_skew.items()
        for kind in kinds
    )
    return Choice(
        "One or two of ten clients may lie",
        "`FedFisherOneShot(policy=Policy.strict())`, after `rivals.outliers`",
        "lowest mean accuracy over all attacks: "
        + ", ".join(f"{name} {value:.1f}" for name, value in worst.items())
        + f"; the hardest for the last of ours: {hardest[0]:.1f} ({hardest[1]})",
        "attacks",
        max(worst, key=lambda name: worst[name]) == BOTH,
    )


CHOICES: tuple[Callable[[Numbers], Choice], ...] = (
    once,
    with_server_data,
    distilled,
    tables_and_texts,
    pretrained,
    asked_again,
    some_requests,
    six_exchanges,
    unlike_starts,
    extreme_skew,
    many_epochs,
    one_epoch,
    convex,
    liars,
)
