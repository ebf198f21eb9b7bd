"""What packed uploads weigh, and the accuracy that they merge to."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from fedfisher_defaults import columns
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from harness.plots import BEST, INK, MNIST, RUNS, powers_of_two, save, without_frame
from harness.size import sized
from harness.stats import each, paired, spread, standard_error, with_error
from harness.tables import head, row
from harness.uploads import Setting, posteriors
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rivals.paper_codec import pack_as_paper, unpack_as_paper
from tasks import Task

from flwr_fisher.client.training import Loader
from flwr_fisher.merge import LocalPosterior, fedfisher
from flwr_fisher.report import accuracies
from flwr_fisher.wire import (
    LOSSLESS,
    PREFIX,
    Codec,
    FisherUpload,
    resolve,
    serialized_bytes,
    tensors_to_arrays,
)
from flwr_fisher.wire.codec import from_container
from flwr_fisher.wire.layout import FORMAT
from flwr_fisher.wire.quantise import size_of_diagonal

PLAIN, PAPER = "uncompressed", "paper's, 1.0"
PACKED = {f"packed, {budget}": Codec(budget=budget) for budget in (1.0, 0.75, 0.55)}
FULL = "packed, 1.0"
KFAC: dict[str, Codec | None] = {PLAIN: LOSSLESS, **PACKED, PAPER: None}
DIAGONAL = {name: KFAC[name] for name in (PLAIN, FULL, "packed, 0.55", PAPER)}
SEEDS = sized((0, 1, 2), (0, 1))
# How many points below the uncompressed upload are allowed.
TARGETS = {FULL: 0.3, "packed, 0.75": 0.5, "packed, 0.55": 1.5}
Find = dict[str, dict[str, Any]]


def reply_bytes(arrays: ArrayRecord, client: LocalPosterior) -> int:
    """Return what a client's whole reply weighs."""
    metrics = MetricRecord(
        {"num-examples": int(client.num_examples), "train_loss": 0.1}
    )
    return serialized_bytes(RecordDict({"arrays": arrays, "metrics": metrics}))


def pack(client: LocalPosterior, codec: Codec | None) -> ArrayRecord:
    """Return what a client uploads; no codec stands for the paper's."""
    if codec is None:
        return pack_as_paper(client)
    upload = FisherUpload(client.params, client.curvature)
    return upload.to_arrays(resolve(codec, client.params))


def unpack(
    record: ArrayRecord, client: LocalPosterior, codec: Codec | None
) -> LocalPosterior:
    """Return what arrives."""
    if codec is None:
        return unpack_as_paper(record, client)
    chosen = resolve(codec, client.params)
    return FisherUpload.from_arrays(record, client.params, chosen).posterior(
        client.num_examples
    )


def travel(
    client: LocalPosterior, codec: Codec | None
) -> tuple[LocalPosterior, float, tuple[str, str]]:
    """Return what arrives, its size in FedAvg's, and bits of weights and curvature."""
    record = pack(client, codec)
    plain = reply_bytes(tensors_to_arrays(client.params), client)
    return (
        unpack(record, client, codec),
        reply_bytes(record, client) / plain,
        bits_in(record, client, codec),
    )


def bits_in(
    record: ArrayRecord, client: LocalPosterior, codec: Codec | None
) -> tuple[str, str]:
    """Return the bits of weights and of curvature, read from what travels.

    A diagonal's are the mean of its values'.
    """
    if codec == LOSSLESS:
        return "32", "32"
    entries = from_container(record, limit=1 << 30, count=1000)
    if codec is None:  # which says so nowhere: it has no other
        factors = any(key.startswith(f"{PREFIX}kfac") for key in entries)
        return "16", "8" if factors else "16"
    found: tuple[set[float], set[float]] = set(), set()
    diagonal = f"{PREFIX}diagonal/"
    for key, entry in entries.items():
        bits = float(entry[1])  # see wire/quantise.py
        if key.startswith(diagonal):
            count = client.params[key.removeprefix(diagonal)].numel()
            bits = round(8 * (len(entry) - size_of_diagonal(0, 0)) / count, 1)
        if key != FORMAT:
            found[key.startswith(PREFIX)].add(bits)
    weights, curvature = (
        f"{min(bits):g}" if len(bits) == 1 else f"{min(bits):g}-{max(bits):g}"
        for bits in found
    )
    return weights, curvature


