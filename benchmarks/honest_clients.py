"""Whether any limit touches a hundred honest clients of sizes by Zipf's law.

    python benchmarks/honest_clients.py [--data-dir DIR]

Of 10 000 examples the first client has all, the second half, the third a third, and the
last ten. Their classes are in shares that are Dirichlet's with this α: for 0.1 most
have one or two. They train a network of one hidden layer for an epoch of batches of 64,
and are drawn with replacement: digits has 1437 examples. MNIST is left out where it is
not in ``--data-dir``.

First FedAvg for five rounds, by this library and by Flower. Then methods, by their
defaults and with all limits lifted (``Policy(max_weight=inf, max_distance=inf)``).

The two FedAvgs add in other orders, so they round differently, and training makes such
differences grow: at α = 1 on digits a hundredfold in two rounds. So each of Flower's
rounds begins with this library's model, and differs by that round's arithmetic alone.
"""

import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from harness.jobs import all_kept
from harness.page import (
    CACHE,
    blocks,
    command_line,
    opening,
    with_workers,
    write_page,
)
from harness.size import sized
from harness.tables import head, row

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from unequal import (
    CLIENTS,
    METHODS,
    Federation,
    FlowersFedAvg,
    furthest,
    holdings,
    metrics_apart,
    without_limits,
)

from flwr_fisher.strategies import FedAvg

ROUNDS, SHARE = sized((5, 1), (2, 50))  # of a client's examples, one in so many
CASES = [
    ("digits", 0.1),
    *sized([("digits", 1.0), ("mnist", 0.1), ("mnist", 1.0)], []),
]


def cases(options: Namespace) -> list[tuple[str, float]]:
    """Return the data sets that are there, each with an α; say which is not."""
    if (options.data_dir / "MNIST").exists():
        return CASES
    print(f"left out: MNIST, which is not in {options.data_dir}")
    return [case for case in CASES if case[0] != "mnist"]


def measure(name: str, alpha: float, data_dir: Path) -> dict[str, Any]:
    """Return what two runs of FedAvg, and two of each method, differ by."""
    federation = Federation(holdings(name, alpha, SHARE, data_dir))
    ours, our_models = federation.run(FedAvg(min_train_nodes=CLIENTS), ROUNDS)
    strategy = FlowersFedAvg(our_models, min_train_nodes=CLIENTS)
    theirs, their_models = federation.run(strategy, ROUNDS)
    most, count = metrics_apart(ours, theirs)
    metrics = ours.train_metrics_clientapp.values()
    found = {
        "parameters": furthest(our_models, their_models),
        "metrics": most,
        "num-metrics": count,
        "limited": sum(int(own.get("num-limited", 0)) for own in metrics),
        "methods": {},
    }
    for method in METHODS:
        same, limited = without_limits(federation, method)
        found["methods"][method] = {"same bits": bool(same), "limited": limited}
        print(name, alpha, method, same, limited, flush=True)
    return found


def of_fedavg(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a row for each federation."""
    rounds = [f"round {n}" for n in range(1, ROUNDS + 1)]
    yield from head("data", *rounds, "metrics", "uploads limited")
    for name, own in found.items():
        apart = [f"{value:.1e}" for value in own["parameters"][1:]]
        yield row(name, *apart, f"{own['metrics']:.1e}", str(own["limited"]))


def of_methods(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a row for each federation: which methods' models are the same."""
    yield from head("data", *METHODS)
    for name, own in found.items():
        cells = [
            f"{'same bits' if one['same bits'] else 'differs'}, {one['limited']}"
            for one in own["methods"].values()
        ]
        yield row(name, *cells)


def main() -> None:
    """Run all, and write the page."""
    options = with_workers(command_line(__doc__)).parse_args()
    warnings.simplefilter("ignore")
    asked = cases(options)
    folder = CACHE / "honest_clients"
    jobs = [
        (folder / f"{name}-a{a}.json", partial(measure, name, a, options.data_dir))
        for name, a in asked
    ]
    titles = [f"{name}, α = {alpha:g}" for name, alpha in asked]
    found = dict(zip(titles, all_kept(jobs, options.workers), strict=True))
    lines = blocks(
        opening("Honest clients of very unlike sizes", __doc__),
        "## FedAvg, less Flower's",
        "How far the models' parameters are apart at most, after each round; and how "
        "far the clients' averaged metrics, of training and evaluation, in any round.",
        list(of_fedavg(found)),
        "## By the default policy, and without limits",
        "Whether the models are the same, bit for bit; and how many uploads were "
        "limited.",
        list(of_methods(found)),
    )
    write_page("honest_clients", lines, found)


if __name__ == "__main__":
    main()
