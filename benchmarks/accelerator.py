"""What a client and a merge hold on an accelerator, and how often they wait for it.

    python benchmarks/accelerator.py                    # on a pretended accelerator
    python benchmarks/accelerator.py --device cuda      # beside it: what differs

The pretended one is that of `tests/accelerator`: it counts every byte that is held and
every wait of the host, and tells nothing of speed. *Memory* is the most that is held at
once over what was held before, in that of a forward and a backward pass with the
gradients, at the same batch size; Fishers are taken as the strategies ask for them, of
two batches. Networks are those of `engine.py`. *Waits a batch* are the third batch's;
*other waits* are the rest, with the check of the layers' forms. Merges are of three
clients, whose uploads are in the machine's memory, by the default solver. After a
merge, clients send sums for a head, losses of five heads, and gradients for steps.

*Operations* are those that a device has to be told of one by one: neither views nor
allocations. Small networks and small batches are bound by nothing else. They are in
those of a gradient pass: of a second batch, and *beside* it, of what comes once for all
batches. Beside ours are those of curvlinops' K-FAC, where it is installed (engine.py
says how): it takes linear layers and convolutions alone, ours the diagonal of
everything else, too.
"""

import argparse
import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"


def pretend() -> None:
    """Have a pretended accelerator, before torch's first backward pass."""
    sys.path[:0] = [str(TESTS), str(TESTS / "accelerator")]
    import pretended_build as build

    if (reason := build.missing()) is not None:
        raise SystemExit(f"no pretended accelerator: {reason}")
    os.environ["FLWR_FISHER_ACCELERATOR"] = str(build.built())
    import devices  # noqa: F401


def arguments() -> argparse.Namespace:
    """Return what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="pretended")
    return parser.parse_args()


OPTIONS = arguments() if __name__ == "__main__" else argparse.Namespace(device="cpu")
if OPTIONS.device == "pretended":
    pretend()

import torch  # noqa: E402
from engine import OURS, cases, theirs, training  # noqa: E402
from harness.page import RESULTS, blocks, numbers_of, opening, write_page  # noqa: E402
from harness.tables import head, row  # noqa: E402
from harness.timing import peak_bytes  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from flwr_fisher.curvature import FisherOptions, fisher, gradient  # noqa: E402
from flwr_fisher.curvature.losses import cross_entropy  # noqa: E402
from flwr_fisher.merge import LocalPosterior, fedfisher  # noqa: E402
from flwr_fisher.params import shared_state  # noqa: E402
from flwr_fisher.tangent import head_sums  # noqa: E402
from flwr_fisher.tangent.frozen_head import head_losses  # noqa: E402

NETWORKS = ("LeNet", "CNN", "ResNet-18", "small ViT")
STRUCTURES = ("kfac", "diagonal")
COUNTED = ("sampled", "default", "all classes")  # of engine.py's
PEER = "curvlinops, sampled"
LAUNCH_NOTHING = (  # and are no views
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("detach", "alias", "_unsafe_view", "_reshape_alias", "lift_fresh"),
)
APART = 0.25  # relative: what a device's own figures may differ by unsaid
Found = dict[str, dict[str, float]]


def networks() -> dict[str, tuple[nn.Module, list[tuple[Any, Any]]]]:
    """Return the networks, each with two batches, on the CPU."""
    found = cases().items()
    return {
        name: (model, data[:2]) for name, (model, data) in found if name in NETWORKS
    }


@contextmanager
def waits(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yield a function that says how often the host has waited for the device."""
    if device.type == "pretended":
        import pretended

        with pretended.watch() as seen:
            yield lambda: len(seen.waits())
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # which warns of itself, once
        caught.clear()
        try:
            yield lambda: sum("synchroniz" in str(each.message) for each in caught)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def taken(model: nn.Module) -> dict[str, Callable[[list[Any]], object]]:
    """Return what a client computes of batches, but for its training, by name."""
    options = FisherOptions(examples=None)
    found: dict[str, Callable[[list[Any]], object]] = {
        structure: partial(
            lambda kind, batches: fisher(model, batches, kind, options=options),
            structure,
        )
        for structure in STRUCTURES
    }
    name = [n for n, layer in model.named_modules() if isinstance(layer, nn.Linear)][-1]
    layer = model.get_submodule(name)
    own = [p.detach().cpu() for p in layer.parameters()]
    scales = [0.125, 0.25, 0.5, 1.0]
    return found | {
        "head sums": lambda batches: head_sums(model, batches, name),
        "head losses": lambda batches: head_losses(
            model, batches, name, own, scales, cross_entropy
        ),
        "gradient": lambda batches: gradient(model, batches),
    }


def of_reading(
    model: nn.Module,
    batches: list[Any],
    compute: Callable[[list[Any]], object],
    device: torch.device,
) -> dict[str, float]:
    """Return its memory and waits; the model and batches are on the device."""

    def take(count: int) -> object:
        return compute((batches * 2)[:count])

    def train() -> None:
        training(model, batches[:1])

    for warm_up in (train, lambda: take(1)):
        warm_up()
    model.zero_grad()
    gc.collect()  # what the first calls left would be freed meanwhile
    step = peak_bytes(train, device)
    model.zero_grad()
    gc.collect()
    peak = peak_bytes(lambda: take(2), device)
    host = [tuple(part.cpu() for part in batch) for batch in batches * 2]
    counts = []
    for count in (2, 3):
        with waits(device) as number:
            compute(host[:count])
            counts.append(number())
    each = counts[1] - counts[0]
    return {
        "memory": peak / step,
        "step-mb": step / 1e6,
        "waits-a-batch": each,
        "other-waits": counts[0] - 2 * each,
    }


