"""Choose `outlier`, weights and caps on validation data alone.

    python benchmarks/attacks_defaults.py --data-dir DIR   # data as for merges.py

No test image is looked at, and no split is one of ``attacks.py``'s. The attacks are
that page's, one attacker of ten, on four other seeds and 2000 validation images that no
client has. The splits without attackers are those of ``fedfisher_defaults.py``, too: 5
clients in most columns, 20 in one, α = 0.2, 0.1 and 0.05.

Uploads are limited before they are merged, to three medians of examples and to a
*reach* of so many medians of the steps' lengths. By default a server limits nearly
nothing of this, and by ``Policy.strict()`` more: ``attacks.py`` has both.
"""

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

from attacks import ALPHAS
from fedfisher_defaults import SCORED, WEIGHTS, asked_for, missing, scored
from harness.page import blocks, command_line, opening, with_workers, write_page
from harness.size import sized
from harness.splits import on_splits
from harness.tables import head, row
from harness.uploads import Setting, posteriors
from studies.attacks.methods import digest
from studies.attacks.tables import HONEST, KEPT
from studies.attacks.uploads import ATTACKS, Federation, length, within_policy
from torch import Tensor

from flwr_fisher.merge import fedfisher
from flwr_fisher.merge.outliers import without_outliers
from flwr_fisher.params import shared_state
from flwr_fisher.report import accuracies
from flwr_fisher.strategies import Policy

OUTLIERS = (math.inf, 3.0, 2.0, 1.5, 1.25)
SHARES = (1.0, 0.7, 0.5)
REACHES = (3.0, 2.0, 1.5)
REACH = 2.0  # that by which uploads are limited before the others are tried
TEN = "MNIST, lenet, 10 clients"
Scores = dict[str, dict[str, float]]
NOTES = """\
A `max_share` of 0.5 is the strictest, and costs nothing: it is the default. A reach of
2 median lengths is the least of the three that touches no honest client. `outlier`
is best at 1.5 with ten clients: at 2 more attacks get through, and at 1.25 honest
clients are left out. It is no default, since among 20 clients at α = 0.05, or 5, one
that is unlike the others may be left out, or count less, with what it alone knows.
"""


def splits() -> list[Setting]:
    """Return the splits that are attacked."""
    rest: dict[str, Any] = {"clients": 10, "epochs": 12, "validation": 10_000}
    return [
        Setting("mnist", "lenet", alpha, seed, hold_out=True, budget=True, **rest)
        for alpha in ALPHAS
        for seed in range(100, sized(104, 102))
    ]


def attacked(setting: Setting, data_dir: Path) -> Scores:
    """Return accuracies in per cent by attack, then by `outlier` and by reach."""
    federation = Federation(setting, data_dir)
    model, (images, _) = federation.task.make_model(), federation.scored(SCORED)
    known: dict[bytes, float] = {}

    def score(params: Mapping[str, Tensor]) -> float:
        key = digest(params)
        if key not in known:
            known[key] = 100 * accuracies(model, {"x": params}, images)["x"]
        return known[key]

    found: Scores = {}
    for attack in (HONEST, *ATTACKS):
        uploads = federation.attacked(attack, 0 if attack == HONEST else 1)
        policies = {r: Policy(max_weight=3, max_distance=r) for r in REACHES}
        checked = {
            r: within_policy(uploads, federation.start, p) for r, p in policies.items()
        }
        merged = {
            f"outlier {o:g}": fedfisher(checked[REACH], outlier=o) for o in OUTLIERS
        }
        merged |= {f"reach {r:g}": fedfisher(own) for r, own in checked.items()}
        merged |= {n: fedfisher(checked[REACH], **own) for n, own in WEIGHTS.items()}
        found[attack] = {name: score(each.params) for name, each in merged.items()}
    return found


