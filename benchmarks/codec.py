"""What packing an upload costs: accuracy against bytes, and time in local epochs.

    python benchmarks/codec.py --data-dir DIR   # DIR/MNIST/raw has the files

The clients are those of `fedfisher.py` (MNIST, LeNet, α = 0.1, seeds 0-2); each codec
packs and unpacks the same uploads, which the default solver merges (the closed form
where the structure is diagonal). Sizes are those of the serialised reply, metrics
included, in multiples of FedAvg's: the largest of any client. Nothing was chosen on
these splits: budgets are named, all else is the codec's default. Three splits say
little about a codec's noise, so a second table has the 12 validation splits (MNIST) of
`fedfisher_defaults.py`.

Times are medians of 5 runs that take turns. An epoch is the client's own loop
(`LocalSGD`, batch 64) over all of its examples. The CNN is that of `curvature.py`,
trained for an epoch on 12 000 generated images.
"""

import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from curvature import Batches, generated, seconds
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from matplotlib.figure import Figure
from torch import nn
from uploads import Setting, mnist_folder, posteriors

from flwr_fisher.client.training import Loader, LocalSGD
from flwr_fisher.curvature import fisher
from flwr_fisher.measures import accuracies
from flwr_fisher.merge import LocalPosterior, merge_fisher
from flwr_fisher.params import shared_state
from flwr_fisher.tasks import Task, make_model
from flwr_fisher.wire import (
    CODECS,
    PREFIX,
    Codec,
    FisherUpload,
    resolve,
    serialized_bytes,
    tensors_to_arrays,
)
from flwr_fisher.wire.container import from_container

RESULTS = Path(__file__).parent / "results"
PLAIN, PAPER = "uncompressed", "paper's, 1.0"
PACKED = {f"packed, {budget}": Codec(budget) for budget in (1.0, 0.75, 0.5, 0.35, 0.25)}
FULL = "packed, 1.0"
KFAC = {PLAIN: CODECS["lossless"], **PACKED, PAPER: CODECS["paper"]}
DIAGONAL = {name: KFAC[name] for name in (PLAIN, FULL, "packed, 0.5", PAPER)}
UNREGULARISED = {"anchor": 0.0, "shrink": 0.0, "damping": 0.0, "balance": 0.0}
UNREGULARISED["iterations"] = 60
TIMED = {name: KFAC[name] for name in (FULL, "packed, 0.5", "packed, 0.25", PAPER)}
SEEDS = (0, 1, 2)
# How many points below the uncompressed upload are allowed.
TARGETS = {FULL: 0.3, "packed, 0.75": 0.5, "packed, 0.5": 1.5}
EXAMPLES, RUNS = 12_000, 5
CPU = torch.device("cpu")
Find = dict[str, dict[str, Any]]


def reply_bytes(arrays: ArrayRecord, client: LocalPosterior) -> int:
    """Return what a client's whole reply weighs."""
    metrics = MetricRecord(
        {"num-examples": int(client.num_examples), "train_loss": 0.1}
    )
    return serialized_bytes(RecordDict({"arrays": arrays, "metrics": metrics}))


def travel(
    client: LocalPosterior, asked: Codec
) -> tuple[LocalPosterior, float, tuple[str, str]]:
    """Return what arrives, its size in FedAvg's, and bits of weights and curvature."""
    codec = resolve(asked, client.params)
    record = FisherUpload(client.params, client.curvature).to_arrays(codec)
    arrived = FisherUpload.from_arrays(record, client.params, codec)
    plain = reply_bytes(tensors_to_arrays(client.params), client)
    return (
        replace(client, params=arrived.params, curvature=arrived.curvature),
        reply_bytes(record, client) / plain,
        bits_in(record, codec),
    )


def bits_in(record: ArrayRecord, codec: Codec) -> tuple[str, str]:
    """Return the bits of weights and of curvature, read from what travels."""
    if codec.scheme == "lossless":
        return "32", "32"
    entries, _ = from_container(record, limit=1 << 30, count=1000)
    if codec.scheme == "paper":  # which says so nowhere: it has no other
        factors = any(key.startswith(f"{PREFIX}kfac") for key in entries)
        return "16", "8" if factors else "16"
    found: tuple[set[int], set[int]] = set(), set()
    for key, entry in entries.items():
        found[key.startswith(PREFIX)].add(int(entry[1]))  # see wire/packing.py
    weights, curvature = (", ".join(map(str, sorted(bits))) for bits in found)
    return weights, curvature


