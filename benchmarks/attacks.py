"""One hostile client, or two, of ten: which merges keep their accuracy.

    python benchmarks/attacks.py --data-dir DIR   # DIR/MNIST has torchvision's files

MNIST, LeNet without biases, 10 clients, ``dirichlet-client``, 12 epochs of SGD (lr
0.01, momentum 0.9, batch 64) from one start, one round, three seeds; K-FAC as
``FedFisherOneShot`` asks for it by default. The attackers are the first clients in the
partition's order; the others' uploads are the same in every row. Accuracy is on
every second test image. What each attack uploads in place of an honest θᵢ, Fᵢ, nᵢ, from
the start θ₀:

- *label flips*: trained with y → 9 - y; *backdoor*: trained with a white square of
  4 × 4 pixels on every second image, which is then a 0;
- *sign flip*: θ₀ - (θᵢ - θ₀), or ten times that; *scaled*: θ₀ + c (θᵢ - θ₀);
- *F × 10⁶*: the Fisher, beside honest parameters or others; *n = 10⁹*: examples, too;
- *random model*: another initialisation, and the Fisher of the client's images there;
- *n, F*: both lies together, beside flipped labels, a backdoor, or half a sign flip.

Rivals are Flower's own strategies, with the same parameters and numbers of examples.
They are told how many attackers there are (without any: one): Krum, MultiKrum (which
averages all but so many) and the trimmed mean (which cuts that share at each end). Ours
are not: *FedFisher* is ``fedfisher(uploads)`` after the server's default ``Policy``,
which is for honest clients: a step from the start of at most 1000 times the median
length, and 1000 times the median number of examples. *Strict policy* is
``Policy.strict()``, the median of either. *Robust* leaves out clients that are 1.5
medians away from the others (``rivals.outliers``). *Left out by hand* is FedFisher of
the other clients alone: what a merge can know at best.

**Bold**: at least 90 % of the same method's accuracy without attackers, on the mean
over seeds. A method that is poor without attackers has little to lose: Krum is one
client's model. Attacks that change neither parameters nor examples are nothing to the
rivals.
"""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from harness.page import command_line, opening, with_workers, write_page
from harness.size import sized
from harness.splits import on_splits
from harness.uploads import Setting
from studies.attacks.methods import Params, digest, models
from studies.attacks.tables import HONEST, ORACLE, Scores, cell, page, success
from studies.attacks.uploads import ATTACKERS, ATTACKS, BACKDOORS, Federation

from flwr_fisher.merge import fedfisher
from flwr_fisher.report import accuracies

SCORED = sized(5000, 100)  # of the test images
ALPHAS = sized((0.3, 0.1), (0.3,))
SEEDS = sized(range(3), range(2))


def settings() -> dict[float, list[Setting]]:
    """Return the splits by α."""
    return {
        alpha: [
            Setting("mnist", "lenet", alpha, s, clients=10, epochs=12, budget=True)
            for s in SEEDS
        ]
        for alpha in ALPHAS
    }


def evaluate(setting: Setting, data_dir: Path) -> Scores:
    """Return all methods' test accuracies in per cent, in every cell."""
    federation = Federation(setting, data_dir)
    model, start = federation.task.make_model(), federation.start
    images = federation.scored(SCORED)
    known: dict[tuple[bytes, bool], float] = {}  # many attacks leave the same model

    def score(params: Params, triggered: bool) -> float:
        key = digest(params), triggered
        if key not in known:
            own = accuracies(model, {"x": params}, images[triggered])
            known[key] = 100 * own["x"]
        return known[key]

    def scores(candidates: Mapping[str, Params], triggered: bool) -> dict[str, float]:
        return {name: score(params, triggered) for name, params in candidates.items()}

    found = {}
    honest = models(federation.honest, start, 0)
    found[cell(HONEST, 0)] = scores(honest, False)
    found[success(HONEST, 0)] = scores(honest, True)
    for attackers in range(1, ATTACKERS + 1):
        others = federation.honest[attackers:]
        alone = {ORACLE: fedfisher(others).params}
        for attack in ATTACKS:
            uploads = federation.attacked(attack, attackers)
            made = models(uploads, start, attackers)
            found[cell(attack, attackers)] = scores(made, False)
            if attack in BACKDOORS:
                found[success(attack, attackers)] = scores(made, True)
        found[cell(ORACLE, attackers)] = scores(alone, False)
    return found


def main() -> None:
    """Write the tables."""
    options = with_workers(command_line(__doc__)).parse_args()
    splits = settings()
    every = chain.from_iterable(splits.values())
    found = on_splits("attacks", evaluate, every, options)
    results = {alpha: [found[split] for split in own] for alpha, own in splits.items()}
    lines = page(opening("Hostile clients", __doc__), results)
    write_page("attacks", lines, results)


if __name__ == "__main__":
    main()
