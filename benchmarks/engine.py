"""What a K-FAC costs in gradient passes, beside curvlinops in the same run.

    # with curvlinops-for-pytorch==3.0.1, and efficientnet-lite-pytorch==0.1.0 by
    # `pip install --no-deps efficientnet-pytorch efficientnet-lite-pytorch`
    python benchmarks/engine.py

A *pass* is a forward and a backward pass of the network over the same batches. Networks
are as they are drawn: what is measured does not depend on their weights. Ours are
``fisher`` with ``FisherOptions.full(expectation="sampled")``, with one label an
example, and ``FisherOptions.full(tolerance=0)``, over all classes; curvlinops' are its
``KFACLinearOperator`` with ``fisher_type`` ``mc`` and ``type-2`` over the linear and
convolution layers (ours also has the exact diagonals of everything else). Every figure
is a median over runs that take turns, each network in a process of its own, of one
thread's time; ours include the check, on the first batch, of which layer has which
form. *32 positions* is ``max_positions=32``; *default* is what the strategies ask for,
three passes an example where the model is as unsure as an untrained one; *diagonal* is
that of everything. What curvlinops cannot take is left empty, with its reason below.
The inputs of a grouped convolution it averages over the groups, so that all have one
factor A: that is less work, and another matrix, as the error of MobileNetV3-small
shows. Ours has a factor for each group.

Errors are those of the product with a random vector, over all classes, relative to
float64. Peak memory is the most that is allocated at once on one batch, in that of a
pass.
"""

import argparse
import copy
import platform
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from harness.alone import alone
from harness.page import blocks, opening, write_page
from harness.size import sized
from harness.tables import head, row
from harness.timing import medians, peak_bytes
from tasks import make_model
from torch import Tensor, nn
from torchvision.models import mobilenet_v3_small

from flwr_fisher.curvature import FisherOptions, fisher
from flwr_fisher.params import Params

PEER = "curvlinops"
CPU, BATCHES = torch.device("cpu"), sized(8, 2)
SAMPLED = FisherOptions.full(expectation="sampled")
ALL = FisherOptions.full(tolerance=0)
FEW_POSITIONS = FisherOptions.full(expectation="sampled", max_positions=32)
OURS = {
    "default": ("kfac", FisherOptions(examples=None)),
    "sampled": ("kfac", SAMPLED),
    "all classes": ("kfac", ALL),
    "sampled, 32 positions": ("kfac", FEW_POSITIONS),
    "diagonal, sampled": ("diagonal", SAMPLED),
}
KINDS = {"sampled": "mc", "all classes": "type-2"}
Batches = list[tuple[Tensor, Tensor]]


class Block(nn.Module):
    """A transformer's encoder block, of plain linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width) for _ in range(4)
        )
        self.wide, self.narrow = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens ``[n, T, width]`` to tokens."""
        z = self.norms[0](x)
        parts = (
            layer(z).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(*parts)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))


