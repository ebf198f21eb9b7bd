"""Train clients once, keep their uploads on disk, let every method merge the same.

They train on a GPU where there is one.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tasks import Task, load_task
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from flwr_fisher.client.training import Loader, LocalSGD
from flwr_fisher.curvature import Curvature, FisherOptions, fisher
from flwr_fisher.devices import default_device
from flwr_fisher.merge import LocalPosterior
from flwr_fisher.params import shared_state
from flwr_fisher.wire import PREFIX, curvature_to_tensors, tensors_to_curvature
from harness.page import CACHE
from harness.poison import poisoned
from harness.size import sized

# Fields that came later: at their defaults, clients trained before keep their folders.
LATER = (
    "examples",
    "label_smoothing",
    "weight_decay",
    "averaged",
    "poison",
    "budget",
    "start",
)
MEAN = "mean/"


@dataclass(frozen=True)
class Setting:
    """Everything that determines the clients' uploads."""

    dataset: str
    model: str
    alpha: float
    seed: int
    clients: int = 5
    epochs: int = 30
    lr: float = 0.01
    momentum: float = 0.9
    batch_size: int = 64
    partition: str = "dirichlet-client"
    validation: int = 500
    hold_out: bool = False
    examples: int | None = None  # of a client's, for its Fishers; by default all
    label_smoothing: float = 0.0
    weight_decay: float = 0.0
    averaged: int = 0  # last epochs, whose mean is kept too; 0: none
    poison: str = ""  # of all training images, see poison.py
    budget: bool = False  # whether the Fisher is what a strategy asks for by default
    start: int = 0  # which initial weights of this seed

    def task(self, data_dir: Path | None = None) -> Task:
        """Load the task; `data_dir` is where the data set's files are."""
        load = partial(
            load_task,
            dataset=self.dataset,
            data_dir=data_dir,
            model=self.model,
            partition=self.partition,
            alpha=self.alpha,
            num_partitions=self.clients,
            seed=self.seed,
        )
        task = load(validation=sized(self.validation, 100))
        if not self.hold_out:  # FedFisher's experiments leave them with the clients
            task = replace(task, parts=load().parts)
        task = self.from_start(task)
        return poisoned(task, self.poison) if self.poison else task

    def from_start(self, task: Task) -> Task:
        """Return the task with this setting's initial weights."""
        if not self.start:
            return task
        return replace(task, seed=1000 * self.start + self.seed)

    @property
    def folder(self) -> Path:
        """Where the uploads are kept."""
        told = asdict(self)
        for name in LATER:
            if told[name] == getattr(Setting, name):
                del told[name]
        key = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]
        dataset = self.dataset.replace(":", "-")
        name = f"{dataset}-{self.model}-a{self.alpha}-s{self.seed}-{key}"
        return CACHE / name


def posteriors(
    setting: Setting,
    task: Task,
    structure: str = "kfac",
    *,
    averaged: bool = False,
    clients: Iterable[int] | None = None,
) -> list[LocalPosterior]:
    """Return every client's upload, or some clients'; train those not on disk.

    `averaged` ones hold the mean of the last epochs' parameters (``LocalSGD``'s
    `swa_epochs`), of the same training.
    """
    found = []
    kind = f"{MEAN}{structure}/" if averaged else f"{structure}/"
    for client in range(setting.clients) if clients is None else clients:
        path = setting.folder / f"client-{client}.safetensors"
        if not path.exists():
            _train(setting, task, client, path)
        tensors = load_file(path)
        params = {k: v for k, v in tensors.items() if "/" not in k}
        if averaged:
            params = {key: tensors[MEAN + key] for key in params}
        extras = {
            key.removeprefix(kind): value
            for key, value in tensors.items()
            if key.startswith(kind)
        }
        curvature = tensors_to_curvature(extras, params)
        found.append(LocalPosterior(params, curvature, task.num_examples(client)))
    return found


def _train(setting: Setting, task: Task, client: int, path: Path) -> None:
    torch.manual_seed(1000 * setting.seed + client)
    device = default_device()
    model = task.make_model().to(device)
    average = AveragedModel(model)

    def on_epoch(epoch: int, _: float) -> None:
        if epoch > setting.epochs - setting.averaged:
            average.update_parameters(model)

    train = LocalSGD(
        epochs=sized(setting.epochs, 1),
        lr=setting.lr,
        momentum=setting.momentum,
        weight_decay=setting.weight_decay,
        label_smoothing=setting.label_smoothing,
        on_epoch=on_epoch,
    )
    train(model, task.train_loader(client, setting.batch_size), device, {})
    images = task.train_images(client)
    if setting.budget:
        loader = task.eval_loader(images, batch_size=64)
        curvature = fisher_within_budget(model, loader, client, len(images))
        laid_out = curvature_to_tensors(curvature)
        kfac = {f"kfac/{key}": value for key, value in laid_out.items()}
        return _keep(shared_state(model) | kfac, path, client)
    if setting.examples is not None:
        images = images.subset(torch.randperm(len(images))[: setting.examples].tolist())
    loader = task.eval_loader(images, batch_size=256)
    tensors = _laid_out(model, loader)
    if setting.averaged:
        mean = _laid_out(average.module, loader)
        tensors |= {f"{MEAN}{key}": value for key, value in mean.items()}
    return _keep(tensors, path, client)


def _keep(tensors: dict[str, Tensor], path: Path, client: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({k: v.contiguous() for k, v in tensors.items()}, partial)
    partial.rename(path)
    print(f"{path.parent.name} client {client}", flush=True)


def fisher_within_budget(
    model: nn.Module, loader: Loader, client: int, examples: int
) -> Curvature:
    """Return a client's K-FAC as ``FedFisherOneShot`` asks for it by default.

    `examples` is how many the client has.
    """
    options = FisherOptions()
    return fisher(model, loader, options=options, num_examples=examples, seed=client)


def _laid_out(model: nn.Module, loader: Loader) -> dict[str, Tensor]:
    """Return the parameters, and both Fishers under their names."""
    tensors = shared_state(model)
    options = FisherOptions.full(tolerance=0)
    for structure in ("kfac", "diagonal"):
        curvature = fisher(model, loader, structure, options=options)
        laid_out = curvature_to_tensors(curvature)
        tensors |= {f"{structure}/{k}": v for k, v in laid_out.items()}
    assert all(PREFIX in key for key in tensors if "/" in key)
    return tensors
