"""What a Fisher costs, in local epochs, beside nngeometry in the same run.

    python benchmarks/curvature.py --data-dir DIR   # DIR/MNIST/raw has the files

Each model is trained for 5 epochs first, since a trained model is what a client has.
Every figure is a median over runs that take turns. An epoch is the client's own loop
(`LocalSGD`, batch 64) over the same examples; its time an example is given, so that a
slow loop flatters nobody. The CNN sees generated images of CIFAR-10's shape.
"""

import platform
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness.page import RESULTS, blocks, command_line, opening, write_page
from harness.plots import save, without_frame
from harness.size import sized
from harness.tables import head, row
from harness.timing import peak_bytes, seconds
from matplotlib.figure import Figure
from tasks import load_dataset, make_model
from torch import Tensor, nn

from flwr_fisher.client.training import LocalSGD
from flwr_fisher.curvature import TOLERANCE, fisher
from flwr_fisher.params import flatten

BOTH = ("kfac", "diagonal")
EXACT: dict[str, Any] = {"tolerance": 0.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "nngeometry, kfac": {"structure": "kfac", "engine": "nngeometry"},
    "nngeometry, diagonal": {"structure": "diagonal", "engine": "nngeometry"},
    "kfac, all classes": {"structure": "kfac", **EXACT},
    "diagonal, all classes": {"structure": "diagonal", **EXACT},
    "both, all classes": {"structure": BOTH, **EXACT},
    "kfac": {"structure": "kfac"},
    "diagonal": {"structure": "diagonal"},
    "both": {"structure": BOTH},
    "both, sampled": {"structure": BOTH, "expectation": "sampled"},
    "both, empirical": {"structure": BOTH, "expectation": "empirical"},
    "diagonal, empirical-batch": {
        "structure": "diagonal",
        "expectation": "empirical-batch",
    },
    "ekfac": {"structure": "ekfac"},
}


@dataclass
class Batches:
    """A loader over tensors that are in memory already."""

    x: Tensor
    y: Tensor
    size: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.x.split(self.size), self.y.split(self.size), strict=True)


def cases(data_dir: Path, device: torch.device) -> dict[str, tuple[nn.Module, Batches]]:
    """Return the trained models with their examples."""
    found = {}
    if (data_dir / "MNIST").exists():
        data = load_dataset("mnist", data_dir).train
        x, y = data[list(range(len(data)))]
        model = make_model("lenet", shape=(1, 28, 28), num_classes=10)
        found["LeNet, MNIST"] = _trained(model, x, y, device, sized(4096, 128))
    else:
        print(f"MNIST is not in {data_dir}: LeNet is skipped")
    x, y = generated(sized(4096, 256))
    model = make_model("cnn", shape=(3, 32, 32), num_classes=10)
    found["CNN, CIFAR-10's shape"] = _trained(model, x, y, device, sized(512, 64))
    return found


def generated(count: int) -> tuple[Tensor, Tensor]:
    """Return images of CIFAR-10's shape, noise around a mean a class, with labels."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(10, (count,), generator=generator)
    means = torch.randn(10, 3, 32, 32, generator=generator)
    return 0.5 * means[y] + torch.randn(count, 3, 32, 32, generator=generator), y


def _trained(
    model: nn.Module, x: Tensor, y: Tensor, device: torch.device, some: int
) -> tuple[nn.Module, Batches]:
    """Train for 5 epochs on everything; return the first examples to measure on."""
    torch.manual_seed(0)
    x, y, model = x.to(device), y.to(device), model.to(device)
    metrics = LocalSGD(epochs=5)(model, Batches(x, y, 64), device, {})
    print(f"trained: loss {metrics['train_loss']:.3f}", flush=True)
    return model, Batches(x[:some].clone(), y[:some].clone(), 64)


def measure(
    model: nn.Module, batches: Batches, size: int, runs: int, device: torch.device
) -> dict[str, float]:
    """Return the median seconds of an epoch and of every variant."""
    loader = Batches(batches.x, batches.y, size)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    times: dict[str, list[float]] = {}
    for run in range(runs + 1):
        took = {
            "epoch": seconds(lambda: LocalSGD()(model, batches, device, {}), device)
        }
        model.load_state_dict(state)
        for name, how in VARIANTS.items():
            took[name] = seconds(lambda how=how: fisher(model, loader, **how), device)
        if run:  # the first one warms up
            for name, value in took.items():
                times.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in times.items()}


def error(model: nn.Module, batches: Batches) -> dict[str, float]:
    """Return the default tolerance's relative Frobenius errors."""
    exact = fisher(model, batches, structure=BOTH, tolerance=0)
    close = fisher(model, batches, structure=BOTH)
    found = {}
    for name, want, got in zip(BOTH, exact, close, strict=True):
        if name == "diagonal":
            a, b = flatten(want.diagonal()), flatten(got.diagonal())
            found[name] = float((a - b).norm() / a.norm())
        else:
            pairs = zip(want.blocks(), got.blocks(), strict=True)
            each = [float((a.G - b.G).norm() / a.G.norm()) for a, b in pairs]  # type: ignore[attr-defined]
            found[f"{name}, worst layer"] = max(each)
    return found


