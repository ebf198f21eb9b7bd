"""What differential privacy of the sums costs: accuracy against epsilon.

    python benchmarks/privacy.py --data-dir DIR

MNIST over 100 clients of some 600 images (``dirichlet-client``, alpha = 0.5), LeNet,
ten epochs of SGD, one round; three seeds. What is protected is a client with all that
it has, delta = 0.001. One round of FedAvg (`FedAvg(privacy=...)`) and of
FedFisher with diagonals, from noisy sums (`rivals/private_sums.py`), on
the same clients; every client counts once. Noise is that of a sum without shares; with
secure sums and `honest=0.5` its variance is twice that. For each epsilon the clipping
norm, and FedFisher's anchor, are those that are best on 500 validation images (public
ones: the choice is not accounted for); accuracies are of the test images. Fishers are
of 200 examples.
"""

import math
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness.page import (
    blocks,
    command_line,
    mnist_folder,
    opening,
    with_workers,
    write_page,
)
from harness.size import sized
from harness.splits import on_splits
from harness.stats import spread
from harness.tables import head, row
from harness.uploads import Setting, posteriors
from rivals.private_sums import contribution, noised, private_sums
from torch import Tensor

from flwr_fisher.merge import LocalPosterior, fedfisher_from_sums
from flwr_fisher.params import clipped, subtract
from flwr_fisher.report import accuracies
from flwr_fisher.server.privacy import Privacy
from flwr_fisher.wire import Additive

SEEDS, CLIENTS, DELTA = sized(3, 2), sized(100, 10), 1e-3
EPSILONS = sized((1000.0, 200.0, 50.0, 20.0, 8.0, 3.0, 1.0), (1000.0,))
NORMS, ANCHORS = sized(((0.25, 0.5, 1.0, 2.0, 4.0), (0.1, 1.0, 10.0)), ((1.0,), (0.1,)))
CLIPPED, PLAIN = "clipped, no noise", "neither"

NOTES = """\
ε = 8 and more is a weak promise: what a client's presence changes in the odds of any
outcome is bounded by a factor of e^ε. `Privacy.epsilon` tells it by Opacus's RDP
accountant.
"""

Params = Mapping[str, Tensor]
Make = Callable[[Privacy | None, float], dict[str, Tensor]]


def multiplier_for(epsilon: float) -> float:
    """Return the least noise multiplier of one release within epsilon."""
    low, high = 1e-3, 1e3
    for _ in range(60):
        middle = math.sqrt(low * high)
        privacy = Privacy(noise_multiplier=middle, clipping_norm=1.0)
        if privacy.epsilon(releases=1, delta=DELTA) > epsilon:
            low = middle
        else:
            high = middle
    return high