def evaluate(
    task: Task,
    clients: Sequence[LocalPosterior],
    loader: Loader,
    codecs: Mapping[str, Codec],
    options: Mapping[str, Any],
) -> Find:
    """Return every codec's accuracy in per cent, and what its uploads weigh."""
    found: Find = {}
    merged = {}
    for name, codec in codecs.items():
        arrived, sizes, bits = zip(*(travel(c, codec) for c in clients), strict=True)
        merged[name] = merge_fisher(arrived, **options).params
        weights, curvature = (
            " or ".join(sorted({*b})) for b in zip(*bits, strict=True)
        )
        found[name] = {"size": max(sizes), "bits": f"{weights} / {curvature}"}
    for name, value in accuracies(task.make_model(), merged, loader).items():
        found[name]["accuracy"] = 100 * value
    return found


def on_test(
    structure: str, codecs: Mapping[str, Codec], data_dir: Path, **options: Any
) -> list[Find]:
    """Return each seed's results on the test set, merged with these options."""
    found = []
    for seed in SEEDS:
        setting = Setting("mnist", "lenet", 0.1, seed)
        task = setting.task(data_dir)
        clients = posteriors(setting, task, structure)
        found.append(evaluate(task, clients, task.test_loader(), codecs, options))
        print(structure, seed, json.dumps(found[-1]), flush=True)
    return found


def on_validation(data_dir: Path, **options: float) -> list[Find]:
    """Return the results on splits and examples of no test set."""
    found = []
    for seed, alpha in product(range(100, 104), (0.2, 0.1, 0.05)):
        setting = Setting(
            "mnist", "lenet", alpha, seed, validation=10_000, hold_out=True
        )
        task = setting.task(data_dir)
        assert task.validation is not None
        loader = task.eval_loader(task.validation)
        found.append(evaluate(task, posteriors(setting, task), loader, KFAC, options))
        print(alpha, seed, json.dumps(found[-1]), flush=True)
    return found


def differences(splits: Sequence[Find], name: str, to: str = PLAIN) -> list[float]:
    """Return a codec's accuracy minus another's, split by split."""
    return [split[name]["accuracy"] - split[to]["accuracy"] for split in splits]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), error


def accuracy_table(splits: Sequence[Find]) -> list[str]:
    """Return a table over the seeds of the test set."""
    lines = [
        "| codec | bits, weights / curvature | size, FedAvg's = 1 | test accuracy, % "
        "| minus uncompressed (each seed) |",
        "|---|---|---|---|---|",
    ]
    for name in splits[0]:
        accuracy = [split[name]["accuracy"] for split in splits]
        size = max(split[name]["size"] for split in splits)
        bits = " or ".join(sorted({split[name]["bits"] for split in splits}))
        cells = [name, bits, f"{size:.3f}"]
        cells.append(
            f"{statistics.mean(accuracy):.2f} ± {statistics.stdev(accuracy):.2f}"
        )
        cells.append("" if name == PLAIN else _each(differences(splits, name)))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _each(values: Sequence[float]) -> str:
    each = ", ".join(f"{value:+.2f}" for value in values)
    return f"{statistics.mean(values):+.2f} ({each})"


def validation_table(splits: Sequence[Find]) -> list[str]:
    """Return a table of what the validation splits gain or lose."""
    lines = [
        f"| codec | minus uncompressed, mean of {len(splits)} ± standard error "
        "| root mean square | worst split |",
        "|---|---|---|---|",
    ]
    for name in splits[0]:
        if name != PLAIN:
            values = differences(splits, name)
            mean, error = mean_and_error(values)
            typical = math.sqrt(statistics.mean(value**2 for value in values))
            cells = f"{mean:+.2f} ± {error:.2f} | {typical:.2f} | {min(values):+.2f}"
            lines.append(f"| {name} | {cells} |")
    return lines


def targets(
    test: Sequence[Find], diagonal: Sequence[Find], validation: Sequence[Find]
) -> list[str]:
    """Return a line for each target, reached or missed."""
    rows = []
    for name, allowed in TARGETS.items():
        mean = statistics.mean(differences(test, name))
        bits = test[0][name]["bits"].split(" / ")[0]
        target = f"{name} (weights: {bits} bits) at most {allowed} points below"
        rows.append((f"{target} uncompressed", f"{mean:+.2f}", mean >= -allowed))
    gains = differences(test, FULL, PAPER)
    above = statistics.mean(gains) > 0
    rows.append((f"{FULL} above the paper's codec", _each(gains), above))
    spent = [
        split[name]["size"] / KFAC[name].budget
        for split in (*test, *diagonal, *validation)
        for name in split.keys() - {PLAIN}
    ]
    most = f"{max(spent):.3f} of it at most"
    rows.append(("every reply within its budget", most, max(spent) <= 1))
    lines = ["| target, means over seeds | found | |", "|---|---|---|"]
    for target, found, reached in rows:
        lines.append(
            f"| {target} | {found} | {'reached' if reached else '**missed**'} |"
        )
    return [*lines, "", _against_paper(validation)]


