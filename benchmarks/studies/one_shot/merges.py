"""What merges are worth, of clients that were trained in each of the parts' ways."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp.strategy import FedAvg
from harness.clients import CPU, shared_out
from harness.networks import small_resnet
from harness.size import sized
from harness.uploads import Setting, fisher_within_budget, posteriors
from rivals.regmean import regmean
from tasks import Task
from torch import nn

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.curvature import FisherOptions, fisher
from flwr_fisher.merge import LocalPosterior, fedavg, fedfisher, fisher_merge
from flwr_fisher.params import Params, shared_state
from flwr_fisher.report import accuracies, ensemble_accuracy
from flwr_fisher.strategies import FedFisherOneShot, Refinement
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import arrays_to_tensors
from studies.refinement.runs import Recorded

OURS, DIAGONAL = "FedFisher K-FAC (default)", "FedFisher diagonal, closed form"
BEST = "best single client (chosen on the test set)"
ENSEMBLE = "ensemble of clients (not one model)"
CLIENTS = 5
ROUNDS, ROUND_EPOCHS, EXAMPLES = sized((5, 10, 20_000), (2, 1, 500))
PRETRAINED_ON, PRETRAINING, TUNING = sized((10_000, 20, 10), (100, 1, 1))
TUNING_LR = 0.001
MULTI_ROUND = {
    "FedAvg": lambda **own: FedAvg(**own),
    DIAGONAL: lambda **own: FedFisherOneShot(structure="diagonal", refine=None, **own),
}
LAST, STEPS = "…, a head after the last round", "…, and three steps"
EVERY = "…, a head after each round"
RUNS = {name: (name,) for name in MULTI_ROUND}
RUNS |= {OURS: (OURS, LAST, STEPS), EVERY: (EVERY,)}
Scores = dict[str, float]


def merged(model: nn.Module, task: Task, kfac: Sequence[LocalPosterior]) -> Scores:
    """Return the test accuracy in per cent of each merge of the same models."""
    diagonal = []
    for client, upload in enumerate(kfac):
        model.load_state_dict(dict(upload.params))
        loader = task.eval_loader(task.train_images(client), batch_size=256)
        options = FisherOptions.full(max_passes=3)
        own = fisher(model, loader, "diagonal", options=options)
        diagonal.append(LocalPosterior(upload.params, own, upload.num_examples))
    test, params = list(task.test_loader()), [upload.params for upload in kfac]
    candidates: dict[str, Mapping[str, torch.Tensor]] = {
        "FedAvg": fedavg(kfac),
        DIAGONAL: fisher_merge(diagonal),
        "RegMean, off-diagonal 0.9": regmean(kfac, off_diagonal=0.9),
        OURS: fedfisher(kfac).params,
    }
    found = accuracies(model, candidates, test)
    single = accuracies(model, {str(i): p for i, p in enumerate(params)}, test)
    found[BEST] = max(single.values())
    weights = [upload.num_examples for upload in kfac]
    found[ENSEMBLE] = ensemble_accuracy(model, params, weights, test)
    return {name: 100 * value for name, value in found.items()}


def once(setting: Setting, data_dir: Path) -> Scores:
    """Merge clients that were trained from one random start."""
    task = setting.task(data_dir)
    return merged(task.make_model(), task, posteriors(setting, task, "kfac"))


def pretrained(name: str, seed: int, data_dir: Path) -> Scores:
    """Pre-train, tune on every client's images, merge; all weights are trained.

    The images of the pre-training are no client's. `name` is "cnn" or "small ResNet".
    """
    made = partial(_random, name, seed)
    held = {"validation": PRETRAINED_ON, "hold_out": True}
    setting = Setting("imagefolder:CIFAR10", "cnn", 0.1, seed, **held)
    task = setting.task(data_dir)
    start = made(task)
    images = task.eval_loader(task.validation, batch_size=64)
    train = LocalSGD(epochs=PRETRAINING, lr=0.01, momentum=0.9)
    train(start, Shuffling(images), CPU, {})
    first = accuracies(start, {"start": shared_state(start)}, list(task.test_loader()))
    uploads = []
    for client in range(setting.clients):
        torch.manual_seed(1000 * seed + client)
        model = made(task)
        model.load_state_dict(shared_state(start))
        tune = LocalSGD(epochs=TUNING, lr=TUNING_LR, momentum=0.9)
        tune(model, task.train_loader(client, 64), CPU, {})
        loader = task.eval_loader(task.train_images(client), batch_size=64)
        count = task.num_examples(client)
        own = fisher_within_budget(model, loader, client, count)
        uploads.append(LocalPosterior(shared_state(model), own, count))
    return {"the start": 100 * first["start"]} | merged(start, task, uploads)


def _random(name: str, seed: int, task: Task) -> nn.Module:
    torch.manual_seed(seed)
    return task.make_model() if name == "cnn" else small_resnet()


class Shuffling:
    """Batches in a new order each epoch."""

    def __init__(self, batches: Any) -> None:
        self.batches = list(batches)

    def __iter__(self) -> Any:
        """Yield the batches."""
        for index in torch.randperm(len(self.batches)).tolist():
            yield self.batches[index]


class Ours(Recorded, FedFisherOneShot):
    """FedFisher, which keeps the model before each exchange."""


def rounds(run: str, seed: int, data_dir: Path) -> list[list[float]]:
    """Return test accuracies in per cent after each of five rounds, of a run's rows."""
    own = {"model": "lenet", "partition": "dirichlet-client", "alpha": 0.1}
    shared = {"num_partitions": CLIENTS, "max_examples": EXAMPLES}
    task = shared_out(seed, data_dir, **own, **shared)
    net, test = task.make_model(), list(task.test_loader())
    found: list[list[float]] = []
    train = LocalSGD(epochs=ROUND_EPOCHS, lr=0.01, momentum=0.9)

    def client_fn(context: Context) -> FisherClient:
        client = int(context.node_config["partition-id"])
        loader = task.train_loader(client, 64)
        return FisherClient(task.make_model(), loader, train_fn=train, device=CPU)

    def accuracy(params: Params) -> float:
        return 100 * accuracies(net, {"x": params}, test)["x"]

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        found.append([accuracy(arrays_to_tensors(arrays))])
        return MetricRecord({"accuracy": found[-1][0]})

    grid = LocalGrid(make_client_app(client_fn), CLIENTS, seed=seed)
    start = ArrayRecord(shared_state(task.make_model()))
    if run not in (OURS, EVERY):
        strategy = MULTI_ROUND[run](fraction_evaluate=0.0)
        strategy.start(grid, start, num_rounds=ROUNDS, evaluate_fn=evaluate_fn)
        return [[row[0] for row in found[1:]]]
    with TemporaryDirectory() as folder:
        for last in range(1, ROUNDS + 1):
            if run == EVERY:
                start = (
                    FedFisherOneShot(fraction_evaluate=0.0).start(grid, start).arrays
                )
                found.append([accuracy(arrays_to_tensors(start))])
                continue
            # A run that is resumed goes on from its merge, before it was refined.
            ours = Ours(fraction_evaluate=0.0, refine=Refinement(steps=3))
            kept: Any = {"checkpoint_dir": folder, "resume": last > 1}
            result = ours.start(grid, start, num_rounds=last, **kept)
            assert result.unrefined is not None
            merge, refined = map(arrays_to_tensors, (result.unrefined, result.arrays))
            # The model before the second gradient is that of the head.
            found.append([accuracy(p) for p in (merge, ours.models[-3], refined)])
    return [list(row) for row in zip(*found, strict=True)]
