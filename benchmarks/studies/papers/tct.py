"""TCT's tables and figures (NeurIPS 2022)."""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from harness.stats import paired

from studies.papers.found import Found, Reader, ahead, listed
from studies.tct.layers import STARTS, of_layers
from studies.tct.runs import ABLATIONS, AVG, PROX, SCAFFOLD, STAGE1, TCT_
from studies.tct.tables import STAGE2, after, final

Numbers = Callable[[str], Any]
Means = Mapping[str, Sequence[float]]
Check = Callable[[Means, Numbers], list[bool]]
SKEWS = ("dirichlet", "c2")  # from less to more


def accuracies(
    part: str, proximal: str, splits: Mapping[str, str], setting: str
) -> Reader:
    """Return the reader of one data set of table 2, from most skew to least.

    `proximal` is the part that has FedProx.
    """

    def read(numbers: Numbers) -> Found | None:
        if part not in numbers("tct"):
            return None
        found = numbers("tct")[part]
        ends = {
            method: [mean(final(found[split]["runs"][method])) for split in splits]
            for method in (TCT_, AVG, SCAFFOLD)
        }
        if beside := numbers("tct").get(proximal):
            ends[PROX] = [mean(final(beside[split]["runs"])) for split in splits]
        others = map(max, zip(*(ends[m] for m in ends if m != TCT_), strict=True))
        leads = [a - b for a, b in zip(ends[TCT_], others, strict=True)]
        return Found(
            f"{', '.join(splits.values())}: "
            + "; ".join(f"{m} {listed(v)}" for m, v in ends.items()),
            [*(lead > 0 for lead in leads), leads[0] == max(leads)],
            setting if beside else f"{setting} FedProx was not run.",
            f"python benchmarks/tct.py --only {part}",
            "tct.md",
        )

    return read


def ablation(names: Sequence[str], reading: str, checks: Check) -> Reader:
    """Return the reader of a figure of ablations, after 5, 15 and 30 rounds."""

    def read(numbers: Numbers) -> Found | None:
        parts = numbers("tct")
        if "ablations" not in parts:
            return None
        means = {
            name: [mean(after(parts["ablations"][name], n)) for n in STAGE2]
            for name in (TCT_, *names)
        }
        return Found(
            "after 5, 15, 30 rounds of stage 2: "
            + "; ".join(f"{name} {listed(values)}" for name, values in means.items()),
            checks(means, numbers),
            f"MNIST, #C = 1, test accuracy, three seeds. {reading}".strip(),
            "python benchmarks/tct.py --only ablations",
            "tct.md",
        )

    return read


def convex(numbers: Numbers) -> Found | None:
    """Figure 1."""
    parts = numbers("tct")
    if "convex" not in parts:
        return None
    convex, accuracy = parts["convex"], parts["accuracy"]
    runs = {
        "logistic regression": [convex[f"{s}-logistic"]["runs"] for s in SKEWS],
        "LeNet5": [accuracy[split]["runs"] for split in SKEWS],
    }
    ends = {
        f"{model}, {method}": [final(of[method]) for of in each]
        for model, each in runs.items()
        for method in (AVG, SCAFFOLD)
    }
    means = {name: [mean(end) for end in pair] for name, pair in ends.items()}
    falls = {name: less - more for name, (less, more) in means.items()}
    by_model = [[falls[f"{model}, {m}"] for m in (AVG, SCAFFOLD)] for model in runs]
    both = (ends[f"logistic regression, {method}"] for method in (SCAFFOLD, AVG))
    network = [means[f"LeNet5, {method}"] for method in (AVG, SCAFFOLD)]
    return Found(
        "Dirichlet(0.1), #C = 2: "
        + "; ".join(f"{name} {listed(each)}" for name, each in means.items()),
        [
            by_model[0][1] < by_model[0][0],
            all(ahead(paired(*pair)) for pair in zip(*both, strict=True)),
            all(fall > 1 for fall in by_model[1]),
            all(abs(a - b) < 2 for a, b in zip(*network, strict=True)),
        ],
        "MNIST, 50 rounds, three seeds. Held against it: SCAFFOLD loses less than "
        "FedAvg from the one split to the other and is ahead, where the loss is "
        "convex; on the network both lose a point or more, and are within two points "
        "of each other. The last does not hold: SCAFFOLD is behind.",
        "python benchmarks/tct.py --only convex",
        "tct.md",
    )


