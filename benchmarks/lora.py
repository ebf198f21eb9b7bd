"""Adapters of clients that differ, merged in one round, by the rules there are.

    python benchmarks/lora.py --data-dir DIR

A vision transformer of two blocks (MNIST, patches of 7 × 7, width 48, 60 000
parameters) is trained on 10 000 upright digits. Then 4 clients, each with at most 400
digits that are turned by a quarter, in proportions of classes of its own
(`dirichlet-client`), tune adapters (LoRA) at the eight linear layers of the blocks; all
else stays as it is. One round; nothing is packed.

*A and B*: both factors are trained, from one A. *A frozen*: B alone, A being random and
everyone's. FedAvg takes the mean of what is trained; FedFisher (K-FAC, its defaults)
takes the factors as the linear layers that they are. *ΔW* is B A, what an adapter adds
to its layer's weight: the mean of those is FLoRA's, of four times the rank; FedFisher
has it by the K-FAC of the layer's own weight, and is cut to the rank again, plainly or
by the clients' mean K-FAC. *Best client* is that which does best on the test images.

AdamW; its learning rate (0.003, 0.01 or 0.03 for A and B, 0.01, 0.03 or 0.1 for B) and
the epochs (5 or 15) are chosen for each rule by accuracy on 2000 other training images,
in a draw of its own. Accuracy on 2000 test images in per cent, mean ± standard
deviation over three seeds, which draw shares, adapters and batches; leads are means ±
standard errors of paired differences. An upload's kB are of float32, symmetric factors
by their triangles.

**Reading.** Freeze A, take twice the rank (about as many parameters are uploaded), and
merge B by its K-FAC. That is ahead of the mean of both factors by 23 and 13 points, of
FLoRA (four times the rank) by 2.8 ± 1.9 and 10.3 ± 1.6, and of the mean of B (FFA-LoRA)
by 8 and 11. Over K-FAC of both factors (3.4 ± 3.3), and of ΔW cut to the rank (0.5
± 3.0), its lead at α = 0.1 is within the error. What the K-FAC of ΔW gains beyond is a
point, for adapters of full rank and 1.6 times the upload; where both factors are
trained it is no better than FLoRA at α = 0.3. The diagonal of B is 3.5 to 4.6 points
behind, and uploads a fifth; RegMean of B 4 to 6, for a kB beside the adapters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from harness.clients import CHOICE
from harness.jobs import Numbers, run_all, run_cells
from harness.page import (
    blocks,
    command_line,
    mnist_folder,
    opening,
    with_workers,
    write_page,
)
from harness.size import sized
from harness.stats import paired, spread, with_error
from harness.tables import head, row
from studies.lora.merges import (
    BOTH_KFAC,
    BOTH_MEAN,
    KFAC_FULL,
    KFAC_METRIC,
    KFAC_SVD,
    MEAN_SVD,
    ONE_DIAGONAL,
    ONE_FULL,
    ONE_KFAC,
    ONE_MEAN,
    ONE_REGMEAN,
    STACKED,
)
from studies.lora.model import BLOCKS, WIDTH
from studies.lora.runs import CLIENTS, Job, federate, pretrained_in

ALPHAS, EPOCHS = sized(((0.3, 0.1), (5, 15)), ((0.3,), (1,)))
SEEDS, RATES = sized(((0, 1, 2), 3), ((0, 1), 1))  # of each grid, the first
BEST = "best client"
SHAPES = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]


@dataclass(frozen=True)
class Variant:
    """Which factors clients train, and of which rank they are."""

    name: str
    frozen: bool
    rank: int
    rates: tuple[float, ...]
    rules: tuple[str, ...]

    def named(self, rule: str) -> str:
        """Return what a row is called."""
        return f"{self.name}, rank {self.rank}: {rule}"

    def jobs(self, alpha: float) -> list[Job]:
        """Return what is tried to choose a learning rate and the epochs."""
        return [
            Job(alpha, self.frozen, self.rank, lr, epochs, CHOICE)
            for lr, epochs in product(self.rates[:RATES], EPOCHS)
        ]


OF_BOTH = (BOTH_MEAN, BOTH_KFAC, STACKED, MEAN_SVD, KFAC_FULL, KFAC_SVD, KFAC_METRIC)
OF_ONE = (ONE_MEAN, ONE_KFAC, ONE_DIAGONAL, ONE_REGMEAN, ONE_FULL)
VARIANTS = (
    Variant("A and B", False, 4, (0.003, 0.01, 0.03), (BEST, *OF_BOTH)),
    Variant("A frozen", True, 4, (0.01, 0.03, 0.1), (BEST, ONE_MEAN, ONE_KFAC)),
    Variant("A frozen", True, 8, (0.01, 0.03, 0.1), (BEST, *OF_ONE)),
)
ROWS = [(variant, rule) for variant in VARIANTS for rule in variant.rules]
Row = tuple[Variant, str]


def accuracy(numbers: Numbers, rule: str) -> float:
    """Return a rule's accuracy in per cent."""
    if rule == BEST:
        return 100 * max(numbers["clients"])
    return 100 * float(numbers["merges"][rule])