def _against_paper(validation: Sequence[Find]) -> str:
    mean, error = mean_and_error(differences(validation, FULL, PAPER))
    noise = "less" if abs(mean) < 2 * error else "more"
    text = (
        f"On the validation splits, {FULL} minus the paper's codec is {mean:+.2f} ± "
        f"{error:.2f} points (standard error), {noise} than two standard errors"
    )
    return text + (": within noise." if noise == "less" else ".")


@dataclass
class Client:
    """What the times are measured on."""

    model: nn.Module
    loader: Loader
    posterior: LocalPosterior


def clients(data_dir: Path) -> Iterator[tuple[str, Client]]:
    """Yield a client of each model, both with about as many examples."""
    setting = Setting("mnist", "lenet", 0.1, 0)
    task = setting.task(data_dir)
    all_clients = posteriors(setting, task)
    index = min(
        range(setting.clients), key=lambda i: abs(task.num_examples(i) - EXAMPLES)
    )
    model, chosen = task.make_model(), all_clients[index]
    model.load_state_dict(chosen.params)
    yield "LeNet, MNIST", Client(model, task.train_loader(index, 64), chosen)

    x, y = generated(EXAMPLES)
    model = make_model("cnn", shape=(3, 32, 32), num_classes=10)
    torch.manual_seed(0)
    LocalSGD()(model, Batches(x, y, 64), CPU, {})
    curvature = fisher(model, Batches(x[:2048], y[:2048], 256), structure="kfac")
    chosen = LocalPosterior(shared_state(model), curvature, EXAMPLES)
    yield "CNN, CIFAR-10's shape", Client(model, Batches(x, y, 64), chosen)


@contextmanager
def decompositions() -> Iterator[list[float]]:
    """Collect the seconds spent in torch's eigh and svd."""
    took: list[float] = []
    own = {name: getattr(torch.linalg, name) for name in ("eigh", "svd")}

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = work(*args, **kwargs)
            took.append(time.perf_counter() - began)
            return result

        return call

    for name, work in own.items():
        setattr(torch.linalg, name, timed(work))
    try:
        yield took
    finally:
        for name, work in own.items():
            setattr(torch.linalg, name, work)


def measure(client: Client) -> Find:
    """Return the median seconds of an epoch, and of every codec's two ways."""
    params, curvature = client.posterior.params, client.posterior.curvature
    state = {k: v.clone() for k, v in client.model.state_dict().items()}
    upload = FisherUpload(params, curvature)
    times: dict[tuple[str, str], list[float]] = {}
    for run in range(RUNS + 1):
        took = {
            ("epoch", "epoch"): seconds(
                lambda: LocalSGD()(client.model, client.loader, CPU, {}), CPU
            )
        }
        client.model.load_state_dict(state)
        for name, asked in TIMED.items():
            codec = resolve(asked, params)
            with decompositions() as inside:
                took[name, "encode"] = seconds(lambda c=codec: upload.to_arrays(c), CPU)
                took[name, "decompositions"] = sum(inside)
            record = upload.to_arrays(codec)
            took[name, "decode"] = seconds(
                lambda r=record, c=codec: FisherUpload.from_arrays(r, params, c), CPU
            )
        if run:  # the first one warms up
            for key, value in took.items():
                times.setdefault(key, []).append(value)
    found: Find = {}
    for (name, what), values in times.items():
        found.setdefault(name, {})[what] = statistics.median(values)
    return found


def time_table(found: Find) -> list[str]:
    """Return the lines of one model's table."""
    epoch = found["epoch"]["epoch"]
    lines = [
        "| codec | packing, ms | unpacking, ms | both, % of an epoch "
        "| eigh and svd, % of packing |",
        "|---|---|---|---|---|",
    ]
    for name in TIMED:
        took = found[name]
        both = 100 * (took["encode"] + took["decode"]) / epoch
        share = 100 * took["decompositions"] / took["encode"]
        shown = f"{both:.1f}" if both < 10 else f"**{both:.1f}: above 10**"
        cells = f"{1e3 * took['encode']:.1f} | {1e3 * took['decode']:.1f} | {shown}"
        lines.append(f"| {name} | {cells} | {share:.0f} |")
    return lines


