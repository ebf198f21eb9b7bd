"""Times: of tangent features, and of a client's round of stage 2."""

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from harness.tables import head, row
from harness.timing import Work, medians, seconds, where
from tasks import make_model
from torch import Tensor, nn

from flwr_fisher.tangent import TangentFeatures, gram_spectrum, tct_steps, tct_update
from studies.tct.runs import FEATURES, STEPS, Extent

ONE, FUNC, OURS = "one backward an example", "torch.func", "TangentFeatures"
# Model, shape and images of a batch.
NETWORKS: dict[str, tuple[str, tuple[int, int, int], int]] = {
    "LeNet5 (`lenet`), 28×28": ("lenet", (1, 28, 28), 500),
    "LeNet5 with biases (`lenet-bias`), 28×28": ("lenet-bias", (1, 28, 28), 500),
    "CNN (`cnn-bias`), 28×28": ("cnn-bias", (1, 28, 28), 200),
    "CNN (`cnn-bias`), 3×32×32": ("cnn-bias", (3, 32, 32), 200),
}


def feature_peers(model: nn.Module, x: Tensor) -> dict[str, Work]:
    """Return three ways to a batch's features, each ready to be called."""
    p = FEATURES
    network = _one_output(model)
    params = dict(network.named_parameters())
    total = sum(v.numel() for v in params.values())
    chosen = torch.randperm(total)[: min(p, total)].sort().values

    def rows() -> Tensor:
        found = x.new_empty(len(x), len(chosen))
        for i, one in enumerate(x.split(1)):
            each = torch.autograd.grad(network(one).sum(), list(params.values()))
            torch.index_select(
                torch.cat([g.flatten() for g in each]), 0, chosen, out=found[i]
            )
        return found

    def output(params: dict[str, Tensor], one: Tensor) -> Tensor:
        made: Tensor = torch.func.functional_call(network, params, (one.unsqueeze(0),))
        return made.sum()

    per_example = torch.func.vmap(torch.func.grad(output), in_dims=(None, 0))

    def vmapped() -> Tensor:
        found, start = x.new_empty(len(x), len(chosen)), 0
        for part in x.split(64):
            each = per_example({k: v.detach() for k, v in params.items()}, part)
            every = torch.cat([g.flatten(1) for g in each.values()], dim=1)
            found[start : start + len(part)] = every[:, chosen]
            start += len(part)
        return found

    features = TangentFeatures(model, p)
    return {ONE: rows, FUNC: vmapped, OURS: lambda: features(x)}


def _one_output(model: nn.Module) -> nn.Module:
    (*_, last) = (name for name, m in model.named_modules() if name)
    old = model.get_submodule(last)
    assert isinstance(old, nn.Linear)
    model.set_submodule(last, nn.Linear(old.in_features, 1, bias=old.bias is not None))
    return model


def features_part(extent: Extent) -> dict[str, Any]:
    """Time features of batches, the three ways in random order."""
    found = {}
    for title, (name, shape, count) in NETWORKS.items():
        torch.manual_seed(0)
        model = make_model(name, shape=shape, num_classes=10)
        peers = feature_peers(model, torch.randn(count, *shape))
        took = medians(peers, extent.repeats, warm_up=1)
        an_image = {peer: time / count for peer, time in took.items()}
        parameters = sum(p.numel() for p in model.parameters())
        sizes = {"images": count, "parameters": parameters}
        found[title] = {**sizes, **an_image, "where": where()}
        print(title, an_image, flush=True)
    return found