def evaluate(
    task: Task,
    clients: Sequence[LocalPosterior],
    loader: Loader,
    codecs: Mapping[str, Codec | None],
    options: Mapping[str, Any],
) -> Find:
    """Return every codec's accuracy in per cent, and what its uploads weigh."""
    found: Find = {}
    merged = {}
    for name, codec in codecs.items():
        arrived, sizes, bits = zip(*(travel(c, codec) for c in clients), strict=True)
        merged[name] = fedfisher(arrived, **options).params
        weights, curvature = (
            " or ".join(sorted({*b})) for b in zip(*bits, strict=True)
        )
        found[name] = {"size": max(sizes), "bits": f"{weights} / {curvature}"}
    for name, value in accuracies(task.make_model(), merged, loader).items():
        found[name]["accuracy"] = 100 * value
    return found


def on_test(
    structure: str, codecs: Mapping[str, Codec | None], data_dir: Path, **options: Any
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
    every = columns()
    for setting in every["MNIST, lenet"] + every["CIFAR-10, cnn"][: sized(2, 0)]:
        task = setting.task(data_dir)
        assert task.validation is not None
        loader = list(task.eval_loader(task.validation))
        found.append(evaluate(task, posteriors(setting, task), loader, KFAC, options))
        print(setting.folder.name, json.dumps(found[-1]), flush=True)
    return found


def percentages(splits: Sequence[Find], name: str) -> list[float]:
    """Return a codec's accuracies, one a split."""
    return [split[name]["accuracy"] for split in splits]


def differences(splits: Sequence[Find], name: str, to: str = PLAIN) -> list[float]:
    """Return a codec's accuracy minus another's, split by split."""
    return paired(percentages(splits, name), percentages(splits, to))


def accuracy_table(splits: Sequence[Find]) -> list[str]:
    """Return a table over the seeds of the test set."""
    titles = "test accuracy, %", "minus uncompressed (each seed)"
    lines = head("codec", "bits, weights / curvature", "size, FedAvg's = 1", *titles)
    for name in splits[0]:
        size = max(split[name]["size"] for split in splits)
        bits = " or ".join(sorted({split[name]["bits"] for split in splits}))
        shown = spread(percentages(splits, name), 2)
        minus = "" if name == PLAIN else each(differences(splits, name), 2)
        lines.append(row(name, bits, f"{size:.3f}", shown, minus))
    return lines


def validation_table(splits: Sequence[Find]) -> list[str]:
    """Return a table of what the validation splits gain or lose."""
    minus = f"minus uncompressed, mean of {len(splits)} ± standard error"
    lines = head("codec", minus, "root mean square", "worst split")
    for name in splits[0]:
        if name != PLAIN:
            values = differences(splits, name)
            typical = math.sqrt(mean(value**2 for value in values))
            rest = f"{typical:.2f}", f"{min(values):+.2f}"
            lines.append(row(name, with_error(values, 2), *rest))
    return lines


def targets(
    test: Sequence[Find], diagonal: Sequence[Find], validation: Sequence[Find]
) -> list[str]:
    """Return a line for each target, reached or missed."""
    rows = []
    for name, allowed in TARGETS.items():
        found = mean(differences(test, name))
        bits = test[0][name]["bits"].split(" / ")[0]
        target = f"{name} (weights: {bits} bits) at most {allowed} points below"
        rows.append((f"{target} uncompressed", f"{found:+.2f}", found >= -allowed))
    gains = differences(test, FULL, PAPER)
    rows.append((f"{FULL} above the paper's codec", each(gains, 2), mean(gains) > 0))
    most = most_spent((*test, *diagonal, *validation))
    shown = f"{most:.3f} of it at most"
    rows.append(("every reply within its budget", shown, most <= 1))
    lines = head("target, means over seeds", "found", "")
    for target, found, reached in rows:
        lines.append(row(target, found, "reached" if reached else "**missed**"))
    return lines


def most_spent(splits: Sequence[Find]) -> float:
    """Return the largest reply's share of its budget."""
    return max(
        split[name]["size"] / (codec.budget if codec and codec.budget else 1.0)
        for split in splits
        for name, codec in KFAC.items()
        if name in split and name != PLAIN
    )


def against_paper(validation: Sequence[Find]) -> str:
    """Return how the full budget compares with the paper's codec."""
    gains = differences(validation, FULL, PAPER)
    noise = abs(mean(gains)) < 2 * standard_error(gains)
    told = (
        "less than two standard errors: within noise"
        if noise
        else ("more than two standard errors")
    )
    return (
        f"On the validation splits, {FULL} minus the paper's codec is "
        f"{with_error(gains, 2)} points (standard error), {told}."
    )


LOOKS = {PLAIN: ("s", INK), PAPER: ("D", RUNS[1]), FULL: ("o", BEST)}
LABELS = {PLAIN: "uncompressed", PAPER: "the paper's codec", FULL: "packed"}
# The codecs of each line: packed ones are on one.
LINES = {PLAIN: [PLAIN], PAPER: [PAPER], FULL: list(PACKED)}


def plot(test: Sequence[Find], validation: Sequence[Find], path: Path) -> None:
    """Draw accuracy against bytes: on the test set, and validation's differences."""
    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    size = {name: max(split[name]["size"] for split in test) for name in KFAC}
    _on_test(left, test, size)
    _on_validation(right, validation, size)
    powers_of_two(left, (0.25, 0.5, 1, 2, 4))
    powers_of_two(right, (0.25, 0.35, 0.5, 0.75, 1))
    for axes in (left, right):
        axes.set_xlabel("size of a reply, FedAvg's = 1")
        without_frame(axes)
        axes.legend(frameon=False, fontsize="small")
    save(figure, path, f"Five clients. Left: {MNIST}")


def _on_test(axes: Axes, test: Sequence[Find], size: Mapping[str, float]) -> None:
    """Draw each seed's accuracies, and over them their means."""
    for split in test:
        seen = [split[name]["accuracy"] for name in PACKED]
        color = LOOKS[FULL][1]
        axes.plot(
            [size[n] for n in PACKED], seen, ".-", color=color, alpha=0.25, lw=0.8
        )
        for name in (PLAIN, PAPER):
            found, color = split[name]["accuracy"], LOOKS[name][1]
            axes.plot(size[name], found, ".", color=color, alpha=0.35)
    for name, names in LINES.items():
        means = [mean(percentages(test, n)) for n in names]
        axes.plot([size[n] for n in names], means, **_style(name), zorder=3)
    axes.set_ylabel("test accuracy, %")
    axes.set_title("α = 0.1: mean of 3 seeds (light: each)", fontsize="medium")


def _on_validation(
    axes: Axes, validation: Sequence[Find], size: Mapping[str, float]
) -> None:
    """Draw the mean differences to the uncompressed uploads."""
    for name in (PAPER, FULL):
        values = [differences(validation, n) for n in LINES[name]]
        loss = [mean(v) for v in values]
        errors = [standard_error(v) for v in values]
        sizes = [size[n] for n in LINES[name]]
        axes.errorbar(sizes, loss, errors, **_style(name), capsize=3, zorder=3)
    axes.axhline(0, color=INK, lw=0.8, ls=":")
    axes.set_ylabel("points above uncompressed")
    title = f"MNIST and CIFAR-10: mean ± s.e. of {len(validation)} validation splits"
    axes.set_title(title, fontsize="medium")


def _style(name: str) -> dict[str, str]:
    marker, color = LOOKS[name]
    dashes = "-" if name == FULL else ""
    return {"color": color, "marker": marker, "label": LABELS[name], "ls": dashes}
