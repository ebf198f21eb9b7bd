"""Clients that did not start alike, and clients that train from several starts.

    python benchmarks/starts.py --data-dir DIR   # DIR/MNIST/raw has the files

MNIST, LeNet without biases, 5 clients, ``dirichlet-client`` with α = 0.1, 30 epochs of
SGD (lr 0.01, momentum 0.9, batch 64); K-FACs as ``FedFisherOneShot`` asks for them.
Mean ± standard deviation of the test accuracy over seeds.

**Unlike starts.** Every client trains from initial weights of its own. *Matched* merges
permute each client's hidden units to the first's before they merge (Git Re-Basin;
``rivals.git_rebasin``).

**Several posteriors a client** (FedBEns, Talpini et al., ICML 2025). All clients train
from one start, and again from a second and a third: three uploads each. The mixture of
a client's three Laplace approximations is merged from each start, which gives three
models that vote. Where a client's components lie so far apart that at a merged model
one of them alone counts, the mixture's merge is that component's: the least difference
of the exponents at the merged models, over clients and pairs of components, says so.
"""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from harness.page import (
    blocks,
    command_line,
    mnist_folder,
    numbers_of,
    opening,
    with_workers,
    write_page,
)
from harness.size import sized
from harness.splits import on_splits
from harness.stats import paired, spread, with_error
from harness.tables import head, row
from harness.uploads import Setting, posteriors
from rivals.git_rebasin import matched
from studies.papers.found import ahead

from flwr_fisher.merge import LocalPosterior, fedavg, fedfisher
from flwr_fisher.params import Params, dot, select, subtract
from flwr_fisher.report import accuracies, ensemble_accuracy

SEEDS, STARTS = sized(5, 2), 3
PLAIN = "FedFisher (default), one upload"
VOTE = f"vote of {STARTS} merges, {STARTS} uploads"
GAP = "least difference of exponents"
Found = dict[str, float]


def evaluate(setting: Setting, data_dir: Path) -> Found:
    """Return every merge's test accuracy in per cent on one split, and the gap."""
    task = setting.task(data_dir)
    model, test = task.make_model(), list(task.test_loader())

    def uploads(start: int, clients: list[int] | None = None) -> list[LocalPosterior]:
        own = replace(setting, start=start)
        return posteriors(own, own.task(data_dir), "kfac", clients=clients)

    modes = [uploads(start) for start in range(STARTS)]
    apart = [uploads(client, [client])[0] for client in range(setting.clients)]
    merged = [fedfisher(mode).params for mode in modes]
    found = accuracies(
        model,
        {
            "FedAvg, unlike starts": fedavg(apart),
            "FedAvg, unlike starts, matched": fedavg(matched(apart)),
            "FedFisher (default), unlike starts": fedfisher(apart).params,
            "FedFisher (default), unlike starts, matched": fedfisher(
                matched(apart)
            ).params,
            PLAIN: merged[0],
        },
        test,
    )
    found[VOTE] = ensemble_accuracy(model, merged, [1.0] * STARTS, test)
    gaps = [
        exponent(other[client], merged[here]) - exponent(mode[client], merged[here])
        for here, mode in enumerate(modes)
        for there, other in enumerate(modes)
        for client in range(setting.clients)
        if there != here
    ]
    return {name: 100 * value for name, value in found.items()} | {GAP: min(gaps)}


def exponent(upload: LocalPosterior, params: Params) -> float:
    """Return minus the logarithm of a client's density there, but for a constant."""
    F = upload.curvature
    away = subtract(select(params, F.shapes), select(upload.params, F.shapes))
    return 0.5 * upload.num_examples * float(dot(away, F.matvec(away)))


def table(found: list[Found]) -> list[str]:
    """Return the table's lines."""
    lines = head("test accuracy, %", "mean", f"minus {PLAIN} ± s.e.")
    for name in found[0]:
        if name == GAP:
            continue
        values = [split[name] for split in found]
        gain = with_error(paired(values, [split[PLAIN] for split in found]), 2)
        lines.append(row(name, spread(values), "" if name == PLAIN else gain))
    return lines


def reading(found: list[Found]) -> str:
    """Return what FedBEns' mixture comes to."""
    least = min(split[GAP] for split in found)
    said = (
        "so that no second component of any client counts at any merged model: the "
        "mixture's merge is the merge of one component each, and its use is the vote"
        if least > 10
        else "so that second components do count at a merged model"
    )
    gains = paired([x[VOTE] for x in found], [x[PLAIN] for x in found])
    return (
        f"The least difference of exponents is {least:.0f}, {said}. That gains "
        f"{with_error(gains, 1)} points for three trainings and uploads, "
        f"{'more' if ahead(gains) else 'no more'} than two standard errors."
    )


def splits() -> list[Setting]:
    """Return the seeds' splits."""
    return [Setting("mnist", "lenet", 0.1, seed, budget=True) for seed in range(SEEDS)]


def main() -> None:
    """Write the page."""
    options: Namespace = with_workers(command_line(__doc__)).parse_args()
    options.data_dir = mnist_folder(options)
    numbers = numbers_of("starts")
    found = on_splits("starts", evaluate, splits(), options, numbers)
    numbers |= {split.folder.name: own for split, own in found.items()}
    results = list(found.values())
    title = "Unlike starts, and several of them"
    page = blocks(opening(title, __doc__), table(results), reading(results))
    write_page("starts", page, numbers)


if __name__ == "__main__":
    main()