def retrained(numbers: Numbers) -> Found | None:
    """Table 1."""
    parts = numbers("tct")
    if "layers" not in parts:
        return None
    runs = parts["layers"]["c1"]
    own = [100 * run["accuracy"] for run in runs]
    count = len(runs[0][AVG])
    random, trained = (
        [of_layers(runs, start, last) for last in range(count)] for start in STARTS
    )
    means = [(mean(a), mean(b)) for a, b in zip(trained, random, strict=True)]
    return Found(
        f"FedAvg {mean(own):.1f}; last layer retrained: "
        + "; ".join(
            f"{last} of {count + 1}: {a:.1f} from FedAvg's, {b:.1f} from random weights"
            for last, (a, b) in enumerate(means, 1)
        ),
        [
            ahead(paired(trained[0], own)),
            *(ahead(paired(trained[last], random[last])) for last in (0, 1)),
        ],
        "MNIST, #C = 1, LeNet5, 50 rounds of FedAvg, three seeds. With four "
        "layers retrained, random features are worth as much.",
        "python benchmarks/tct.py --only layers",
        "tct.md",
    )


def behind(means: Means, numbers: Numbers) -> list[bool]:
    """Whether all that TCT goes without leaves it behind, at the first rounds."""
    return [
        values[0] < means[TCT_][0] for name, values in means.items() if name != TCT_
    ]


def trained_features(means: Means, numbers: Numbers) -> list[bool]:
    """Whether TCT is far above FedAvg, not by random features, and later ones alike."""
    fedavg = mean(final(numbers("tct")["accuracy"]["c1"]["runs"][AVG]))
    ends = {name: values[-1] for name, values in means.items()}
    none, *_, most = (ends[name] for name in STAGE1)
    return [ends[TCT_] - fedavg > 20, none < fedavg, abs(most - ends[TCT_]) < 2]


PLAIN, BY_FEDAVG, SHORT, DESCENT = ABLATIONS
READERS: dict[str, Reader] = {
    "Figure 1": convex,
    "Table 1": retrained,
    "Table 2, FMNIST": accuracies(
        "accuracy",
        "fedprox",
        {"c1": "#C = 1", "c2": "2", "dirichlet": "α = 0.1"},
        "MNIST, LeNet5, 10 clients of 500 images, 20 + 30 rounds, three seeds.",
    ),
    "Table 2, CIFAR-10": accuracies(
        "cifar",
        "cifar-fedprox",
        {
            "cifar-c1": "#C = 1",
            "cifar-c2": "2",
            "cifar-dirichlet": "α = 0.1",
            "cifar-dirichlet0.5": "0.5",
        },
        "A residual network of 7 convolutions with group norm, 10 clients of 500 "
        "images, three seeds; 15 + 15 rounds, far fewer than the paper's 200, after "
        "which FedAvg and SCAFFOLD have not come far.",
    ),
    "Figure 3": ablation([DESCENT], "At TCT's default rate.", behind),
    "Figure 4": ablation([BY_FEDAVG, SHORT], "500 local steps, and 10.", behind),
    "Figure 5a": ablation(
        list(STAGE1),
        "By default 20 rounds; FedAvg has 50, and table 2 its accuracy. Random "
        "features of a network this small are nearly as good as trained ones.",
        trained_features,
    ),
    "Figure 5b": ablation([PLAIN], "At the default rate for both.", behind),
}