class SmallViT(nn.Module):
    """A vision transformer for 32x32 images: a class token and 64 patches."""

    def __init__(self, width: int = 128, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 65, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        tokens = self.patches(x).flatten(2).mT
        tokens = torch.cat([self.first.expand(len(x), -1, -1), tokens], 1)
        return self.head(self.norm(self.blocks(tokens + self.places))[:, 0])


def cases() -> dict[str, tuple[nn.Module, Batches]]:
    """Return the networks, each with its batches."""
    torch.manual_seed(0)
    grey, colour = (1, 28, 28), (3, 32, 32)
    lenet = make_model("lenet", shape=grey, num_classes=10)
    found = {"LeNet": (lenet, _batches(128, grey))}
    for title, name, size in (("CNN", "cnn", 128), ("ResNet-18", "resnet18", 32)):
        model = make_model(name, shape=colour, num_classes=10)
        count = BATCHES if name == "cnn" else BATCHES // 2
        found[title] = (model, _batches(size, colour, count))
    found["small ViT"] = (SmallViT(), _batches(32, colour))
    small = mobilenet_v3_small(num_classes=10)
    found["MobileNetV3-small"] = (small, _batches(64, colour))
    if find_spec("efficientnet_lite_pytorch") is not None:
        found["EfficientNet-Lite0"] = (
            efficientnet(),
            _batches(64, (3, 64, 64), BATCHES // 2),
        )
    wanted = sized(list(found), ["LeNet", "small ViT"])
    return {title: (found[title][0].eval(), found[title][1]) for title in wanted}


def efficientnet() -> nn.Module:
    """Return EfficientNet-Lite0 for ten classes, as it is drawn."""
    from efficientnet_lite_pytorch import EfficientNet

    model: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    model._fc = nn.Linear(model.get_submodule("_fc").in_features, 10)
    return model


def _batches(size: int, shape: tuple[int, ...], count: int = BATCHES) -> Batches:
    return [
        (torch.randn(size, *shape), torch.randint(10, (size,))) for _ in range(count)
    ]


def training(model: nn.Module, batches: Batches) -> None:
    """Take a forward and a backward pass over each batch."""
    for x, y in batches:
        F.cross_entropy(model(x), y).backward()


def covered(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of linear and convolution layers."""
    return {
        f"{name}.{own}": parameter
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
        for own, parameter in module.named_parameters(recurse=False)
    }


def theirs(model: nn.Module, batches: Batches, kind: str) -> Any:
    """Return curvlinops' K-FAC."""
    from curvlinops import KFACLinearOperator

    operator = KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        list(covered(model).values()),
        batches,
        check_deterministic=False,
        fisher_type=kind,
        separate_weight_and_bias=False,
        num_per_example_loss_terms=1,
        num_data=sum(len(y) for _, y in batches),
    )
    operator.compute_kronecker_factors()
    return operator


def refusal(
    take: Callable[[nn.Module, Batches], object], model: nn.Module, batches: Batches
) -> str | None:
    """Return why a peer cannot take a network; None if it can."""
    try:
        # A copy: where a peer fails, its hooks stay on the model.
        take(copy.deepcopy(model), batches[:1])
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return str(error).splitlines()[0]
    return None


def errors(model: nn.Module, batches: Batches, peer: bool) -> dict[str, float]:
    """Return both products' errors, relative to float64."""
    some = [(x[:8], y[:8]) for x, y in batches]
    names = covered(model)
    vector = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    norm = torch.linalg.vector_norm

    def ours(vector: Params) -> list[Tensor]:
        product = fisher(model, some, options=ALL) @ vector
        return [product[name] for name in names]

    found = {"ours": ours(vector)}
    if peer:
        found[PEER] = theirs(model, some, "type-2") @ [vector[name] for name in names]
    model.double()
    some = [(x.double(), y) for x, y in some]
    exact = ours({name: value.double() for name, value in vector.items()})
    model.float()
    return {
        side: max(
            float(norm(a - b) / norm(b)) for a, b in zip(product, exact, strict=True)
        )
        for side, product in found.items()
    }


def measure(
    model: nn.Module,
    batches: Batches,
    runs: int,
    device: torch.device = CPU,
    peer: bool = True,
) -> dict[str, Any]:
    """Return what everything takes, in passes, with errors and peaks."""
    model.to(device)
    batches = [(x.to(device), y.to(device)) for x, y in batches]
    take = partial(theirs, kind=KINDS["sampled"])
    reason = refusal(take, model, batches) if peer else None
    peer = peer and reason is None
    work: dict[str, Callable[[Batches], object]] = {"pass": partial(training, model)}
    for name, (structure, options) in OURS.items():
        work[f"ours, {name}"] = partial(
            fisher, model, structure=structure, options=options
        )
    for name, kind in KINDS.items() if peer else ():
        work[f"{PEER}, {name}"] = partial(theirs, model, kind=kind)
    todo = {name: partial(each, batches) for name, each in work.items()}
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    took = medians(todo, runs, 1, device, clock)
    peaks = {
        name: peak_bytes(partial(each, batches[:1]), device)
        for name, each in work.items()
    }
    return {
        "seconds": took,
        "passes": {name: took[name] / took["pass"] for name in took},
        "memory": {name: peaks[name] / peaks["pass"] for name in peaks},
        "error": errors(model, batches, peer),
        "batch": len(batches[0][1]),
        "refused": reason,
    }


def tables(found: dict[str, Any]) -> list[list[str]]:
    """Return the tables of time, of memory and of errors."""
    titles = [f"{name}, batch {case['batch']}" for name, case in found.items()]
    names = [name for name in next(iter(found.values()))["passes"] if name != "pass"]
    shown = []
    for key, title in (("passes", "gradient passes"), ("memory", "peak, in a pass's")):
        lines = head(title, *titles)
        for name in names:
            cells = (_cell(case[key], name, ".1f") for case in found.values())
            lines.append(row(name, *cells))
        shown.append(lines)
    lines = head("relative error", *titles)
    for side in next(iter(found.values()))["error"]:
        cells = (_cell(case["error"], side, ".1e") for case in found.values())
        lines.append(row(side, *cells))
    return [*shown, lines]


def refusals(found: dict[str, Any]) -> list[str]:
    """Return a line for each network that curvlinops does not take."""
    return [
        f"{PEER} does not take {name}: {case['refused']}"
        for name, case in found.items()
        if case["refused"]
    ]


def _cell(values: dict[str, float], name: str, shown: str) -> str:
    return format(values[name], shown) if name in values else ""


def of_case(name: str, runs: int) -> dict[str, Any]:
    """Return a network's figures, by one thread."""
    torch.set_num_threads(1)
    peer = sized(True, find_spec(PEER) is not None)
    return measure(*cases()[name], runs, peer=peer)


def main() -> None:
    """Write the tables and the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=sized(5, 1))
    runs = parser.parse_args().runs
    found = {}
    for name in cases():
        found[name] = alone(of_case, name, runs)
        print(name, found[name], flush=True)
    where = f"{platform.machine()}, 1 thread, torch {torch.__version__}"
    note = (
        f"Measured on {where}; medians of {runs} runs over {BATCHES} batches, of "
        f"ResNet-18 and EfficientNet {BATCHES // 2}."
    )
    shown = [*tables(found), *refusals(found)]
    lines = blocks(opening("A K-FAC in gradient passes", __doc__), note, *shown)
    write_page("engine", lines, found)


if __name__ == "__main__":
    main()
