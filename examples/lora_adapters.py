"""
Adapters of a transformer
=========================

A small transformer learns to write docstrings. Then two clients tune low-rank adapters
of it (LoRA, Hu et al., ICLR 2022), each to another kind of text, and the server merges
the adapters in one shot: an upload has the adapters and their Fisher information, and
nothing of the transformer, which stays as it is.

One client has the prose of Python's language reference, the other has Python's own
source code IN CAPITALS. All texts come with Python.

``python examples/lora_adapters.py`` is this page; ``--seed`` and ``--epochs`` vary it.
"""

import ast
import logging
import sysconfig
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from flwr.app import ArrayRecord, Context
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flwr_fisher.client import (
    FisherClient,
    LocalSGD,
    cross_entropy,
    make_client_app,
    score,
)
from flwr_fisher.params import Params, shared_state, weighted_mean
from flwr_fisher.strategies import FedFisherOneShot
from flwr_fisher.tasks import VOCABULARY, Examples, Splits, Transformer
from flwr_fisher.tasks.language import cut, without_repeats
from flwr_fisher.testing import LocalGrid

LENGTH, RANK, MOST = 64, 8, 60_000  # tokens; characters of a kind of text
CPU = torch.device("cpu")
KINDS = ("reference", "capitals")

# %%
# The adapters
# ------------
#
# Clients train only an adapter's second factor, from zero. The first factor is random,
# and the same for all clients (FFA-LoRA, Sun et al., ICLR 2024). So an adapter's
# product is linear in what is trained, and a merge of adapters merges their products.
# If both factors were trained, the product of the means would not be the mean of the
# products. An upload has half as many parameters, so the rank may be twice as large:
# :doc:`of the ways to merge adapters, this is the best </benchmarks/lora>`.
#
# All clients must have the same first factors, here by a seed. Before the training, the
# server skips clients with other factors or another transformer, and logs their names.


class LoRA(nn.Module):
    """A frozen linear layer, and a low-rank term whose second factor is trained."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.first = nn.Linear(layer.in_features, rank, bias=False)
        self.second = nn.Linear(rank, layer.out_features, bias=False)
        self.first.requires_grad_(False)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output and the adapter's."""
        y: Tensor = self.layer(x) + self.second(self.first(x))
        return y


def transformer() -> Transformer:
    """Return the model before it has adapters."""
    return Transformer(len(VOCABULARY), LENGTH, width=64, layers=2, heads=4)


def adapted(base: Params, seed: int) -> nn.Module:
    """Return the transformer with an adapter at every linear layer of its blocks."""
    model = transformer()
    model.load_state_dict(dict(base))
    model.requires_grad_(False)
    torch.manual_seed(seed)  # the first factors are everyone's
    for block in model.blocks:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, LoRA(getattr(block, name), RANK))
    return model


# %%
# The texts
# ---------
#
# No module gives both docstrings and source code, and a tenth of every document is kept
# for the test.


def sources() -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the standard library's modules."""
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob("*.py")):
        yield path.stem, path.read_text(encoding="utf-8", errors="replace")


def docstrings(text: str) -> str:
    """Return a module's docstrings."""
    documented = ast.Module, ast.ClassDef, ast.FunctionDef
    nodes = (n for n in ast.walk(ast.parse(text)) if isinstance(n, documented))
    return "\n\n".join(found for n in nodes if (found := ast.get_docstring(n)))


def texts() -> dict[str, Splits]:
    """Return the kinds of text, each with a tenth of every document for the test."""
    from pydoc_data.topics import topics

    modules = list(sources())
    half = len(modules) // 2
    kinds = {
        "docstrings": [(name, docstrings(text)) for name, text in modules[:half]],
        "reference": without_repeats(topics),
        "capitals": [(name, text.upper()) for name, text in modules[half:]],
    }
    return {kind: cut(_some(each), LENGTH, held=10) for kind, each in kinds.items()}


