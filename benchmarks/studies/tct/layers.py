"""What the layers of a network trained by FedAvg are worth: TCT's table 1."""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord
from harness.clients import CPU, Shuffled, World, grid_of, scores
from harness.jobs import Numbers, Run, run_cells
from harness.page import blocks
from harness.size import sized
from harness.stats import paired, spread, with_error
from harness.tables import head, row
from torch import Tensor, nn

from flwr_fisher.client import LocalSGD
from flwr_fisher.params import shared_state
from flwr_fisher.wire import arrays_to_tensors
from studies.tct.runs import AVG, Extent, Job, make_strategy, rates_of_fedavg
from studies.tct.splits import BATCH, EVERY, world

PROBED = "FedAvg, its last layers retrained"
RETRAINING = LocalSGD(epochs=sized(20, 1), lr=0.01, momentum=0.9)
STARTS = ("random", AVG)  # what the frozen layers are


def probe(job: Job, data_dir: Path) -> Numbers:
    """Train by FedAvg; return its accuracy, and that after the last layers' training.

    These are trained on all clients' images together, from FedAvg's parameters or from
    those it began with; of each, the first number is of the last layer alone.
    """
    here, epochs = world(job.split, job.seed, data_dir), EVERY[job.split].epochs
    model = here.make_model()
    random = {name: value.clone() for name, value in shared_state(model).items()}
    with tempfile.TemporaryDirectory() as state_dir:
        train = LocalSGD(epochs=epochs, lr=job.lr, momentum=0.0, weight_decay=1e-5)
        grid = grid_of(here.clients, model, train, job.seed, state_dir)
        result = make_strategy(job).start(grid, ArrayRecord(random), job.rounds)
    trained = arrays_to_tensors(result.arrays)
    starts = zip(STARTS, (random, trained), strict=True)
    found: Numbers = {name: list(_retrained(here, params)) for name, params in starts}
    return {"accuracy": scores(model, trained, here.held)["accuracy"], **found}


def _retrained(here: World, params: Mapping[str, Tensor]) -> Iterable[float]:
    x, y = (torch.cat(parts) for parts in zip(*map(_images, here.clients), strict=True))
    layers = len(_layers(here.make_model()))
    for last in range(1, layers):
        model = here.make_model()
        model.load_state_dict(params)
        for layer in _layers(model)[:-last]:
            layer.requires_grad_(False)
        torch.manual_seed(last)
        RETRAINING(model, Shuffled(x, y, BATCH), CPU, {})
        yield scores(model, model.state_dict(), here.held)["accuracy"]


def _images(client: Any) -> tuple[Tensor, Tensor]:
    return client.x, client.y


def _layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if any(True for _ in m.parameters(False))]


def layers(
    extent: Extent, run: Run, accuracy: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Retrain FedAvg's last layers where clients have one class each."""
    rates = rates_of_fedavg(extent, run, ["c1"], accuracy)
    jobs = extent.finals("c1", PROBED, rates["c1"])
    return run_cells({"c1": jobs}, partial(run, federate=probe))


def layers_section(found: Mapping[str, Sequence[Numbers]]) -> list[str]:
    """Return the table of retrained layers."""
    runs = found["c1"]
    own = [100 * run["accuracy"] for run in runs]
    count = len(runs[0][AVG])
    lines = head("layers retrained", *STARTS, f"{AVG} minus random")
    for last in range(count):
        random, trained = (of_layers(runs, start, last) for start in STARTS)
        gain = with_error(paired(trained, random), 1)
        lines.append(
            row(f"{last + 1} of {count + 1}", spread(random), spread(trained), gain)
        )
    return blocks(
        "## What the layers of FedAvg's network are worth",
        f"#C = 1, {AVG} as above, run anew ({spread(own)} %: here its curve moves by "
        "tens of points from round to round). The last layers are trained on all "
        "clients' images together for 20 epochs (rate 0.01, momentum 0.9), the others "
        "stay as FedAvg left them, or as they were at random; test accuracy in per "
        "cent.",
        lines,
    )


def of_layers(runs: Sequence[Numbers], start: str, last: int) -> list[float]:
    """Return accuracies in per cent, the last layers but `last` frozen, one a seed."""
    return [100 * run[start][last] for run in runs]
