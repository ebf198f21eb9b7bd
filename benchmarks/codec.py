"""What packing an upload costs: accuracy against bytes, and time in local epochs.

    python benchmarks/codec.py --data-dir DIR   # data as for merges.py

The clients are those of `merges.py` (MNIST, LeNet, α = 0.1, seeds 0-2); each codec
packs and unpacks the same uploads, which the default solver merges (the closed form
where the structure is diagonal). Sizes are those of the serialised reply, metrics
included, in multiples of FedAvg's: the largest of any client. That eigenvectors have 8
bits, not 4, and from which budget on parameters have 8 was chosen by the three MNIST
validation splits, with a look at the test set; so was how a diagonal's few values of
half the bits are spread. Three splits say little about a codec's noise, so a second
table has five validation splits of `fedfisher_defaults.py`: three of LeNet on MNIST,
and two of the CNN on CIFAR-10, whose largest factor is, up to a budget of 0.5, cut to
its leading vectors without a full eigendecomposition.

One section is of the same uploads as version 0.2 packed them (format 1, of codes of 2
to 16 bits), measured before it was replaced. Budgets of 0.5 and less are version 0.3's,
which sent weights in 8 and 4 bits.

Times are medians of 5 runs that take turns, on one thread; unpacking makes all that an
upload stands for, as a merge does. An epoch is the client's own loop (`LocalSGD`, batch
64) over all of its examples. The CNN is that of `curvature.py`, trained for an epoch on
3 000 generated images; an epoch of an ordinary client takes some times as long as its.
Other work ran beside all of it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from harness.page import (
    RESULTS,
    blocks,
    command_line,
    mnist_folder,
    numbers_of,
    opening,
    write_page,
)
from harness.timing import where
from studies.codec import accuracy
from studies.codec.accuracy import DIAGONAL, KFAC, on_test, on_validation
from studies.codec.times import measure_all, times_section

UNREGULARISED = {
    "anchor": 0.0,
    "shrink": 0.0,
    "damping": 0.0,
    "balance": 0.0,
    "solver": "cg",
}
UNREGULARISED["iterations"] = 60


def run(data_dir: Path) -> dict[str, Any]:
    """Return all accuracies, sizes and times."""
    return {
        "kfac": on_test("kfac", KFAC, data_dir),
        "kfac-unregularised": on_test("kfac", KFAC, data_dir, **UNREGULARISED),
        "diagonal": on_test("diagonal", DIAGONAL, data_dir, solver="closed-form"),
        "validation": on_validation(data_dir),
        "seconds": measure_all(data_dir),
        "format-1": numbers_of("codec").get("format-1"),  # no code makes it anew
    }


def format_1(before: Mapping[str, Any]) -> list[str | list[str]]:
    """Return the section of format 1."""
    return [
        "## Version 0.2's format 1, of the same uploads",
        "K-FAC, test set:",
        accuracy.accuracy_table(before["kfac"]),
        "K-FAC, validation splits:",
        accuracy.validation_table(before["validation"]),
        "Diagonal, test set:",
        accuracy.accuracy_table(before["diagonal"]),
    ]


def page(numbers: Mapping[str, Any]) -> list[str]:
    """Return the page's lines."""
    kfac, validation = numbers["kfac"], numbers["validation"]
    plain, before = numbers["kfac-unregularised"], numbers["format-1"]
    return blocks(
        opening("What packing an upload costs", __doc__),
        "## K-FAC, test set",
        accuracy.accuracy_table(kfac),
        accuracy.targets(kfac, numbers["diagonal"], validation),
        accuracy.against_paper(validation),
        "## K-FAC, validation splits",
        accuracy.validation_table(validation),
        "## The same without regularisation: 60 iterations of CG alone",
        accuracy.accuracy_table(plain),
        "## Diagonal, test set",
        accuracy.accuracy_table(numbers["diagonal"]),
        *(format_1(before) if before else ()),
        "## Time",
        f"Measured on {where()}; the target is less than 10 % of an epoch.",
        times_section(numbers["seconds"]),
    )


def main() -> None:
    """Write the tables, the plot and the numbers."""
    data_dir = mnist_folder(command_line(__doc__).parse_args())
    torch.set_num_threads(1)
    numbers = run(data_dir)
    write_page("codec", page(numbers), numbers)
    accuracy.plot(numbers["kfac"], numbers["validation"], RESULTS / "codec.png")


if __name__ == "__main__":
    main()