def triangle(size: int) -> int:
    """Return how many entries of a symmetric matrix there are to tell."""
    return size * (size + 1) // 2


def uploaded(variant: Variant, rule: str) -> int:
    """Return the bytes of an upload: what is trained, and its K-FAC."""
    entries = 0
    for outputs, inputs in SHAPES:
        first, second = variant.rank * inputs, outputs * variant.rank
        entries += second if variant.frozen else first + second
        if rule in (BOTH_KFAC, ONE_KFAC):
            entries += triangle(variant.rank) + triangle(outputs)
        if rule == ONE_DIAGONAL:
            entries += second
        if rule == ONE_REGMEAN:
            entries += triangle(variant.rank)
        if rule == BOTH_KFAC:
            entries += triangle(inputs) + triangle(variant.rank)
        if rule in (KFAC_FULL, KFAC_SVD, KFAC_METRIC, ONE_FULL):
            entries += triangle(inputs) + triangle(outputs)
    return 4 * BLOCKS * entries


def rank_of(variant: Variant, rule: str) -> str:
    """Return the rank of what comes out."""
    if rule in (KFAC_FULL, ONE_FULL):
        return "full"
    return str(variant.rank * (CLIENTS if rule == STACKED else 1))


def table(found: Mapping[tuple[float, Row], Sequence[float]]) -> list[str]:
    """Return accuracies, and leads over FedAvg of A and B."""
    titles = (f"α = {a}{what}" for a in ALPHAS for what in ("", ", over FedAvg"))
    lines = head("trained: rule", *titles, "rank of all", "kB")
    for variant, rule in ROWS:
        cells = []
        for alpha in ALPHAS:
            own = found[alpha, (variant, rule)]
            theirs = found[alpha, (VARIANTS[0], BOTH_MEAN)]
            cells += [spread(own), with_error(paired(own, theirs), 1)]
        size = f"{uploaded(variant, rule) / 1000:.0f}"
        out = rank_of(variant, rule)
        lines.append(row(variant.named(rule), *cells, out, size))
    return lines


def main() -> None:
    """Choose, run, and write the page."""
    options = with_workers(command_line(__doc__)).parse_args()
    data_dir = mnist_folder(options)
    pretrained_in(data_dir)
    run = partial(
        run_all, federate=federate, data_dir=data_dir, workers=options.workers
    )
    grids = {(a, variant): variant.jobs(a) for a, variant in product(ALPHAS, VARIANTS)}
    tried = run_cells(grids, run)
    chosen, finals = {}, {}
    for alpha, (variant, rule) in product(ALPHAS, ROWS):
        best = max(tried[alpha, variant], key=lambda n: accuracy(n, rule))
        chosen[alpha, (variant, rule)] = f"{best['lr']}, {best['epochs']}"
        finals[alpha, (variant, rule)] = [
            Job(alpha, variant.frozen, variant.rank, best["lr"], best["epochs"], seed)
            for seed in SEEDS
        ]
    runs = run_cells(finals, run)
    found = {
        (alpha, one): [accuracy(numbers, one[1]) for numbers in each]
        for (alpha, one), each in runs.items()
    }
    lines = head("trained: rule", *(f"α = {alpha}" for alpha in ALPHAS))
    for variant, rule in ROWS:
        best = (chosen[alpha, (variant, rule)] for alpha in ALPHAS)
        lines.append(row(variant.named(rule), *best))
    every = {str(one): one for each in runs.values() for one in each}
    numbers = {
        "tried": [one for each in tried.values() for one in each],
        "runs": list(every.values()),
    }
    base = 100 * next(iter(every.values()))["base"]
    page = blocks(
        opening("Adapters, merged", __doc__),
        f"Without adapters: {base:.1f} %.",
        table(found),
        "## Learning rates and epochs",
        lines,
    )
    write_page("lora", page, numbers)


if __name__ == "__main__":
    main()
