"""FedFish beside FedAvg, both with Adam on the server, as local epochs grow.

    python benchmarks/fedfish.py --data-dir DIR   # DIR/MNIST/raw has the files

MNIST, `mlp`, 100 clients of at most 200 images; 80 of them train, 10 a round, by plain
SGD in batches of 20, and 20 are held out. A run has 80 local epochs whatever E is: 80
rounds of E = 1, 20 of E = 4, 5 of E = 16. Two kinds of heterogeneity:

- *label skew*: `dirichlet-client` with α = 0.1; the server's model is scored on the
  test set;
- *shift*: labels alike (`iid`), but each client sees its images turned by an angle of
  its own, uniform in ±60°, and faded by a factor of its own, uniform in 0.3…1; of the
  test set the i-th image is seen as client i mod 100 would see it, so that the score is
  a mean over all 100 clients' ways, each with 100 images that no other has.

**Methods.** FedAvg is FedFish's strategy with every Fisher one, which is FedAvg bit for
bit; so both have the same Adam (torch's defaults), cohorts, batches and initial weights
of a seed, and no upload is compressed. *FedFish* is the paper's (`power=1, balance=0`),
*last-epoch* and *product* its two savings (*product*'s Adam has FedFish's smaller ε).
*Balance 1* takes the sizes out of the clients' Fishers, *power 1/2* takes the root of
each entry; *FedFish (default)* does both. These two were chosen, among four, by the
best validation accuracies of the grid below, before any test image was looked at.

**Learning rates** of client and server are chosen for every row from the same 3×3 grid
(client 0.01, 0.04, 0.16; server 0.001, 0.004, 0.016) by the accuracy on 5000 training
images of a split with a seed of its own (100), where no test image is looked at; such
runs are of full length. The table's seeds are 0-4. The final runs were all made anew
when the default was added; the choices of the older rows are of an earlier version.

**Scores** are means over a run's last two rounds. *Personalised*: held-out clients
fine-tune the server's model for 4 epochs at the row's client learning rate on 25 % or
50 % of their data and are scored on the other half; *zero-shot* is before. *Barrier*:
what the round's clients lose on their own training data from their models to the
server's, in loss and in points of accuracy.

Spreads are standard deviations over the seeds, and in differences, which are paired by
seed, standard errors: of five seeds, so that the 95 % interval reaches 2.8 of them to
each side.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from harness.jobs import Numbers, run_all
from harness.page import (
    RESULTS,
    blocks,
    command_line,
    mnist_folder,
    numbers_of,
    opening,
    with_workers,
    write_page,
)
from studies.fedfish import tables
from studies.fedfish.choice import (
    HIGH,
    LOW,
    TOTAL,
    Found,
    found_in,
    known_in,
    run_everything,
)
from studies.fedfish.reading import choice_notes, reading
from studies.fedfish.runs import federate


def page(numbers: Mapping[str, Sequence[Numbers]]) -> list[str]:
    """Return the page's lines."""
    found = found_in(numbers)
    return blocks(
        opening("FedFish beside FedAvg as local epochs grow", __doc__),
        f"The runs' times add up to about {minutes(found):.0f} minutes, two at a time.",
        "![scores against local epochs](fedfish.png)",
        scores(found),
        uploads(found),
        learning_rates(found),
    )


def minutes(found: Found) -> float:
    """Return how long all runs took, but those of FedAvg at FedFish's rates."""
    short = (cell for key, cell in found.short.items() if key[1] < HIGH)
    cells = [list(found.tried.values()), *found.runs.values(), *short]
    return sum(run.get("seconds", 0.0) for cell in cells for run in cell) / 60


def scores(found: Found) -> list[str]:
    """Return the scores, their differences, and what they say."""
    return blocks(
        "## Scores",
        "Accuracy in per cent, mean ± standard deviation over the seeds.",
        tables.scores_table(found.runs),
        "## Differences",
        "Mean of the seeds' paired differences ± its standard error. Of accuracies "
        "more is better, of barriers less. The growth is that of FedFish − FedAvg from "
        f"E = {LOW} to {HIGH}.",
        tables.gaps_table(found.runs),
        "## Reading",
        reading(found.runs, found.short),
        "## The same number of rounds",
        "At the same local epochs, a larger E has fewer steps of the server. Here "
        f"E = 1 and 4 have as few as E = 16, {TOTAL // HIGH}, with learning rates "
        "chosen from the same grid in runs of that length. FedFish − FedAvg:",
        tables.same_rounds(found.short),
    )


def uploads(found: Found) -> list[str]:
    """Return what the last round's uploads are worth when they are averaged once."""
    return blocks(
        "## The same uploads, averaged three ways",
        "Those of the last round of the FedFish runs: parameters averaged once, with "
        "no server optimiser, and scored as above.",
        tables.merged_table(found.runs),
        "Who decides FedFish's average: the weights that its entries give to the ten "
        "clients. A mean is made of ten.",
        tables.shares_table(found.runs),
    )


def learning_rates(found: Found) -> list[str]:
    """Return what was chosen, and how much hangs on it."""
    return blocks(
        "## Learning rates",
        "Accuracies in per cent, on the validation images. \\* marks the grid's edge; "
        "the last column has what a step outside it (client, server) gives, which was "
        "not chosen from.",
        tables.rates_table(found),
        choice_notes(found),
        "At one rate of fine-tuning for all (0.04), personalised on 50 %, with the "
        "difference to FedAvg:",
        tables.common_table(found.runs),
    )


def main() -> None:
    """Write the page, the plot and the numbers behind them."""
    options = with_workers(command_line(__doc__)).parse_args()
    data_dir, workers = mnist_folder(options), options.workers
    known = known_in(numbers_of("fedfish"))
    run = partial(
        run_all, federate=federate, data_dir=data_dir, workers=workers, known=known
    )
    numbers = run_everything(run)
    write_page("fedfish", page(numbers), numbers)
    tables.plot(found_in(numbers).runs, RESULTS / "fedfish.png")


if __name__ == "__main__":
    main()
