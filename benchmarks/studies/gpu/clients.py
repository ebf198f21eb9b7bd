"""What a Fisher costs a client: for each further batch, once, and as a whole."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from engine import KINDS, OURS, PEER, Batches, refusal, theirs, training
from harness.size import sized
from harness.tables import head, row
from harness.timing import medians
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from flwr_fisher.curvature import FisherOptions, fisher

FEW, MANY = 1, sized(4, 2)  # batches
SIZES = sized((32, 256), (4, 8))
SMALL, LARGE = sized((500, 20_000), (16, 32))  # images
PRECISIONS = "TF32", "bfloat16"  # beside float32
MOST_PASSES, MOST_EPOCHS = 4.0, 1.0
OWN = ("default", "sampled", "all classes")  # of engine.py's
Numbers = dict[str, Any]


def computed(
    precision: str,
    device: torch.device,
    work: Callable[[Batches], object],
    batches: Batches,
) -> None:
    """Work in float32, in TF32, or in bfloat16 where autocast does."""
    of_matrices, of_cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = of_matrices.allow_tf32, of_cudnn.allow_tf32
    of_matrices.allow_tf32 = of_cudnn.allow_tf32 = precision == "TF32"
    half = precision == "bfloat16"
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            work(batches)
    finally:
        of_matrices.allow_tf32, of_cudnn.allow_tf32 = before


def geometry(model: nn.Module, batches: Batches) -> Any:
    """Return nngeometry's K-FAC of one label, of linear and convolution layers."""
    from nngeometry.layercollection import LayerCollection
    from nngeometry.metrics import FIM_MonteCarlo
    from nngeometry.object import PMatKFAC

    layers = LayerCollection()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            layers.add_layer_from_model(model, module)
    data = TensorDataset(*(torch.cat(part) for part in zip(*batches, strict=True)))
    order = BatchSampler(SequentialSampler(data), len(batches[0][1]), drop_last=False)
    loader = DataLoader(data, sampler=order, batch_size=None)
    device = batches[0][0].device
    own = {"layer_collection": layers, "device": device}
    return FIM_MonteCarlo(model, loader, PMatKFAC, **own)


Take = Callable[[nn.Module, Batches], object]
EVERY: dict[str, dict[str, Take]] = {
    PEER: {kind: partial(theirs, kind=own) for kind, own in KINDS.items()},
    "nngeometry": {"sampled": geometry},
}
PEERS = {name: takes for name, takes in EVERY.items() if find_spec(name) is not None}


