"""What follows a merge: a head in closed form, then steps by K-FAC.

    python benchmarks/refinement.py --data-dir DIR [--only mnist] [--seeds N]

The clients of merges.py (5, ``dirichlet-client``, 30 epochs, LeNet and the CNN without
biases), trained once, and the shipped strategies with their clients in memory: a client
loads what it has trained. *Head*: `Refinement()`, *k steps*: `Refinement(steps=k)`; of
the merge by ``FedFisherOneShot``, of ``FedAvg``'s mean, and of the network as it was
before training. Requests are those after the training. *Numbers* are those that a
client uploads in these requests, as multiples of the model's; *passes* are a client's
passes over its data (a forward pass counts as a third).

The constants (L-BFGS's first length .03, the damping 1e-3; LDA, its ridge by
generalised cross-validation) were chosen on validation examples: of six other tables
(three splits each), of MNIST (two splits) and of CIFAR-10 (one), all of seeds that no
page has.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from flwr.app import ArrayRecord, Context
from harness.page import blocks, command_line, opening, with_workers, write_page
from harness.size import sized
from harness.splits import on_splits
from harness.stats import spread
from harness.tables import head, row
from harness.uploads import Setting, posteriors
from merges import PROBLEMS, SEEDS, splits_of

from flwr_fisher.client import FisherClient, cross_entropy, make_client_app, score
from flwr_fisher.params import Params, shared_state
from flwr_fisher.strategies import FedAvg, FedFisherOneShot, Refinement
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import arrays_to_tensors

STEPS = sized((0, 1, 3, 8), (0, 1))
STARTS = {"FedFisher": FedFisherOneShot, "FedAvg": FedAvg, "untrained": FedAvg}
Scores = dict[str, dict[str, float]]  # accuracy and loss, by row


def refined(setting: Setting, data_dir: Path) -> Scores:
    """Return the accuracy and the cross-entropy of each row on one split."""
    torch.set_num_threads(1)
    task = setting.task(data_dir)
    uploads = posteriors(setting, task, "kfac")
    model, test = task.make_model(), list(task.test_loader())
    start = {k: value.clone() for k, value in shared_state(model).items()}
    found: Scores = {}

    def scored(name: str, arrays: ArrayRecord) -> None:
        model.load_state_dict(arrays_to_tensors(arrays), strict=False)
        loss, accuracy, _ = score(model, test, torch.device("cpu"), cross_entropy)
        found[name] = {"accuracy": 100 * accuracy, "loss": loss}

    for name, kind in STARTS.items():
        kept = [start if name == "untrained" else u.params for u in uploads]
        for steps in STEPS:
            strategy = kind(fraction_evaluate=0.0, refine=Refinement(steps=steps))
            grid = LocalGrid(clients(task, kept), len(kept))
            result = strategy.start(grid, ArrayRecord(dict(start)))
            if result.unrefined is not None and steps == STEPS[0]:
                scored(name, result.unrefined)
            scored(f"{name}, {titled(steps)}", result.arrays)
    return found


def titled(steps: int) -> str:
    """Return what is done after the merge."""
    return f"head, {steps} steps" if steps else "head"


def clients(task: Any, trained: Sequence[Params]) -> Any:
    """Return an app whose clients have trained already."""

    def client_fn(context: Context) -> FisherClient:
        own = int(context.node_config["partition-id"])

        def load(model: Any, loader: Any, device: Any, config: Any) -> dict[str, float]:
            model.load_state_dict(dict(trained[own]), strict=False)
            return {}

        loader = task.eval_loader(task.train_images(own), batch_size=256)
        count = task.num_examples(own)
        return FisherClient(
            task.make_model(), loader, train_fn=load, num_examples=count, device="cpu"
        )

    return make_client_app(client_fn)


def table(
    results: Mapping[float, Sequence[Scores]], key: str, digits: int
) -> list[str]:
    """Return means over splits, a row for each model and a column for each alpha."""
    names = next(iter(results.values()))[0]
    title = {"accuracy": "test accuracy, %", "loss": "cross-entropy"}[key]
    lines = head(title, *(f"α = {alpha:g}" for alpha in results))
    for name in names:
        cells = [
            spread([split[name][key] for split in splits], digits)
            for splits in results.values()
        ]
        lines.append(row(name, *cells))
    return lines


def costs(size: int, features: int, classes: int) -> list[str]:
    """Return what a client does and sends after its training."""
    sums = features * (features + 1) / 2 + features * classes
    lines = head("after the merge", "requests", "numbers", "passes")
    lines.append(row("head", "2", f"{2 * sums / size:.2f}", "0.7"))
    for steps in (k for k in STEPS if k):
        sent = f"{2 * sums / size:.2f} + {steps} + a K-FAC"
        passes = f"{1 + steps:.1f}, and a K-FAC"
        lines.append(row(titled(steps), str(3 + steps), sent, passes))
    return lines


def lead(results: Mapping[float, Sequence[Scores]]) -> str:
    """Return how far FedFisher is ahead of the other starts, with the same requests."""
    every = list(chain.from_iterable(results.values()))
    parts = []
    for steps in STEPS:
        name = titled(steps)
        leads = [
            fmean(
                split[f"FedFisher, {name}"]["accuracy"]
                - split[f"{other}, {name}"]["accuracy"]
                for split in every
            )
            for other in ("FedAvg", "untrained")
        ]
        parts.append(f"{name}: {leads[0]:+.1f} and {leads[1]:+.1f}")
    return (
        "FedFisher's lead in points over FedAvg and over the untrained network, with "
        f"the same requests, over all {len(every)} splits: " + "; ".join(parts) + "."
    )


def page(name: str, options: Namespace) -> None:
    """Evaluate a data set's splits, and write its page."""
    problem = PROBLEMS[name]
    asked = {
        alpha: splits[: options.seeds] for alpha, splits in splits_of(problem).items()
    }
    every = sorted(chain.from_iterable(asked.values()), key=lambda s: s.seed)
    if options.trained:
        last = [s.folder / f"client-{s.clients - 1}.safetensors" for s in every]
        every = [s for s, path in zip(every, last, strict=True) if path.exists()]
    found = on_splits("refinement", refined, every, options)
    results = {
        alpha: [found[split] for split in splits if split in found]
        for alpha, splits in asked.items()
    }
    results = {alpha: own for alpha, own in results.items() if own}
    model = replace(every[0]).task(options.data_dir).make_model()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    size = sum(p.numel() for p in model.parameters())
    counts = ", ".join(f"{len(own)} at α = {alpha:g}" for alpha, own in results.items())
    write_page(
        f"refinement_{name}",
        blocks(
            opening(f"After the merge: {problem.title}", __doc__),
            f"Splits: {counts}. Means ± standard deviations.",
            table(results, "accuracy", 1),
            lead(results),
            table(results, "loss", 2),
            costs(size, layers[-1].in_features, layers[-1].out_features),
        ),
        {split.folder.name: numbers for split, numbers in found.items()},
    )


def main() -> None:
    """Write each data set's page."""
    parser = with_workers(command_line(__doc__))
    parser.add_argument("--only", choices=PROBLEMS)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="of each α")
    parser.add_argument(
        "--trained", action="store_true", help="only splits whose clients are trained"
    )
    options = parser.parse_args()
    for name in [options.only] if options.only else sized([*PROBLEMS], ["mnist"]):
        if (options.data_dir / PROBLEMS[name].folder).exists():
            page(name, options)
        else:
            print(f"left out, as it is not in {options.data_dir}: {name}")


if __name__ == "__main__":
    main()