def mean_of(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean, of clients that count alike."""
    return {k: torch.stack([p[k].double() for p in parts]).mean(0) for k in parts[0]}


def fedavg(start: Params, uploads: list[LocalPosterior], norm: float) -> Make:
    """Return what makes FedAvg's model, of steps that are clipped to a norm."""
    steps = [subtract(upload.params, start) for upload in uploads]
    units = [
        {k: v / norm for k, v in clipped(step, norm).items()}
        if norm < math.inf
        else step
        for step in steps
    ]
    mean, scale = mean_of(units), norm if norm < math.inf else 1.0

    def make(privacy: Privacy | None, anchor: float) -> dict[str, Tensor]:
        found = mean if privacy is None else noised(mean, privacy, CLIENTS)
        return {k: (v + scale * found[k]).to(v.dtype) for k, v in start.items()}

    return make


def fedfisher(start: Params, uploads: list[LocalPosterior], norm: float) -> Make:
    """Return what makes FedFisher's model, of contributions within a norm."""
    norm = min(norm, 1e3)
    mean = mean_of(
        [
            Additive(
                contribution(start, u.params, u.curvature.diagonal(), norm)
            ).tensors
            for u in uploads
        ]
    )

    def make(privacy: Privacy | None, anchor: float) -> dict[str, Tensor]:
        found = mean if privacy is None else noised(mean, privacy, CLIENTS)
        sums = private_sums(found, start, norm)
        return fedfisher_from_sums(sums, like=dict(start), anchor=anchor).params

    return make


METHODS = {"FedAvg": (fedavg, (0.1,)), "FedFisher, diagonal": (fedfisher, ANCHORS)}


def evaluate(setting: Setting, data_dir: Path) -> dict[str, Any]:
    """Return every method's test accuracy in per cent by epsilon, on one split."""
    task = setting.task(data_dir)
    uploads = posteriors(setting, task, "diagonal")
    assert task.validation is not None
    validation = list(task.eval_loader(task.validation))
    model = task.make_model()
    start = {k: v.detach().clone() for k, v in model.state_dict().items()}
    found: dict[str, Any] = {"product": product_of(start, uploads)}
    for name, (method, anchors) in METHODS.items():
        made = {norm: method(start, uploads, norm) for norm in (*NORMS, math.inf)}
        for epsilon in (PLAIN, CLIPPED, *EPSILONS):
            norms = (math.inf,) if epsilon == PLAIN else NORMS
            z = multiplier_for(epsilon) if isinstance(epsilon, float) else None
            models = {}
            for norm, anchor in product(norms, anchors):
                privacy = z and Privacy(noise_multiplier=z, clipping_norm=norm)
                models[f"C = {norm:g}, anchor {anchor:g}"] = made[norm](
                    privacy or None, anchor
                )
            scores = accuracies(model, models, validation)
            best = max(scores, key=lambda key: scores[key])
            test = accuracies(model, {best: models[best]}, list(task.test_loader()))
            found[f"{name} {epsilon}"] = 100 * test[best]
            found[f"{name} {epsilon} chosen"] = best
    return found


def product_of(start: Params, uploads: list[LocalPosterior]) -> float:
    """Return the products' median norm, of Fishers and steps of norm 1."""
    found = []
    for upload in uploads:
        F, step = upload.curvature.diagonal(), subtract(upload.params, start)
        curvature = clipped({k: v * 1e12 for k, v in F.items()}, 1.0)
        unit = clipped({k: v * 1e6 for k, v in step.items()}, 1.0)
        both = torch.cat([(curvature[k] * unit[k]).flatten() for k in curvature])
        found.append(float(both.norm()))
    return median(found)


def table(splits: list[dict[str, Any]]) -> list[str]:
    """Return the table's lines: mean and standard deviation over seeds."""
    lines = head("test accuracy, %", *METHODS, "noise multiplier", "chosen, by seed")
    for epsilon in (PLAIN, CLIPPED, *EPSILONS):
        shown = [spread([s[f"{name} {epsilon}"] for s in splits]) for name in METHODS]
        z = f"{multiplier_for(epsilon):.2g}" if isinstance(epsilon, float) else "0"
        title = f"ε = {epsilon:g}" if isinstance(epsilon, float) else epsilon
        chosen = "; ".join(s[f"FedAvg {epsilon} chosen"].split(",")[0] for s in splits)
        lines.append(row(title, *shown, z, chosen))
    return lines


def main() -> None:
    """Write the page."""
    options = with_workers(command_line(__doc__)).parse_args()
    options.data_dir = mnist_folder(options)
    every = [
        Setting(
            "mnist",
            "lenet",
            0.5,
            seed,
            clients=CLIENTS,
            epochs=10,
            hold_out=True,
            examples=200,
        )
        for seed in range(SEEDS)
    ]
    found = on_splits("privacy", evaluate, every, options)
    splits = [found[setting] for setting in every]
    norms = ", ".join(f"{split['product']:.3f}" for split in splits)
    told = f"A Fisher's product with a step, both of norm 1, has the norm {norms}."
    page = blocks(opening("Privacy of sums", __doc__), table(splits), told, NOTES)
    write_page("privacy", page, splits)


if __name__ == "__main__":
    main()
