"""What a K-FAC, a merge and a run of Flower cost on a GPU.

    make gpu                # also the counts of accelerator.py, and the device's tests
    python benchmarks/gpu.py --only run       # a part: clients, run, engine or merges
    python benchmarks/gpu.py --device cpu     # to try it; also --device pretended

**Clients.** The networks of `engine.py`, at two batch sizes. A Fisher of few batches
and one of more lie on a line: *a further batch* is its slope, *beside the batches* what
it has at no batch, both in passes, forward and backward, over a batch of that size. The
same line, over that of a local epoch (SGD, batches on the device), says what all images
of a client take. *Sampled* is one label an example, *default* at most three passes. The
lowest of a kind is bold. Beside ours are curvlinops' and nngeometry's K-FAC, where they
are installed, over linear layers and convolutions; of grouped convolutions theirs are
no Fisher's (engine.md has the errors). What a strategy asks for is a part of the images
(docs/costs.md), measured as a whole. TF32 and bfloat16 (autocast) are in passes of the
same precision; all else is in full float32.

**Run.** `flwr run apps/fedfisher`, by Ray, with five clients on one GPU
(`client-resources-num-gpus=0.2`) and on the CPU, by the lines of its log; beside it,
what a client's process and steps take alone. It needs Flower, Ray and a GPU.

**Engine.** The batches and figures of `engine.py`.

**Merges.** Of five clients by the default solver, from factors that are on the CPU, as
they arrive; a *pass* is that of the same network at batch 32.
"""

import argparse
import os
import platform
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerator import pretend
from engine import PEER, SAMPLED, cases, measure, refusals, tables, training
from harness.page import RESULTS, blocks, keep_part, numbers_of, opening, write_page
from harness.size import sized
from harness.tables import head, row
from harness.timing import medians, peak_bytes
from studies.gpu import clients, flower
from tasks import make_model

from flwr_fisher import __version__
from flwr_fisher.curvature import fisher
from flwr_fisher.merge import LocalPosterior, fedfisher
from flwr_fisher.params import shared_state

MODELS = sized(("lenet", "cnn", "resnet18"), ("lenet",))
CLIENTS, BATCH, SHAPE = 5, 32, (3, 32, 32)
Numbers = dict[str, Any]
Jobs = dict[str, Callable[[], Numbers]]


def posteriors(name: str, device: torch.device) -> list[LocalPosterior]:
    """Return clients whose models are a little apart, each with its K-FAC, on the CPU.

    What is measured does not depend on the numbers.
    """
    found = []
    for client in range(CLIENTS):
        torch.manual_seed(0)
        model = make_model(name, shape=SHAPE, num_classes=10)
        torch.manual_seed(1 + client)
        for parameter in model.parameters():
            parameter.data += 0.01 * torch.randn_like(parameter)
        batches = torch.randn(4 * BATCH, *SHAPE, device=device).split(BATCH)
        model.to(device)
        curvature = fisher(model, batches, options=SAMPLED, seed=client)
        there = shared_state(model.cpu())
        found.append(LocalPosterior(there, curvature.to("cpu"), 100.0))
    return found


def merging(name: str, device: torch.device, runs: int) -> Numbers:
    """Return a merge's seconds, gradient passes and peak of memory."""
    clients = posteriors(name, device)
    model = make_model(name, shape=SHAPE, num_classes=10).to(device)
    batch = (
        torch.randn(BATCH, *SHAPE, device=device),
        torch.randint(10, (BATCH,), device=device),
    )
    merge = partial(fedfisher, clients, device=device)
    todo = {"pass": partial(training, model, [batch]), "merge": merge}
    took = medians(todo, runs, 1, device)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": took["merge"],
        "passes": took["merge"] / took["pass"],
        "peak-gb": peak_bytes(merge, device) / 1e9,
    }


def merges(found: Mapping[str, Numbers]) -> list[list[str]]:
    """Return the table of merges."""
    lines = head("model", "parameters", "seconds", "passes", "GB at the peak")
    for name, each in found.items():
        cells = (f"{each[key]:.2f}" for key in ("seconds", "passes", "peak-gb"))
        lines.append(row(name, f"{each['parameters'] / 1e6:.2f} M", *cells))
    return [lines]


