"""What rivals are given on one split, and how each is run and timed."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

from harness.timing import seconds
from harness.uploads import Setting, posteriors
from tasks import Task
from torch import Tensor, nn

from flwr_fisher.curvature import FisherOptions, fisher
from flwr_fisher.merge import LocalPosterior
from flwr_fisher.report import accuracies

# The processor's, which other programmes beside it do not lengthen.
_seconds = partial(seconds, clock=process_time)
Params = Mapping[str, Tensor]
Made = Callable[[], Params]
Found = dict[str, dict[str, float]]  # accuracy and passes, by method


@dataclass
class Rivals:
    """One split: what methods are given, and what they make of it."""

    task: Task
    model: nn.Module
    held: list[Any]
    test: list[Any]
    a_pass: float  # seconds
    found: Found = field(default_factory=dict)

    def score(self, params: Params) -> float:
        """Return the accuracy on the server's examples."""
        return self._accuracy(params, self.held)

    def _accuracy(self, params: Params, batches: list[Any]) -> float:
        return accuracies(resized(self.model, params), {"x": params}, batches)["x"]

    def run(self, name: str, *candidates: Made, before: float = 0.0) -> None:
        """Make a model in each way; the one that scores best on the server's is it.

        `before` are seconds that went to what the candidates have in common.
        """
        made: list[Params] = []
        took = before + sum(_seconds(lambda c=c: made.append(c())) for c in candidates)
        best = max(made, key=self.score) if len(made) > 1 else made[0]
        accuracy = 100 * self._accuracy(best, self.test)
        self.found[name] = {"accuracy": accuracy, "passes": took / self.a_pass}


def started(setting: Setting, data_dir: Path) -> Rivals:
    """Return a split on which nothing has been run."""
    task = setting.task(data_dir)
    model, held = task.make_model(), list(task.eval_loader(task.validation))
    test = list(task.test_loader())
    return Rivals(task, model, held, test, a_pass(model, task.validation))


def resized(model: nn.Module, params: Params) -> nn.Module:
    """Return a copy of a chain of layers with as many units as the parameters have."""
    wide = copy.deepcopy(model)
    for name, value in params.items():
        layer, _, kind = name.rpartition(".")
        setattr(wide.get_submodule(layer), kind, nn.Parameter(value.clone()))
    return wide


def a_pass(model: nn.Module, images: Any) -> float:
    """Return the median seconds of a forward and backward pass at batch 32."""
    x, y = images[list(range(32))]

    def work() -> None:
        nn.functional.cross_entropy(model(x), y).backward()

    return median(_seconds(work) for _ in range(30))


def given(setting: Setting, task: Task) -> dict[str, list[LocalPosterior]]:
    """Return the clients' uploads, by what they have beside their models."""
    kfac = posteriors(setting, task, "kfac")
    more: dict[str, list[LocalPosterior]] = {"diagonal": [], "empirical": []}
    for client, upload in enumerate(kfac):
        model = task.make_model()
        model.load_state_dict(dict(upload.params))
        loader = task.eval_loader(task.train_images(client), batch_size=256)
        labels = FisherOptions.full(expectation="empirical")
        empirical = fisher(model, loader, "kfac", options=labels)
        passes = FisherOptions.full(max_passes=3)
        diagonal = fisher(model, loader, "diagonal", options=passes)
        for kind, curvature in (("diagonal", diagonal), ("empirical", empirical)):
            own = LocalPosterior(upload.params, curvature, upload.num_examples)
            more[kind].append(own)
    return {"kfac": kfac, **more}


def positions_of(model: nn.Module, x: Tensor) -> dict[str, int]:
    """Return how many positions each convolution has, by its weight."""
    found: dict[str, int] = {}

    def look(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        found[f"{name}.weight"] = output[0, 0].numel()

    handles = [
        module.register_forward_hook(partial(look, name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d)
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return found
