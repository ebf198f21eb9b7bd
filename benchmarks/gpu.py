"""What a K-FAC and a merge cost on a GPU.

    make gpu                # after the tests that touch a device
    python benchmarks/gpu.py --device cpu     # to try it

The networks, batches and figures are those of `engine.py`, curvlinops among them if it
is installed. Merges are of five clients by the default solver, from factors that are on
the CPU, as they arrive; a *pass* is a forward and a backward pass of the same network
at batch 32 on the same device. Matrices are multiplied in full float32.
"""

import argparse
import importlib.util
import statistics
from functools import partial
from typing import Any

import torch
from engine import PEER, SAMPLED, cases, measure, tables, training
from harness.page import RESULTS, blocks, opening, write_page
from harness.size import sized
from harness.tables import head, row
from harness.timing import medians, peak_bytes
from tasks import make_model

from flwr_fisher.curvature import fisher
from flwr_fisher.merge import LocalPosterior, fedfisher
from flwr_fisher.params import shared_state

MODELS = sized(("lenet", "cnn", "resnet18"), ("lenet",))
CLIENTS, BATCH, SHAPE = 5, 32, (3, 32, 32)


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


def merging(name: str, runs: int, device: torch.device) -> dict[str, float]:
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


def merges(found: dict[str, dict[str, float]]) -> list[str]:
    """Return the table of merges."""
    lines = head("model", "parameters", "seconds", "passes", "GB at the peak")
    for name, each in found.items():
        cells = (f"{each[key]:.2f}" for key in ("seconds", "passes", "peak-gb"))
        lines.append(row(name, f"{each['parameters'] / 1e6:.2f} M", *cells))
    return lines


def main() -> None:
    """Measure merges, and then one network after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=sized("cuda", "cpu"))
    parser.add_argument("--runs", type=int, default=sized(5, 1))
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU that PyTorch can use: try --device cpu")
    torch.backends.cudnn.allow_tf32 = False
    peer = importlib.util.find_spec(PEER) is not None
    found = {name: merging(name, options.runs, device) for name in MODELS}
    engine: dict[str, Any] = {}
    for name, (model, batches) in cases().items():
        engine[name] = measure(model, batches, options.runs, device, peer)
        write(engine, found, device, peer)  # a run that is stopped keeps what it has


def write(
    engine: dict[str, Any],
    found: dict[str, dict[str, float]],
    device: torch.device,
    peer: bool,
) -> None:
    """Write the tables and the numbers of the networks that were measured."""
    card = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU"
    where = f"Measured on {card}, torch {torch.__version__}; medians."
    passes = statistics.fmean(each["seconds"]["pass"] for each in engine.values())
    where += f" A pass over the batches takes {1e3 * passes:.0f} ms on average."
    where += "" if peer else " curvlinops was not installed."
    shown = [where, *tables(engine), "## Merging five clients", merges(found)]
    lines = blocks(opening("On a GPU", __doc__), *shown)
    folder = RESULTS if device.type == "cuda" else RESULTS.parent / "cache"
    write_page("gpu", lines, {"engine": engine, "merges": found}, folder)


if __name__ == "__main__":
    main()