SECTIONS: dict[str, tuple[str, Callable[[Any], list[Any]]]] = {
    "clients": ("What a client pays for a Fisher", clients.sections),
    "run": ("`flwr run` with five clients", flower.sections),
    "engine": ("The batches of engine.py", lambda f: [*tables(f), *refusals(f)]),
    "merges": ("Merging five clients", merges),
}


def jobs(part: str, device: torch.device, runs: int) -> Jobs:
    """Return what a part measures, by the names of its cases."""
    if part == "merges":
        return {name: partial(merging, name, device, runs) for name in MODELS}
    if part == "run":
        there = {"CPU": torch.device("cpu")}
        there |= {"GPU": device} if device.type != "cpu" else {}
        return {n: partial(flower.measure, each, runs) for n, each in there.items()}
    networks = cases()
    if part == "engine":
        peer = PEER in clients.PEERS
        return {
            name: partial(measure, model, batches, runs, device, peer)
            for name, (model, batches) in networks.items()
        }
    every = [(size, "") for size in clients.SIZES]
    every += [(clients.SIZES[-1], precision) for precision in clients.PRECISIONS]
    return {
        ", ".join(filter(None, (name, f"batch {size}", precision))): partial(
            clients.measure, model, batches, size, device, runs, precision
        )
        for size, precision in every
        for name, (model, batches) in networks.items()
    }


def without(part: str, only: str | None, device: torch.device) -> str:
    """Return what a part cannot run without, and is not there."""
    if part != "run":
        return ""
    lacking = flower.missing()
    if device.type != "cuda" and (only is None or device.type != "cpu"):
        lacking.append("a GPU")
    return ", ".join(lacking)


def where(device: torch.device, runs: int) -> str:
    """Return what is measured on, and what is not there."""
    card = platform.machine()
    if device.type != "cpu":
        card = torch.get_device_module(device).get_device_name()
    day = datetime.now(UTC).date()
    text = f"Measured on {card}, {os.cpu_count()} cores, torch {torch.__version__}, "
    text += f"flwr-fisher {__version__}, on {day}; medians of {runs} runs."
    absent = [name for name in clients.EVERY if name not in clients.PEERS]
    return f"{text} Not installed: {', '.join(absent)}." if absent else text


def write(folder: Path) -> None:
    """Write the page of all parts that were ever measured."""
    numbers, shown = numbers_of("gpu", folder), list[Any]()
    for part, (title, sections) in SECTIONS.items():
        shown.append(f"## {title}")
        command = f"`python benchmarks/gpu.py --only {part}`"
        if part not in numbers:
            shown.append(f"Owed: no GPU has measured this yet; {command} does.")
            continue
        own = numbers[part]
        shown.append(own["where"])
        if own["left"]:
            shown.append(f"Not measured: {'; '.join(own['left'])}; {command} does.")
        shown += sections(own["found"])
    write_page("gpu", blocks(opening("On a GPU", __doc__), *shown), folder=folder)


def main() -> None:
    """Measure one part after another, and what is left in time of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default=sized("cuda", "cpu"))
    parser.add_argument("--runs", type=int, default=sized(3, 1))
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument("--minutes", type=float, default=60, help="begin nothing later")
    options = parser.parse_args()
    if options.device == "pretended":
        pretend()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU that PyTorch can use: try --device cpu")
    torch.backends.cudnn.allow_tf32 = False
    folder = RESULTS if device.type == "cuda" else RESULTS.parent / "cache"
    ends = time.monotonic() + 60 * options.minutes
    for part in [options.only] if options.only else SECTIONS:
        if lacking := without(part, options.only, device):
            print(f"{part}: left out: without {lacking}", flush=True)
            continue
        todo, found = jobs(part, device, options.runs), dict[str, Numbers]()
        for name, job in todo.items():
            if time.monotonic() > ends:
                print(f"{part}: no time is left for {name} and more", flush=True)
                break
            found[name] = job()
            left = [each for each in todo if each not in found]
            own = {"where": where(device, options.runs), "found": found, "left": left}
            keep_part("gpu", part, own, folder)  # a run that is stopped keeps it
            write(folder)


if __name__ == "__main__":
    main()
