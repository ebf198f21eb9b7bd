"""What merging costs as models and the number of clients grow: time and memory.

    python benchmarks/merge_size.py

`--only codec`, `parameters` or `clients` runs a part. Images are generated, of
CIFAR-10's shape; models train for 30 steps, and their K-FAC is that of 256 examples
with one sampled label: what is measured does not depend on what the numbers are. Of
more than three clients the others are these with noise added to the parameters. Uploads
are packed to FedAvg's size, and merged by the default solver.

A *pass* is one forward and backward pass of the same network at batch 32, timed before
and after. Each merge has a process of its own; its peak is the kernel's high-water mark
of resident memory, set to zero when the merge begins. One that takes less than half a
minute is repeated, up to seven times; its seconds are the median. Everything runs on
two threads.
"""

from functools import partial
from pathlib import Path
from typing import Any

from harness.alone import alone
from harness.page import Page, opening
from harness.plots import LINES, RUNS, dress, save
from harness.size import sized
from harness.tables import head, row
from matplotlib.figure import Figure
from studies.size.measure import codec, merging

MODELS = sized(("lenet", "cnn", "resnet18"), ("lenet",))
FIVE = 5
COUNTS = sized(
    {"lenet": (10, 30, 100, 300, 1000), "resnet18": (5, 20, 100)}, {"lenet": (5,)}
)


def codec_section(found: dict[str, Any]) -> list[str]:
    """Return the table of what packing takes."""
    lines = ["## Packing and unpacking one upload", ""]
    lines += head("model", "pack, passes", "unpack, passes", "a pass, ms")
    for name, took in found.items():
        cells = (f"{took[key] / took['pass']:.1f}" for key in ("pack", "unpack"))
        lines.append(row(name, *cells, f"{1e3 * took['pass']:.0f}"))
    return lines


def merges_section(title: str, found: dict[str, Any]) -> list[str]:
    """Return the table of merges."""
    lines = [f"## {title}", ""]
    names = ("model", "parameters", "clients", "seconds", "passes", "GB before")
    lines += head(*names, "GB at the peak", "above")
    for merges in found.values():
        for m in merges:
            lines.append(
                row(
                    m["model"],
                    f"{m['parameters'] / 1e6:.2f} M",
                    f"{m['clients']:.0f}",
                    f"{m['seconds']:.2f}",
                    f"{m['passes']:.1f}",
                    f"{m['uploads-gb']:.2f}",
                    f"{m['peak-gb']:.2f}",
                    f"{m['above-gb']:.2f}",
                )
            )
    return lines


def plot(x: str, stem: str, found: dict[str, Any], folder: Path) -> None:
    """Draw seconds and the peak of memory against clients or parameters."""
    figure = Figure(figsize=(8, 3.4), dpi=150, layout="constrained")
    for index, (y, title) in enumerate(
        (("seconds", "seconds of the merge"), ("peak-gb", "GB at its peak")), start=1
    ):
        axes = figure.add_subplot(1, 2, index)
        looks = zip(found.items(), RUNS, LINES, strict=False)
        for (name, merges), color, line in looks:
            places, values = ([m[key] for m in merges] for key in (x, y))
            axes.plot(places, values, line, marker=".", color=color, label=name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        dress(axes, x, title)
        axes.legend()
    save(figure, folder / f"{stem}.png", "Generated images of CIFAR-10's shape")


PAGE = Page(
    name="merge_size",
    opening=opening("Merging models of the size people have", __doc__),
    sections={
        "codec": codec_section,
        "parameters": partial(merges_section, "Five clients, unpacked before"),
        "clients": partial(merges_section, "More clients, unpacked layer by layer"),
    },
    plots={
        "parameters": partial(plot, "parameters", "merge_size_parameters"),
        "clients": partial(plot, "clients", "merge_size_clients"),
    },
)


def main() -> None:
    """Run what is asked for, and write the page of all that was ever run."""
    for name in PAGE.asked(PAGE.command_line(__doc__).parse_args()):
        found: dict[str, Any]
        if name == "codec":
            found = {model: alone(codec, model) for model in MODELS}
        elif name == "parameters":
            merges = {m: [merging(m, FIVE, True)] for m in MODELS}
            found = {"five clients": [m for values in merges.values() for m in values]}
        else:
            found = {
                model: [merging(model, count, False) for count in counts]
                for model, counts in COUNTS.items()
            }
        PAGE.keep(name, found)
    PAGE.write()


if __name__ == "__main__":
    main()