def plot(test: Sequence[Find], validation: Sequence[Find]) -> None:
    """Draw accuracy against bytes: on the test set, and validation's differences."""
    figure = Figure(figsize=(10, 4.2), dpi=150)
    left, right = figure.subplots(1, 2)
    size = {name: max(split[name]["size"] for split in test) for name in KFAC}
    looks = {PLAIN: ("s", "#222222"), PAPER: ("D", "#2a6f97"), FULL: ("o", "#d1495b")}
    labels = {PLAIN: "uncompressed", PAPER: "the paper's codec", FULL: "packed"}
    for split in test:
        seen = [split[name]["accuracy"] for name in PACKED]
        color = looks[FULL][1]
        left.plot(
            [size[n] for n in PACKED], seen, ".-", color=color, alpha=0.25, lw=0.8
        )
        for name in (PLAIN, PAPER):
            left.plot(
                size[name],
                split[name]["accuracy"],
                ".",
                color=looks[name][1],
                alpha=0.35,
            )
    for name, (marker, color) in looks.items():
        names = list(PACKED) if name == FULL else [name]
        sizes = [size[n] for n in names]
        means = [statistics.mean(s[n]["accuracy"] for s in test) for n in names]
        style = {"color": color, "marker": marker, "label": labels[name]}
        style["ls"] = "-" if name == FULL else ""
        left.plot(sizes, means, **style, zorder=3)
        if name != PLAIN:
            both = [mean_and_error(differences(validation, n)) for n in names]
            loss, errors = zip(*both, strict=True)
            right.errorbar(sizes, loss, errors, **style, capsize=3, zorder=3)
    right.axhline(0, color="#222222", lw=0.8, ls=":")
    left.set_ylabel("test accuracy, %")
    left.set_title("α = 0.1: mean of 3 seeds (light: each)", fontsize="medium")
    right.set_ylabel("points above uncompressed")
    right.set_title(
        f"{len(validation)} validation splits: mean ± s.e.", fontsize="medium"
    )
    for axes, ticks in (
        (left, (0.25, 0.5, 1, 2, 4)),
        (right, (0.25, 0.35, 0.5, 0.75, 1)),
    ):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("size of a reply, FedAvg's = 1")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(RESULTS / "codec.png", bbox_inches="tight")


def main() -> None:
    """Write the tables, the plot and the numbers."""
    data_dir = mnist_folder(__doc__)
    torch.set_num_threads(1)
    kfac = on_test("kfac", KFAC, data_dir)
    plain = on_test("kfac", KFAC, data_dir, **UNREGULARISED)
    diagonal = on_test("diagonal", DIAGONAL, data_dir, solver="closed-form")
    validation = on_validation(data_dir)
    plain_validation = on_validation(data_dir, **UNREGULARISED)
    numbers: dict[str, Any] = {
        "kfac": kfac,
        "kfac-unregularised": plain,
        "validation-unregularised": plain_validation,
        "diagonal": diagonal,
        "validation": validation,
        "seconds": {},
    }
    lines = ["# What packing an upload costs", ""]
    lines += [(__doc__ or "").split("\n", 2)[2].strip("\n"), ""]
    lines += ["## K-FAC, test set", "", *accuracy_table(kfac), ""]
    lines += [*targets(kfac, diagonal, validation), ""]
    lines += ["## K-FAC, validation splits", "", *validation_table(validation), ""]
    lines += ["## The same without regularisation: 60 iterations of CG alone", ""]
    lines += [*accuracy_table(plain), "", *validation_table(plain_validation), ""]
    lines += [_against_paper(plain_validation), ""]
    lines += ["## Diagonal, test set", "", *accuracy_table(diagonal), ""]
    lines += ["## Time", "", f"Measured on {platform.machine()}, torch "]
    lines[-1] += f"{torch.__version__}; the target is less than 10 % of an epoch."
    for title, client in clients(data_dir):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found = measure(client)
            torch.set_num_threads(1)
            many = f"{threads} thread{'s' if threads > 1 else ''}"
            numbers["seconds"][f"{title}, {many}"] = found
            lines += ["", f"{title}, {many}: an epoch of "]
            lines[-1] += f"{client.posterior.num_examples} examples takes "
            lines[-1] += f"{found['epoch']['epoch']:.2f} s."
            lines += ["", *time_table(found)]
            print("\n".join(lines[-8:]), flush=True)
    (RESULTS / "codec.md").write_text("\n".join(lines) + "\n")
    (RESULTS / "codec.json").write_text(json.dumps(numbers, indent=1) + "\n")
    plot(kfac, validation)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