def honest(setting: Setting, data_dir: Path) -> dict[str, float]:
    """Return how far clients are from each other, and what the caps cost them."""
    task = setting.task(data_dir)
    uploads, images, model = posteriors(setting, task), scored(task), task.make_model()
    start = shared_state(model)
    lengths = [length(start, upload) for upload in uploads]
    examples = [upload.num_examples for upload in uploads]
    candidates = {
        f"max_share {s:g}": fedfisher(uploads, max_share=s).params for s in SHARES
    } | {f"outlier {o:g}": fedfisher(uploads, outlier=o).params for o in OUTLIERS}
    own = accuracies(model, candidates, images)
    return {
        "length": max(lengths) / median(lengths),
        "share": max(examples) / sum(examples),
        "examples": max(examples) / median(examples),
        "distance": max(without_outliers(uploads, math.inf).distances),
        **{name: 100 * value for name, value in own.items()},
    }


def attack_table(found: Sequence[Scores], names: Sequence[str]) -> list[str]:
    """Return how much of the honest accuracy is kept."""
    lines = head(
        "",
        HONEST,
        "mean over attacks",
        "worst attack's mean",
        f"cells below {KEPT:.0%}",
    )
    for name in names:
        plain = [split[HONEST]["outlier inf"] for split in found]
        kept = {
            attack: [
                split[attack][name] / p for split, p in zip(found, plain, strict=True)
            ]
            for attack in ATTACKS
        }
        worst = min(ATTACKS, key=lambda attack: fmean(kept[attack]))
        every = list(chain.from_iterable(kept.values()))
        below = sum(value < KEPT for value in every)
        lines.append(
            row(
                name,
                f"{fmean(split[HONEST][name] for split in found):.2f} %",
                f"{fmean(every):.1%}",
                f"{fmean(kept[worst]):.1%} ({worst})",
                f"{below} of {len(every)}",
            )
        )
    return lines


def honest_table(found: Mapping[str, list[dict[str, float]]]) -> list[str]:
    """Return the columns' largest ratios, and what the caps cost on the mean."""
    ratios = {
        "length": "step from the start, longest / median",
        "examples": "examples, most / median",
        "share": "examples, largest share",
        "distance": "distance $d_i$, largest / median",
    }
    costs = [f"max_share {s:g}" for s in SHARES[1:]] + [
        f"outlier {o:g}" for o in OUTLIERS[1:]
    ]
    lines = head("splits", *ratios.values(), *costs)
    for column, own in found.items():
        cells = [f"{max(split[name] for split in own):.2f}" for name in ratios]
        losses = [
            f"{fmean(split[name] - split['max_share 1'] for split in own):+.2f}"
            for name in costs
        ]
        lines.append(row(f"{column} ({len(own)})", *cells, *losses))
    return lines


def page(
    hostile: list[Scores], plain: Mapping[str, list[dict[str, float]]]
) -> list[str]:
    """Return the page's lines."""
    return blocks(
        opening("Choosing how much one client may say", __doc__),
        "## With one attacker",
        "What is kept of the accuracy without attackers. By `outlier`, after a reach "
        f"of {REACH:g} median lengths:",
        attack_table(hostile, [f"outlier {o:g}" for o in OUTLIERS]),
        "Without `outlier`, by the reach:",
        attack_table(hostile, [f"reach {r:g}" for r in REACHES]),
        "And by the weights of ``fedfisher_defaults.py``, at the default's other "
        "constants:",
        attack_table(hostile, list(WEIGHTS)),
        "## Without attackers",
        "The largest over the splits, and what each cap costs of validation accuracy.",
        honest_table(plain),
        NOTES.strip(),
    )


def main() -> None:
    """Write the tables."""
    options: Namespace = with_workers(command_line(__doc__)).parse_args()
    hostile = on_splits("attacks-defaults", attacked, splits(), options)
    known = {TEN: splits()} | dict(islice(asked_for().items(), sized(None, 3)))
    present = {k: v for k, v in known.items() if not missing(v[0], options.data_dir)}
    each = on_splits("attacks-honest", honest, chain(*present.values()), options)
    plain = {column: [each[split] for split in own] for column, own in present.items()}
    found = list(hostile.values())
    write_page(
        "attacks_defaults", page(found, plain), {"attacked": found, "honest": plain}
    )


if __name__ == "__main__":
    main()
