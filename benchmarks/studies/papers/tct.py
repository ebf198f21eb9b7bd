"""TCT's tables and figures (NeurIPS 2022)."""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from studies.papers.found import Found, Reader, listed
from studies.tct.runs import ABLATIONS, STAGE1, TCT_
from studies.tct.tables import STAGE2, after

Numbers = Callable[[str], Any]
Means = Mapping[str, Sequence[float]]
Check = Callable[[Means], list[bool]]
SPLITS = ("c1", "c2", "dirichlet")


def accuracy(numbers: Numbers) -> Found:
    """Table 2."""
    found = numbers("tct")["accuracy"]
    ends = {
        method: [
            100 * mean(run["accuracy"][-1] for run in found[split]["runs"][method])
            for split in SPLITS
        ]
        for method in ("TCT", "FedAvg", "SCAFFOLD")
    }
    others = [max(pair) for pair in zip(ends["FedAvg"], ends["SCAFFOLD"], strict=True)]
    leads = [a - b for a, b in zip(ends["TCT"], others, strict=True)]
    return Found(
        "#C = 1, 2, α = 0.1: " + "; ".join(f"{m} {listed(v)}" for m, v in ends.items()),
        [*(lead > 0 for lead in leads), leads[0] == max(leads)],
        "MNIST, LeNet5, 10 clients of 500 images, 20 + 30 rounds, three seeds.",
        "python benchmarks/tct.py --only accuracy",
        "tct.md",
    )


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
            checks(means),
            f"MNIST, #C = 1, test accuracy, three seeds. {reading}".strip(),
            "python benchmarks/tct.py --only ablations",
            "tct.md",
        )

    return read


def behind(means: Means) -> list[bool]:
    """Whether all that TCT goes without leaves it behind, at the first rounds."""
    return [
        values[0] < means[TCT_][0] for name, values in means.items() if name != TCT_
    ]


def trained_features(means: Means) -> list[bool]:
    """Whether random features are 20 points behind, and later ones alike."""
    ends = {name: values[-1] for name, values in means.items()}
    none, *_, most = (ends[name] for name in STAGE1)
    return [ends[TCT_] - none > 20, abs(most - ends[TCT_]) < 2]


PLAIN, BY_FEDAVG, SHORT, DESCENT = ABLATIONS
READERS: dict[str, Reader] = {
    "Table 2, FMNIST": accuracy,
    "Figure 3": ablation([DESCENT], "", behind),
    "Figure 4": ablation([BY_FEDAVG, SHORT], "500 local steps, and 10.", behind),
    "Figure 5a": ablation(list(STAGE1), "By default 20 rounds.", trained_features),
    "Figure 5b": ablation([PLAIN], "At the default rate for both.", behind),
}