def _some(documents: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the first documents, up to so many characters."""
    chosen, left = [], MOST
    for name, text in documents:
        chosen.append((name, text[:left]))
        left -= len(chosen[-1][1])
    return chosen


# %%
# Training, and one shot
# ----------------------
#
# ``shared_state`` leaves frozen parameters out, so clients upload only the adapters,
# and the server merges only these. :class:`~flwr_fisher.strategies.FedFisherOneShot`
# needs to know nothing of adapters. Each client keeps its trained model, to compare
# with.


def loader(
    data: Examples, *, shuffle: bool = True
) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return batches of 32 sequences."""
    return DataLoader(data, batch_size=32, shuffle=shuffle)


def training(epochs: int) -> LocalSGD:
    """Return how the transformer and its adapters are trained."""
    return LocalSGD(epochs=epochs, optimizer=partial(torch.optim.AdamW, lr=3e-3))


def pretrained(data: Splits, epochs: int) -> dict[str, Tensor]:
    """Return the transformer's parameters after training on a kind of text."""
    model = transformer()
    training(epochs)(model, loader(data.train), CPU, {})
    return shared_state(model)


def run(seed: int, epochs: int, kinds: dict[str, Splits]) -> dict[str, list[float]]:
    """Return each model's test loss on either kind of text, in nats a character."""
    torch.manual_seed(seed)
    base = pretrained(kinds["docstrings"], epochs)
    start = shared_state(adapted(base, seed))
    tuned: dict[str, Params] = {}

    def client_fn(context: Context) -> FisherClient:
        kind = KINDS[int(context.node_config["partition-id"])]
        train = training(epochs)

        def note(model: nn.Module, *rest: object) -> dict[str, float]:
            metrics = train(model, *rest)  # type: ignore[arg-type]
            tuned[kind] = shared_state(model)
            return metrics

        model = adapted(base, seed)
        held_out = loader(kinds[kind].test, shuffle=False)
        return FisherClient(model, loader(kinds[kind].train), held_out, train_fn=note)

    strategy = FedFisherOneShot(seed=seed)
    grid = LocalGrid(make_client_app(client_fn), num_supernodes=len(KINDS))
    result = strategy.start(grid, ArrayRecord(start))
    sizes = [len(kinds[kind].train) for kind in KINDS]
    found = {
        "no adapters": start,
        **{f"adapters for {kind}": tuned[kind] for kind in KINDS},
        "their mean (FedAvg)": weighted_mean([tuned[kind] for kind in KINDS], sizes),
        "merged by FedFisher": result.arrays.to_torch_state_dict(),
    }
    model, losses = adapted(base, seed), {}
    for name, params in found.items():
        model.load_state_dict(dict(params), strict=False)
        tests = (loader(kinds[kind].test, shuffle=False) for kind in KINDS)
        losses[name] = [score(model, test, CPU, cross_entropy)[0] for test in tests]
    return losses


# %%
# What came of it
# ---------------
#
# The test loss of each model on each kind of text, and the mean of the two. Lower is
# better.


def draw(losses: dict[str, list[float]]) -> None:
    """Draw a row a model: its loss on either kind of text, and their mean."""
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    names, (first, second) = list(losses), zip(*losses.values(), strict=True)
    both = [(x + y) / 2 for x, y in zip(first, second, strict=True)]
    axes.hlines(names, first, second, color="#9aa5b1", lw=1, zorder=0)
    axes.plot(first, names, "o", color="#30638e", label=KINDS[0])
    axes.plot(second, names, "o", color="#edae49", label=KINDS[1])
    axes.plot(both, names, "D", color="#d1495b", label="both")
    axes.set(xlabel="test loss, nats a character")
    axes.invert_yaxis()
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)


def main() -> None:
    """Print the table of losses, and draw it."""
    parser = ArgumentParser(description="Adapters of a transformer, merged")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    # Flower logs every step of a round, which the table has no need of.
    logging.getLogger("flwr").setLevel(logging.ERROR)
    losses = run(options.seed, options.epochs, texts())
    print(
        f"{'nats a character':28}", *(f"{kind:>12}" for kind in KINDS), "        both"
    )
    for name, each in losses.items():
        both = sum(each) / len(each)
        print(f"{name:28}", *(f"{loss:12.3f}" for loss in (*each, both)))
    draw(losses)
    plt.show()


if __name__ == "__main__":
    main()

# %%
# Each client's adapters are good for its own text and bad for the other. On both
# together, the merge is better than their mean, and better than either. This needs
# clients that differ: on kinds of text that are close to each other, such as prose and
# unchanged code, the merge is level with the mean.
#
# :doc:`/lora` and :doc:`/frozen-layers` say more.