class Operations(TorchDispatchMode):
    """Counts the operations on a device, but for views and allocations."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.count = device, 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count one, and do it."""
        result = operation(*args, **(kwargs or {}))
        name = operation.name().partition("::")[2].partition(".")[0]
        if not operation.is_view and name not in LAUNCH_NOTHING:
            parts = tree_leaves((args, kwargs, result))
            tensors = (part for part in parts if isinstance(part, torch.Tensor))
            self.count += any(t.device.type == self.device.type for t in tensors)
        return result


def of_operations(
    model: nn.Module, batches: list[Any], device: torch.device
) -> dict[str, list[float]]:
    """Return the operations of a second batch, and beside it, in those of a pass."""

    def counted(compute: Callable[[list[Any]], object]) -> tuple[int, int]:
        counts = []
        for number in (1, 2):
            with Operations(device) as seen:
                compute(batches[:number])
            counts.append(seen.count)
        return counts[1] - counts[0], 2 * counts[0] - counts[1]

    training(model, batches)
    one, _ = counted(lambda some: training(model, some))
    computed: dict[str, Callable[[list[Any]], object]] = {
        name: partial(
            lambda kind, options, some: fisher(
                model, [x for x, _ in some], kind, options=options
            ),
            *OURS[name],
        )
        for name in COUNTED
    }
    if find_spec("curvlinops") is not None:
        computed[PEER] = lambda some: theirs(model, some, "mc")
    return {
        name: [each / one for each in counted(compute)]
        for name, compute in computed.items()
    }


def of_merge(structure: str, device: torch.device) -> dict[str, float]:
    """Return how often a merge of three LeNets waits, and its number of layers."""
    model, batches = networks()["LeNet"]
    clients = []
    for client in range(3):
        for parameter in model.parameters():
            parameter.data += 0.01 * torch.randn_like(parameter)
        inputs = [x[:16] for x, _ in batches[:1]]
        options = FisherOptions.full(expectation="sampled")
        curvature = fisher(model, inputs, structure, options=options)
        params = {name: value.clone() for name, value in shared_state(model).items()}
        clients.append(LocalPosterior(params, curvature, 100.0 + client))
    fedfisher(clients, device=device)
    with waits(device) as number:
        fedfisher(clients, device=device)
        return {"waits": number(), "layers": len(clients[0].curvature.blocks())}


def measured(device: torch.device) -> dict[str, Found]:
    """Return every figure."""
    torch.manual_seed(0)
    found: dict[str, Found] = {"client": {}, "merge": {}, "operations": {}}
    for name, (model, batches) in networks().items():
        here = model.to(device)
        data = [tuple(part.to(device) for part in batch) for batch in batches]
        for what, compute in taken(here).items():
            key = f"{what}, {name}"
            found["client"][key] = of_reading(here, data, compute, device)
            print(key, found["client"][key], flush=True)
        for what, counts in of_operations(here, data, device).items():
            batch, beside = counts
            own = {"a-batch": batch, "beside": beside}
            found["operations"][f"{what}, {name}"] = own
            print(f"operations, {what}, {name}", own, flush=True)
    for structure in STRUCTURES:
        found["merge"][structure] = of_merge(structure, device)
    return found


def page(found: dict[str, Found]) -> list[str]:
    """Return the page's lines."""
    shown = [n for n in NETWORKS if f"{STRUCTURES[0]}, {n}" in found["client"]]
    where = f"Measured with torch {torch.__version__}, on a pretended accelerator."
    memory = head("", *shown)
    counts = head("waits a batch, and other waits", *shown)
    names = dict.fromkeys(key.partition(", ")[0] for key in found["client"])
    for name in names:
        every = [found["client"][f"{name}, {network}"] for network in shown]
        memory.append(row(name, *(f"{each['memory']:.1f}" for each in every)))
        cells = (f"{e['waits-a-batch']:g}, {e['other-waits']:g}" for e in every)
        counts.append(row(name, *cells))
    operations = head("a batch, and beside it", *shown)
    for name in (*COUNTED, PEER):
        rows = (found["operations"].get(f"{name}, {n}") for n in shown)
        cells = (f"{e['a-batch']:.1f}, {e['beside']:.1f}" if e else "" for e in rows)
        operations.append(row(name, *cells))
    merges = head("structure", "layers", "waits")
    for name, each in found["merge"].items():
        merges.append(row(name, *(f"{each[key]:g}" for key in ("layers", "waits"))))
    parts = (where, "## Memory, in that of a training step", memory)
    parts += ("## Operations, in those of a gradient pass", operations)
    parts += ("## Waits of a client", counts, "## Waits of a merge", merges)
    return blocks(opening("On an accelerator", __doc__), *parts)


def differing(found: dict[str, Found], expected: dict[str, Found]) -> list[str]:
    """Return what differs from the pretended accelerator's figures, a line each."""
    lines = []
    for part, rows in expected.items():
        for key, numbers in rows.items():
            for name, want in numbers.items():
                got = found[part][key][name]
                if abs(got - want) > APART * max(abs(want), 1e-9):
                    lines.append(
                        f"{key}: {name} is {got:.3g}, and pretended {want:.3g}"
                    )
    return lines


def main() -> None:
    """Write the page; of another device, say what differs."""
    device = torch.device(OPTIONS.device)
    if device.type == "pretended":
        found = measured(device)
        write_page("accelerator", page(found), found)
        return
    if device.type != "cuda" or not torch.cuda.is_available():
        raise SystemExit("there is no GPU with CUDA that PyTorch can use")
    found = measured(device)
    lines = differing(found, numbers_of("accelerator", RESULTS))
    text = lines or [f"every figure is within {APART:.0%} of the pretended one's"]
    print(f"\n{device} beside the pretended accelerator:", *text, sep="\n  ")


if __name__ == "__main__":
    main()