def features_section(found: Mapping[str, Any]) -> list[str]:
    """Return the features' times as a table."""
    lines = ["## Features", "", f"{FEATURES} coordinates of every example's gradient."]
    lines += ["Medians over batches, the three ways in random order.", ""]
    lines += head("", "parameters", "images", ONE, FUNC, OURS, "target")
    for title, took in found.items():
        ratios = (
            f"{1e3 * took[peer]:.3f} ms, {took[ONE] / took[peer]:.1f} ×"
            for peer in (FUNC, OURS)
        )
        target = 4 if title.startswith("LeNet") else 1
        met = "met" if took[ONE] / took[OURS] >= target else "**missed**"
        sizes = str(took["parameters"]), str(took["images"])
        slow = f"{1e3 * took[ONE]:.3f} ms"
        lines.append(row(title, *sizes, slow, *ratios, f"≥ {target} ×: {met}"))
    said = "Times are an image's; × is how much faster than the first."
    return [*lines, "", f"{said} {measured_on(found.values())}"]


def measured_on(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a sentence of where the times of rows come from."""
    return f"Measured on {', '.join(dict.fromkeys(took['where'] for took in rows))}."


def closed_form_part(extent: Extent) -> list[dict[str, Any]]:
    """Time a client's round in closed form and step by step."""
    return [closed_form(n, p, repeats) for n, p, repeats in extent.sizes]


def closed_form(n: int, p: int, repeats: int) -> dict[str, Any]:
    """Compare both on random features with a decaying spectrum."""
    Z, Y, weight, h = random_problem(n, p)
    began = time.perf_counter()
    spectrum = gram_spectrum(Z)
    once = time.perf_counter() - began
    lr = min(5 / p, 1 / spectrum.largest)  # TCT's default
    given: dict[str, Any] = {"lr": lr, "local_steps": STEPS}
    ours, theirs = [], []
    update = tct_update(Z, Y, weight, h, spectrum, **given)
    for _ in range(repeats):
        for _ in range(5 * repeats):
            work = seconds(lambda: tct_update(Z, Y, weight, h, spectrum, **given))
            ours.append(work)
        began = time.perf_counter()
        stepped = tct_steps(Z, Y, weight, h, **given)
        theirs.append(time.perf_counter() - began)
    change = (stepped - weight).double().norm()
    found = {
        "n": n,
        "p": p,
        "closed form": statistics.median(ours),
        "steps": statistics.median(theirs),
        "repeats": repeats,
        "spectrum": once,
        "lr times largest": lr * spectrum.largest,
        "difference": float((update - stepped).double().norm() / change),
        "where": where(),
    }
    print(found, flush=True)
    return found


def random_problem(n: int, p: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return standardised features, targets, weights and a control variate."""
    draw = torch.Generator().manual_seed(0)
    Z = torch.randn(n, 50, generator=draw) @ torch.randn(50, p, generator=draw) / 7
    Z = Z.add_(torch.randn(n, p, generator=draw))
    Z = Z.sub_(Z.mean(0)).div_(Z.std(0, correction=0))
    labels = torch.randint(10, (n,), generator=draw)
    Y = torch.nn.functional.one_hot(labels, 10).float() - 0.1
    weight = 1e-4 * torch.randn(p, 10, generator=draw)
    h = 1e-2 * torch.randn(p, 10, generator=draw)
    return Z, Y, weight, h


def closed_form_section(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the closed form's times as a table."""
    lines = ["## A client's round of stage 2", ""]
    lines += [f"{STEPS} full-batch steps, 10 classes, all of them really taken, beside"]
    lines += ["the closed form of the same. The spectrum is computed once a run. The"]
    lines += ["difference is that of the new weights, relative to their change.", ""]
    compared = "ratio (target ≥ 100)", "difference (target ≤ 1e-4)"
    lines += head("n", "p", "steps", "closed form", *compared, "spectrum, once")
    for took in found:
        ratio = took["steps"] / took["closed form"]
        times = f"{took['steps']:.1f} s", f"{took['closed form']:.3f} s"
        compared = f"{ratio:.0f} ×", f"{took['difference']:.1e}"
        once = f"{took['spectrum']:.2f} s"
        lines.append(row(str(took["n"]), str(took["p"]), *times, *compared, once))
    return [*lines, "", measured_on(found)]
