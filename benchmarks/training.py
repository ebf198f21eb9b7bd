"""Training to be merged: what a client can do for it at no cost, on validation data.

    python benchmarks/training.py

Splits and images are those of `fedfisher_defaults.py`: no test image is looked at. What
changes is the clients' training (SGD, lr 0.01, momentum 0.9, batch 16, 30 epochs) or
the distribution whose Fisher they send:

``averaged``
    the mean of the parameters after each of the last five epochs, and the Fisher there:
    ``LocalSGD(swa_epochs=5)``;
``label smoothing 0.1``
    ``LocalSGD(label_smoothing=0.1)``;
``weight decay 1e-3``
    ``LocalSGD(weight_decay=1e-3)``;
``floor 0.1``
    the Fisher of a model that keeps a tenth of its probability for all classes alike.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean

import torch
from fedfisher_defaults import columns, scored
from harness.page import blocks, command_line, opening, with_workers, write_page
from harness.splits import on_splits
from harness.stats import paired, with_error
from harness.tables import head, row
from harness.uploads import Setting, posteriors
from tasks import Task
from torch import Tensor, nn

from flwr_fisher.curvature import fisher
from flwr_fisher.merge import LocalPosterior, fedavg, fedfisher
from flwr_fisher.report import accuracies, ensemble_accuracy

NOTES = """\
Means over three splits (α = 0.2, 0.1, 0.05) of scikit-learn's digits.

*Averaged* parameters cost nothing, and lose nothing beyond their error. Label smoothing
gains most, for FedAvg and the ensemble, too; that it does on other data is not shown.
Weight decay gains a point, on one of the two within its error. A floor under the
probabilities, for the Fisher alone, loses.
"""
COLUMNS = ("digits, mlp", "digits, lenet-bias")
PLAIN, FLOOR, EXAMPLES, AVERAGED = "plain", 0.1, 1000, 5
Scores = dict[str, dict[str, float]]


def uploads(setting: Setting, task: Task) -> Iterator[tuple[str, list[LocalPosterior]]]:
    """Yield each way's name and the clients' uploads."""
    plain = posteriors(setting, task)
    yield PLAIN, plain
    yield "averaged", posteriors(setting, task, averaged=True)
    smooth = replace(setting, averaged=0, label_smoothing=0.1)
    yield "label smoothing 0.1", posteriors(smooth, task)
    decay = replace(setting, averaged=0, weight_decay=1e-3)
    yield "weight decay 1e-3", posteriors(decay, task)
    yield f"floor {FLOOR}", [floored(task, i, each) for i, each in enumerate(plain)]


def floored(task: Task, client: int, upload: LocalPosterior) -> LocalPosterior:
    """Return an upload with the Fisher of a model that is never quite sure."""
    model = task.make_model()
    model.load_state_dict(upload.params)
    images = task.train_images(client)
    torch.manual_seed(client)
    some = images.subset(torch.randperm(len(images))[:EXAMPLES].tolist())
    hook = model.register_forward_hook(_with_floor)
    curvature = fisher(model, task.eval_loader(some, batch_size=256), tolerance=0)
    hook.remove()
    return replace(upload, curvature=curvature)


def _with_floor(_: nn.Module, __: object, logits: Tensor) -> Tensor:
    """Return logits of no small probability; their gradients stay as they were."""
    probabilities = (1 - FLOOR) * logits.softmax(-1) + FLOOR / logits.shape[-1]
    return logits + (probabilities.log() - logits).detach()


def evaluate(setting: Setting, data_dir: Path) -> Scores:
    """Return every way's validation accuracies in per cent."""
    task = setting.task(data_dir)
    model, loader = task.make_model(), scored(task)
    found: Scores = {}
    for way, clients in uploads(setting, task):
        params = [client.params for client in clients]
        weights = [client.num_examples for client in clients]
        merged = {
            "FedFisher": fedfisher(clients).params,
            "FedFisher, cg": fedfisher(clients, solver="cg").params,
            "FedAvg": fedavg(clients),
        }
        single = accuracies(model, {str(i): p for i, p in enumerate(params)}, loader)
        scores = accuracies(model, merged, loader)
        scores["best client"] = max(single.values())
        scores["ensemble"] = ensemble_accuracy(model, params, weights, loader)
        found[way] = {name: 100 * score for name, score in scores.items()}
    return found


def table(splits: list[Scores]) -> list[str]:
    """Return a data set's table: means, and FedFisher's gain over the plain way."""
    methods = list(splits[0][PLAIN])
    lines = head("validation accuracy, %", *methods, "FedFisher minus plain ± s.e.")

    def of(way: str, method: str) -> list[float]:
        return [split[way][method] for split in splits]

    for way in splits[0]:
        gain = paired(of(way, "FedFisher"), of(PLAIN, "FedFisher"))
        shown = "" if way == PLAIN else with_error(gain, 1)
        cells = (f"{fmean(of(way, method)):.1f}" for method in methods)
        lines.append(row(way, *cells, shown))
    return lines


def main() -> None:
    """Write a table for each data set."""
    options = with_workers(command_line(__doc__)).parse_args()
    known = {"averaged": AVERAGED, "examples": EXAMPLES}
    splits = {
        name: [replace(split, **known) for split in columns()[name]] for name in COLUMNS
    }
    every = chain.from_iterable(splits.values())
    each = on_splits("training", evaluate, every, options)
    found = {name: [each[split] for split in splits[name]] for name in COLUMNS}
    tables = [part for name in COLUMNS for part in (f"## {name}", table(found[name]))]
    lines = blocks(opening("Training to be merged", __doc__), NOTES.strip(), *tables)
    write_page("training", lines, found)


if __name__ == "__main__":
    main()