def memory(model: nn.Module, batches: Batches, size: int) -> dict[str, int]:
    """Return the peaks of a training step and of the fused pass, on one batch."""
    one = Batches(batches.x[:size], batches.y[:size], size)
    step = LocalSGD(lr=0.0)
    device = batches.x.device
    return {
        "training step": peak_bytes(lambda: step(model, one, device, {})),
        "both, all classes": peak_bytes(
            lambda: fisher(model, one, structure=BOTH, **EXACT)
        ),
        "both": peak_bytes(lambda: fisher(model, one, structure=BOTH)),
    }


def table(times: dict[str, float], examples: int) -> list[str]:
    """Return the lines of one setting's table."""
    epoch = times["epoch"]
    peer = {
        "kfac": times["nngeometry, kfac"],
        "diagonal": times["nngeometry, diagonal"],
        "both": times["nngeometry, kfac"] + times["nngeometry, diagonal"],
    }
    lines = [
        f"One epoch: {1e6 * epoch / examples:.0f} µs an example.",
        "",
        *head("", "local epochs", "times faster than nngeometry"),
    ]
    for name in VARIANTS:
        ratio = peer.get(name.split(",")[0])
        faster = "" if ratio is None else f"{ratio / times[name]:.1f}"
        lines.append(row(name, f"{times[name] / epoch:.2f}", faster))
    return lines


def measure_all(data_dir: Path, runs: int, device: torch.device) -> dict[str, Any]:
    """Return every model's times, memory and errors."""
    numbers: dict[str, Any] = {}
    for case, (model, batches) in cases(data_dir, device).items():
        for size in (64, 512):
            found = {"seconds": measure(model, batches, size, runs, device)}
            found["examples"] = len(batches.x)
            if device.type == "cpu":
                found["peak_bytes"] = memory(model, batches, size)
            numbers[f"{case}, batch {size}"] = found
            print(f"{case}, batch {size}", found, flush=True)
        numbers[f"{case}, error"] = error(model, Batches(batches.x, batches.y, 512))
    return numbers


def page(numbers: Mapping[str, Any], where: str, runs: int) -> list[str]:
    """Return the page's lines."""
    shown: list[str | list[str]] = [
        opening("What a Fisher costs", __doc__),
        f"Measured on {where}; median of {runs} runs. The default tolerance is "
        f'{TOLERANCE:g}; "both" is K-FAC and the diagonal at once.',
    ]
    for title, found in numbers.items():
        if "seconds" not in found:
            errors = ", ".join(f"{k} {v:.1e}" for k, v in found.items())
            shown += [f"Relative error of the default tolerance: {errors}."]
            continue
        shown += [f"## {title}", table(found["seconds"], found["examples"])]
        if peaks := found.get("peak_bytes"):
            ratios = {k: v / peaks["training step"] for k, v in peaks.items()}
            each = ", ".join(f"{k} {v:.2f}" for k, v in ratios.items())
            shown += [f"Peak memory, in a training step's on the same batch: {each}."]
    return blocks(*shown)


def main() -> None:
    """Write the tables, the plot and the numbers."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=int, default=sized(5, 1))
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    device, torch_is = torch.device(options.device), f"torch {torch.__version__}"
    where = f"{platform.machine()}, {torch.get_num_threads()} threads, {torch_is}"
    if device.type == "cuda":
        where = f"{torch.cuda.get_device_name()}, {torch_is}"
    numbers = measure_all(options.data_dir, options.runs, device)
    name = "curvature" if device.type == "cpu" else f"curvature_{device.type}"
    write_page(name, page(numbers, where, options.runs), numbers)
    plot(numbers, RESULTS / f"{name}.png")


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Draw every variant's cost in local epochs."""
    shown = {title: found for title, found in numbers.items() if "seconds" in found}
    figure = Figure(figsize=(10, 1.2 + 2.6 * ((len(shown) + 1) // 2)), dpi=150)
    for index, (title, found) in enumerate(shown.items(), start=1):
        axes = figure.add_subplot((len(shown) + 1) // 2, 2, index)
        times = found["seconds"]
        values = [times[name] / times["epoch"] for name in VARIANTS]
        colors = ["#9aa5b1" if "nngeometry" in name else "#d1495b" for name in VARIANTS]
        bars = axes.barh(list(VARIANTS), values, color=colors, height=0.7)
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize="small")
        axes.invert_yaxis()
        axes.set_title(title, fontsize="medium")
        axes.tick_params(labelsize="small")
        without_frame(axes)
        axes.set_xlabel("local epochs")
    figure.tight_layout()
    save(figure, path)


if __name__ == "__main__":
    main()
