"""TCT's second stage: what it costs, and the accuracy it ends with.

    python benchmarks/tct.py --data-dir DIR   # DIR/MNIST/raw has the files

`--only features`, `closed-form`, `accuracy`, `fedprox`, `convex`, `cifar`,
`cifar-fedprox`, `ablations` or `layers` runs a part; the page has all that were ever
run. Finished runs are kept in `benchmarks/cache/tct`: a programme that was stopped goes
on. All on one thread.

**Setting of the accuracies.** MNIST, 10 clients of at most 500 training images, each
in every round, the full test set. Three splits: one class a client (#C = 1), two
(#C = 2), and each class shared out by Dirichlet(0.1). *LeNet5 with biases*, 5 local
epochs, batch 64, plain SGD, weight decay 1e-5. **TCT**: 20 rounds of FedAvg, one round
that fixes the features, 30 rounds of stage 2 with 20 000 features and 500 local steps,
all else at its defaults. **FedAvg** and **SCAFFOLD** have 50 rounds. *Stage 1* is
TCT's own model after 20 rounds. In a seed, all have the same split and initial model,
and TCT's first 20 rounds are FedAvg's. Nobody is limited, as by default: the default
cuts what is a thousand times the clients' median.

**Learning rates** of FedAvg, thereby of stage 1, and of SCAFFOLD are chosen for each
split from 0.003, 0.01, 0.03, 0.1 and 0.3 by the mean validation accuracy of the last
five of 30 rounds, in a seed that is not among the final runs'; a run that diverges
counts as 0. FedProx (Flower's) has FedAvg's rate, and its μ, 0.01, 0.1 or 1, is chosen
in the same way. The 5000 validation images are no client's, and no test image is looked
at. Nothing of TCT's stage 2 is chosen. **CIFAR-10** (DIR/CIFAR10: images in folders by
class), a residual network of 7 convolutions (8 to 32 channels, group norm), has 2 local
epochs, 15 rounds a stage, and the rates 0.03 and 0.1 over 10 rounds.
"""

from functools import partial

import torch
from harness.jobs import run_all
from harness.page import Page, blocks
from harness.size import sized
from studies.tct import speed, tables
from studies.tct.layers import layers, layers_section
from studies.tct.runs import (
    SMALL,
    Extent,
    ablations,
    accuracies,
    cifar,
    cifar_fedprox,
    convex,
    federate,
    fedprox,
)

PAGE = Page(
    name="tct",
    opening=blocks("# TCT", (__doc__ or "").strip()),
    sections={
        "features": speed.features_section,
        "closed-form": speed.closed_form_section,
        "accuracy": tables.accuracy_section,
        "fedprox": partial(tables.fedprox_section, "MNIST"),
        "convex": tables.convex_section,
        "cifar": tables.cifar_section,
        "cifar-fedprox": partial(tables.fedprox_section, "CIFAR-10"),
        "ablations": tables.ablations_section,
        "layers": layers_section,
    },
    plots={"accuracy": tables.plot},
)
SPEEDS = {"features": speed.features_part, "closed-form": speed.closed_form_part}
ON_SPLITS = {"accuracy": accuracies, "convex": convex, "cifar": cifar}
FOLDERS = {"cifar": "CIFAR10", "cifar-fedprox": "CIFAR10"}
# What is run at the learning rates that another part has chosen.
BESIDE = {
    "fedprox": ("accuracy", fedprox),
    "cifar-fedprox": ("cifar", cifar_fedprox),
    "ablations": ("accuracy", ablations),
    "layers": ("accuracy", layers),
}


def main() -> None:
    """Run what is asked for, and write the page of all that was ever run."""
    options = PAGE.command_line(__doc__).parse_args()
    torch.set_num_threads(1)
    extent = sized(Extent(), SMALL)
    data_dir, workers = options.data_dir, options.workers
    run = partial(run_all, federate=federate, data_dir=data_dir, workers=workers)
    for name in PAGE.asked(options):
        if name in SPEEDS:
            PAGE.keep(name, SPEEDS[name](extent))
        elif not (data_dir / FOLDERS.get(name, "MNIST")).exists():
            print(
                f"{name} is skipped, as {data_dir} has not its images: see --data-dir"
            )
        elif name in ON_SPLITS:
            PAGE.keep(name, ON_SPLITS[name](extent, run))
        else:
            other, part = BESIDE[name]
            PAGE.keep(name, part(extent, run, PAGE.numbers().get(other)))
    PAGE.write()


if __name__ == "__main__":
    main()