def epoch(model: nn.Module, batches: Batches) -> None:
    """Train on each batch once, at a rate of zero."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for batch in batches:
        optimizer.zero_grad()
        training(model, [batch])
        optimizer.step()


def images(like: Batches, size: int, count: int, device: torch.device) -> Batches:
    """Return so many random images in batches of a size."""
    x = torch.randn(count, *like[0][0].shape[1:], device=device)
    y = torch.randint(10, (count,), device=device)
    return list(zip(x.split(size), y.split(size), strict=True))


def measure(
    model: nn.Module,
    like: Batches,
    size: int,
    device: torch.device,
    runs: int,
    precision: str = "",
) -> Numbers:
    """Return what everything takes at a batch size: once, and for each batch.

    In another precision than float32, ours alone, and no client as a whole.
    """
    model.to(device)
    batches = images(like, size, MANY * size, device)
    work: dict[str, Callable[[Batches], object]] = {
        "pass": partial(training, model),
        "epoch": partial(epoch, model),
    }
    for name in OWN:
        structure, options = OURS[name]
        work[f"ours, {name}"] = partial(
            fisher, model, structure=structure, options=options
        )
    refused = {}
    for peer, takes in () if precision else PEERS.items():
        reason = refusal(takes["sampled"], model, batches)
        if reason is not None:
            refused[peer] = reason
            continue
        work |= {f"{peer}, {kind}": partial(takes[kind], model) for kind in takes}
    todo = {
        f"{count} {name}": partial(computed, precision, device, each, batches[:count])
        for name, each in work.items()
        for count in (FEW, MANY)
    }
    took = medians(todo, runs, 1, device)
    found: Numbers = {"batch": size, "refused": refused, "seconds": {}}
    for name in work:
        few, many = took[f"{FEW} {name}"], took[f"{MANY} {name}"]
        each = (many - few) / (MANY - FEW)
        found["seconds"][name] = {"once": few - FEW * each, "a-batch": each}
    if not precision:
        found["asked"] = asked(model, like, size, device, runs)
    model.zero_grad()
    return found


def asked(
    model: nn.Module, like: Batches, size: int, device: torch.device, runs: int
) -> dict[str, float]:
    """Return the seconds of what a strategy asks clients for, and of packing it."""
    todo: dict[str, Callable[[], object]] = {}
    for count in (SMALL, LARGE):
        batches = images(like, size, count, device)
        options = FisherOptions()
        todo[str(count)] = partial(
            fisher, model, batches, options=options, num_examples=count
        )
    if find_spec("flwr") is not None:
        from client import packing

        todo["packing"] = packing(model, images(like, size, 64, device))
    return medians(todo, runs, 1, device)


def of_all(case: Numbers, name: str, count: int) -> float:
    """Return the seconds for so many images, by the line through what was measured."""
    seconds: dict[str, float] = case["seconds"][name]
    return seconds["once"] + math.ceil(count / case["batch"]) * seconds["a-batch"]


def a_batch(case: Numbers, name: str) -> float:
    """Return the gradient passes that a further batch takes."""
    return float(case["seconds"][name]["a-batch"] / case["seconds"]["pass"]["a-batch"])


def once(case: Numbers, name: str) -> float:
    """Return the gradient passes that are beside the batches."""
    return float(case["seconds"][name]["once"] / case["seconds"]["pass"]["a-batch"])


def epochs(case: Numbers, name: str, count: int) -> float:
    """Return the local epochs that a client pays for all of its images."""
    return of_all(case, name, count) / of_all(case, "epoch", count)


def asked_epochs(case: Numbers, count: int) -> float:
    """Return the local epochs that it pays for what a strategy asks for, packed."""
    took = case["asked"][str(count)] + case["asked"].get("packing", 0.0)
    return float(took / of_all(case, "epoch", count))


def _table(
    cases: Mapping[str, Numbers], figure: Callable[[Numbers, str], float]
) -> list[str]:
    """Return a figure of each case and Fisher; the lowest of each kind is bold."""
    sides = "ours", *EVERY
    names = [f"{side}, {kind}" for kind in OWN for side in sides]
    names = [n for n in names if any(n in case["seconds"] for case in cases.values())]
    lines = head("", *names)
    for title, case in cases.items():
        values = {n: figure(case, n) for n in names if n in case["seconds"]}
        cells = []
        for name in names:
            kind = name.partition(", ")[2]
            rivals = [values[n] for n in values if n.endswith(f", {kind}")]
            text = f"{values[name]:.1f}" if name in values else ""
            best = len(rivals) > 1 and values.get(name) == min(rivals)
            cells.append(f"**{text}**" if best else text)
        lines.append(row(title, *cells))
    return lines


def _wanted(cases: Mapping[str, Numbers]) -> list[str]:
    """Return what is wanted, in how many cases it holds, and where it does not."""
    figures: dict[str, Callable[[Numbers, str], float]] = {
        "a further batch": a_batch,
        f"{SMALL} images": partial(epochs, count=SMALL),
        f"{LARGE} images": partial(epochs, count=LARGE),
    }
    held: dict[str, dict[str, bool]] = {}
    for kind in KINDS:
        for title, figure in figures.items():
            held[f"ahead of {PEER}: {kind}, {title}"] = {
                name: figure(case, f"ours, {kind}") < figure(case, f"{PEER}, {kind}")
                for name, case in cases.items()
                if f"{PEER}, {kind}" in case["seconds"]
            }
    held[f"default: a further batch in at most {MOST_PASSES:g} passes"] = {
        name: a_batch(case, "ours, default") <= MOST_PASSES
        for name, case in cases.items()
    }
    held[f"{SMALL} images: all that is asked for in {MOST_EPOCHS:g} local epoch"] = {
        name: asked_epochs(case, SMALL) <= MOST_EPOCHS for name, case in cases.items()
    }
    lines = head("wanted", "holds in", "not in")
    for title, each in held.items():
        missed = "; ".join(name for name, holds in each.items() if not holds)
        lines.append(row(title, f"{sum(each.values())} of {len(each)}", missed))
    return lines


def _asked_table(cases: Mapping[str, Numbers]) -> list[str]:
    lines = head("", "images", "epoch, s", "Fisher", "with packing")
    for title, case in cases.items():
        for count in (SMALL, LARGE):
            whole = of_all(case, "epoch", count)
            packed = asked_epochs(case, count) if "packing" in case["asked"] else None
            cells = (
                str(count),
                f"{whole:.2f}",
                f"{case['asked'][str(count)] / whole:.2f}",
                "" if packed is None else f"{packed:.2f}",
            )
            lines.append(row(title, *cells))
    return lines


def _precisions(cases: Mapping[str, Numbers]) -> list[str]:
    own = [f"ours, {name}" for name in OWN]
    lines = head("", "pass, ms", *own)
    for title, case in cases.items():
        cells = (f"{a_batch(case, name):.1f}" for name in own)
        took = f"{1e3 * case['seconds']['pass']['a-batch']:.2f}"
        lines.append(row(title, took, *cells))
    return lines


def sections(found: Mapping[str, Numbers]) -> list[str | list[str]]:
    """Return the tables."""
    cases = {n: case for n, case in found.items() if "asked" in case}
    large = {n: case for n, case in found.items() if case["batch"] == SIZES[-1]}
    shown: list[str | list[str]] = ["### What is wanted", _wanted(cases)]
    shown += ["### A further batch, in gradient passes", _table(cases, a_batch)]
    shown += ["### Beside the batches, in gradient passes", _table(cases, once)]
    for count in (SMALL, LARGE):
        shown.append(f"### All of {count} images, in local epochs")
        shown.append(_table(cases, partial(epochs, count=count)))
    shown.append("### What a strategy asks for, in local epochs")
    shown.append(_asked_table(cases))
    shown.append("### In other precisions")
    shown.append(_precisions(dict(sorted(large.items()))))
    refused = (
        f"{peer} does not take {title.partition(',')[0]}: {reason}"
        for title, case in cases.items()
        for peer, reason in case["refused"].items()
    )
    return [*shown, *dict.fromkeys(refused)]
