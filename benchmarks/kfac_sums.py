"""K-FAC merged from sums over clients, beside the default from every client's parts.

    python benchmarks/kfac_sums.py --data-dir DIR [--only mnist] [--alphas 0.2]

DIR/MNIST/raw has torchvision's files, DIR/CIFAR10 the images in folders by class,
`train` and `test`.

5 clients, ``dirichlet-client``, 30 epochs of SGD, three seeds; the Fishers are those
that ``FedFisherOneShot`` asks for by default. From sums the server knows no client's
own Fisher: neither `robust` nor `max_share` is possible, and a client balances its own
(``balance=1``), as chosen on validation data in fedfisher_defaults.md. Bytes are those
of a client in all exchanges, as numbers of the model's size: a round from sums has the
model, the layers' partial traces with the pull, and a product for each iteration.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

from fedfisher import ALPHAS, PROBLEMS, Problem, Scores, of
from harness.page import blocks, command_line, opening, with_workers, write_page
from harness.splits import on_splits
from harness.stats import paired, spread, with_error
from harness.tables import head, row
from harness.uploads import Setting, posteriors
from torch import Tensor

from flwr_fisher.curvature import BlockDiagonal, Curvature, Kronecker
from flwr_fisher.measures import accuracies
from flwr_fisher.merge import (
    LocalPosterior,
    balanced,
    fedavg,
    fedfisher,
    partial_traces,
    sums_options,
)
from flwr_fisher.merge.sums_solver import advanced, begin, merged
from flwr_fisher.params import select, subtract, weighted_mean
from flwr_fisher.wire import curvature_to_tensors, tensors_to_curvature

SEEDS, ITERATIONS = 3, (1, 2, 4)
PARTS = "from parts (default)"
UNBALANCED = "from sums, balance 0, 4 iterations"

NOTES = """\
The masks of a secure sum add nothing to this but its rounding, of some 1e-8 of each
tensor's largest entry, and the keys' and shares' kilobytes: secure_sums.md.
"""


def from_sums(uploads: list[LocalPosterior], **own: float) -> dict[str, Tensor]:
    """Merge as a server does that sees weighted means over the clients alone."""
    options = sums_options(structure="kfac", **own)
    weights = [upload.num_examples for upload in uploads]
    settings = {k: getattr(options, k) for k in ("shrink", "damping", "balance")}
    fishers = [balanced(u.curvature, **settings) for u in uploads]
    average = fedavg(uploads)
    pulls = []
    for F, upload in zip(fishers, uploads, strict=True):
        away = subtract(select(upload.params, F.shapes), select(average, F.shapes))
        pulls.append(F.matvec(away))
    parts = [curvature_to_tensors(partial_traces(F)) for F in fishers]
    traces = tensors_to_curvature(weighted_mean(parts, weights), average)
    iterate = begin(traces, weighted_mean(pulls, weights), options)
    for _ in range(options.iterations):
        direction = {k: v.to(average[k]) for k, v in iterate.direction.items()}
        products = [F.matvec(direction) for F in fishers]
        iterate = advanced(traces, iterate, weighted_mean(products, weights), options)
    layers = [list(block.shapes) for block in traces.blocks()]
    return merged(average, iterate, layers).params


def factor_entries(curvature: Curvature) -> int:
    """Return how many numbers a layer's factors have, of all layers."""
    return sum(
        block.A.numel() + block.G.numel()
        if isinstance(block, Kronecker)
        else block.numel()
        for block in BlockDiagonal([curvature]).blocks()
    )


def evaluate(setting: Setting, data_dir: Path) -> Scores:
    """Return every method's test accuracy in per cent on one split, and sizes."""
    task = setting.task(data_dir)
    uploads = posteriors(setting, task, "kfac")
    models: dict[str, Mapping[str, Tensor]] = {
        "FedAvg": fedavg(uploads),
        PARTS: fedfisher(uploads).params,
        UNBALANCED: from_sums(uploads, balance=0.0, iterations=4),
    }
    for k in ITERATIONS:
        models[_name(k)] = from_sums(uploads, iterations=k)
    found = accuracies(task.make_model(), models, list(task.test_loader()))
    curvature = uploads[0].curvature
    size = sum(value.numel() for value in uploads[0].params.values())
    return {
        **{name: 100 * value for name, value in found.items()},
        "factors": factor_entries(curvature) / size,
    }


def _name(iterations: int) -> str:
    return f"from sums, {iterations} iteration{'s' if iterations > 1 else ''}"


def table(results: Mapping[float, list[Scores]]) -> list[str]:
    """Return the table's lines: mean and standard deviation over seeds."""
    every = list(chain.from_iterable(results.values()))
    factors = mean(split["factors"] for split in every)
    alphas = [alpha for alpha in ALPHAS if alpha in results]
    columns = (f"α = {alpha}" for alpha in alphas)
    lines = head(
        "test accuracy, %", *columns, "minus the default", "numbers a client uploads"
    )
    sizes = {"FedAvg": 1.0, PARTS: 1.0, UNBALANCED: 2 + factors + 4}
    sizes |= {_name(k): 2 + factors + k for k in ITERATIONS}
    for name, size in sizes.items():
        gain = paired(
            [split[name] for split in every], [split[PARTS] for split in every]
        )
        shown = [spread(of(results[alpha], name)) for alpha in alphas]
        against = "" if name == PARTS else with_error(gain, 2)
        lines.append(row(name, *shown, against, f"{size:.1f} × the model"))
    return lines


def splits_of(problem: Problem, alphas: Sequence[float]) -> dict[float, list[Setting]]:
    """Return three seeds' splits for each α."""
    own: dict[str, Any] = {"budget": True, "averaged": 0, "examples": None}
    return {
        alpha: [problem.setting(alpha, seed, **own) for seed in range(SEEDS)]
        for alpha in alphas
    }


def main() -> None:
    """Write the page."""
    parser = with_workers(command_line(__doc__))
    parser.add_argument("--only", choices=PROBLEMS)
    parser.add_argument("--alphas", type=float, nargs="+", default=ALPHAS)
    options = parser.parse_args()
    for name in [options.only] if options.only else PROBLEMS:
        problem = PROBLEMS[name]
        if not (options.data_dir / problem.folder).exists():
            print(f"left out, as it is not in {options.data_dir}: {problem.folder}")
            continue
        splits = splits_of(problem, options.alphas)
        every = chain.from_iterable(splits.values())
        found = on_splits("kfac_sums", evaluate, every, options)
        results = {a: [found[s] for s in own] for a, own in splits.items()}
        title = f"K-FAC from sums: {problem.title}"
        page = blocks(opening(title, __doc__), table(results), NOTES)
        write_page(f"kfac_sums_{name}", page, results)


if __name__ == "__main__":
    main()
