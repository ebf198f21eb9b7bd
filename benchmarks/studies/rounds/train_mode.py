"""What FAGH's CNN, whose norms FAGH leaves in eval mode, would gain in train mode."""

import random
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from harness.clients import CHOICE, scores
from harness.jobs import kept, quiet
from harness.page import CACHE, blocks
from harness.size import sized
from harness.stats import spread
from harness.tables import head, row
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flwr_fisher.params import shared_state
from flwr_fisher.rounds import FaghMoments, fagh_step
from studies.rounds.methods import FRACTION, RHO
from studies.rounds.runs import CNN, world

# Steps that are tried; in eval mode larger ones diverge after the rounds of the choice.
STEPS = sized(
    {"eval": (0.05, 0.1, 0.2), "train": (0.1, 0.2, 0.5)},
    {"eval": (0.2,), "train": (0.2,)},
)
SEEN = sized((10, 20, 30), (1, 2))  # rounds
CHOOSING, SEEDS = sized(12, 2), CNN.seeds
SECTION = """\
## FAGH's CNN, with its norms in train mode

FAGH (first) by one loop, which asks for each client's gradient and Hessian row with
dropout and its own batch's statistics (`train`), or without dropout and with the
statistics that the model starts with (`eval`, as this library does it). The running
statistics, by which the model is scored, are passed on from client to client. Test
accuracy in per cent after so many rounds; the step is chosen as above, of {steps}."""


def curve(mode: str, step: float, seed: int, rounds: int, data_dir: Path) -> Any:
    """Return FAGH's accuracies, from disk if they are there."""
    path = CACHE / "rounds" / f"train-mode-{mode}-step{step:g}-s{seed}-t{rounds}.json"
    return kept(path, lambda: _curve(mode == "train", step, seed, rounds, data_dir))


def _curve(training: bool, step: float, seed: int, rounds: int, data_dir: Path) -> Any:
    # Those of a run that diverges are 0 from there on.
    here = world(CNN.name, CNN.splits[0], seed, data_dir)
    model = here.make_model()
    moments: FaghMoments | None = None
    draw, found = random.Random(seed), []
    torch.manual_seed(seed)
    for t in range(1, rounds + 1):
        cohort = draw.sample(
            range(len(here.clients)), int(FRACTION * len(here.clients))
        )
        g, v = _means(model.train(training), [here.clients[i] for i in cohort])
        if not all(x.isfinite().all() for x in chain(g.values(), v.values())):
            break
        first = float(next(iter(v.values())).flatten()[0])
        taken = fagh_step(
            shared_state(model), g, v, first, moments, t=t, lr=step * RHO, rho=RHO
        )
        moments = taken.moments
        model.load_state_dict(dict(taken.params), strict=False)
        found.append(100 * scores(model, shared_state(model), here.held)["accuracy"])
    return found + [0.0] * (rounds - len(found))


def _means(
    model: nn.Module, clients: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the clients' mean gradient, and the mean of their Hessians' first row."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    total = sum(len(own.dataset) for own in clients)
    sums = [[torch.zeros_like(p) for p in parameters] for _ in range(2)]
    for own in clients:
        ((x, y),) = own  # its images are one batch
        loss = cross_entropy(model(x), y)
        gradient = torch.autograd.grad(loss, parameters, create_graph=True)
        rows = torch.autograd.grad(gradient[0].flatten()[0], parameters)
        for sum_, made in zip(sums, (gradient, rows), strict=True):
            for whole, part in zip(sum_, made, strict=True):
                whole += len(y) / total * part.detach()
    return [dict(zip(names, each, strict=True)) for each in sums]


def train_mode(data_dir: Path) -> dict[str, Any]:
    """Return each mode's chosen step, and its accuracies on the final seeds."""
    quiet()
    found = {}
    for mode, steps in STEPS.items():
        tried = {
            step: sum(curve(mode, step, CHOICE, CHOOSING, data_dir)) / CHOOSING
            for step in steps
        }
        step = max(tried, key=lambda s: tried[s])
        runs = [curve(mode, step, seed, max(SEEN), data_dir) for seed in SEEDS]
        found[mode] = {"tried": tried, "step": step, "runs": runs}
    return found


def train_mode_section(found: Mapping[str, Any]) -> list[str]:
    """Return the table of both modes."""
    lines = head("mode", "step", *(f"{n} rounds" for n in SEEN))
    for mode, own in found.items():
        cells = (spread([run[n - 1] for run in own["runs"]]) for n in SEEN)
        lines.append(row(f"`{mode}`", f"{own['step']:g}", *cells))
    steps = " and of ".join(
        f"{', '.join(f'{step:g}' for step in own)} (`{mode}`)"
        for mode, own in STEPS.items()
    )
    return blocks(SECTION.format(steps=steps), lines)
