"""What a probe costs a client, and the Hessian that a rank of one cannot follow."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness.clients import CHOICE
from harness.jobs import quiet
from harness.page import blocks
from harness.size import sized
from harness.tables import head, row
from harness.timing import medians

from flwr_fisher.curvature import gradient, gradient_and_hvp, hvp
from flwr_fisher.params import flatten, unflatten
from studies.rounds.runs import PARTS, world

ROUNDS_SEEN, EIGENVALUES, PROBED = (0, 5, 10, 30), 12, sized(8000, 200)


def client_cost(data_dir: Path, repeats: int) -> dict[str, Any]:
    """Time a client's gradient, alone and with a probe, in random order."""
    quiet()
    found = {}
    for part in PARTS.values():
        here = world(part.name, "shards", 0, data_dir)
        model, loader = here.task.make_model(), here.clients[0]
        parameters = dict(model.named_parameters())
        probe = {k: torch.randn_like(p) for k, p in parameters.items()}
        todo = {
            "gradient": lambda m=model, b=loader: gradient(m, b),
            "first": lambda m=model, b=loader: gradient_and_hvp(m, b, "first"),
            "random": lambda m=model, b=loader, u=probe: gradient_and_hvp(m, b, u),
        }
        took = medians(todo, repeats, warm_up=5)
        found[part.title] = {"images": len(loader.dataset), **took}
    return found


def cost_section(found: Mapping[str, Any]) -> list[str]:
    """Return the client's cost as a table."""
    lines = head("", "images", "gradient", "and `first`", "and `random` or `momentum`")
    for title, took in found.items():
        cells = [f"{1e3 * took['gradient']:.2f} ms"]
        cells += [f"{took[k] / took['gradient']:.2f} ×" for k in ("first", "random")]
        lines.append(row(title, str(took["images"]), *cells))
    about = "Medians on one thread, in random order; a client's whole data."
    return blocks("## The client's cost", about, lines)


def spectra(data_dir: Path) -> dict[str, list[float]]:
    """Return the largest eigenvalues of MLR's Hessian on the way of gradient descent.

    By subspace iteration, on some of all clients' images.
    """
    torch.manual_seed(0)
    here = world("mlr", "dirichlet-class", CHOICE, data_dir)
    x, y = (torch.cat([getattr(c, name) for c in here.clients]) for name in "xy")
    chosen = torch.randperm(len(y))[:PROBED]
    model, loader = here.task.make_model(), [(x[chosen], y[chosen])]
    shapes = {name: p.shape for name, p in model.named_parameters()}
    found = {}
    for server_round in range(max(ROUNDS_SEEN) + 1):
        if server_round in ROUNDS_SEEN:
            found[str(server_round)] = _eigenvalues(model, loader, shapes)
        slope, _ = gradient(model, loader)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 0.1 * slope[name]
    return found


def _eigenvalues(model: torch.nn.Module, loader: Any, shapes: Any) -> list[float]:
    size = sum(shape.numel() for shape in shapes.values())
    basis = torch.linalg.qr(torch.randn(size, EIGENVALUES)).Q
    for _ in range(15):
        columns = [unflatten(column, shapes) for column in basis.T]
        moved = torch.stack([flatten(hvp(model, loader, c)) for c in columns], dim=1)
        small = basis.T @ moved
        basis = torch.linalg.qr(moved).Q
    values: list[float] = torch.linalg.eigvalsh((small + small.T) / 2).tolist()
    return values[::-1]


def spectrum_section(found: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the eigenvalues as a table."""
    lines = ["## The Hessian of multinomial logistic regression", ""]
    lines += [f"Its {EIGENVALUES} largest eigenvalues, on {PROBED} images of all"]
    lines += ["clients, along gradient descent with the rate 0.1.", ""]
    lines += head("step", "")
    for step, values in found.items():
        lines.append(row(step, ", ".join(f"{v:.1f}" for v in values)))
    return lines
