"""What the rivals find on one split that need the clients again, or before training."""

import copy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from time import process_time
from typing import Any

import torch
from harness.size import sized
from harness.uploads import Setting, posteriors
from rivals import fedcgs, fens, gh_lda, logits_of, regmean_plus_plus
from tasks import Task
from torch import Tensor, nn

from flwr_fisher.tangent.frozen_head import HeadSums, closed_form_head, head_sums
from flwr_fisher.tangent.head import find_head
from studies.rivals.split import Found, Rivals, started

# RegMean++'s examples a client, of which the paper takes 256; FENS's share of them.
EXAMPLES, SHARE, ROUNDS = 1000, 0.1, sized(500, 3)
RIDGE = 1e-3  # AFL's, as on the page of pre-trained networks
PLUS, FENS = "RegMean++ *", "FENS (a sixth model weighs the five)"
AFL, CGS, LDA = (f"{name}, on a random network" for name in ("AFL", "FedCGS", "GH-LDA"))


def exchanges(setting: Setting, data_dir: Path) -> Found:
    """Return accuracy and cost of what needs the clients after their uploads."""
    split = started(setting, data_dir)
    task, uploads = split.task, posteriors(setting, split.task, "kfac")
    clients = [upload.params for upload in uploads]
    weights = [upload.num_examples for upload in uploads]
    batches = [_some(task, client, EXAMPLES) for client in range(len(clients))]
    merge = partial(regmean_plus_plus, split.model, clients, batches, weights)
    split.run(PLUS, *(partial(merge, off_diagonal=a) for a in (0.95, 0.1)))
    began = process_time()
    own = [
        logits_of(split.model, clients, _some(task, c, max(1, round(SHARE * n))))
        for c, n in enumerate(weights)
    ]
    aggregator = fens(*zip(*own, strict=True), rounds=ROUNDS, seed=setting.seed)
    took = process_time() - began
    z, labels = logits_of(split.model, clients, split.test)
    with torch.no_grad():
        right = float((aggregator(z).argmax(1) == labels).double().mean())
    split.found[FENS] = {"accuracy": 100 * right, "passes": took / split.a_pass}
    sent = ROUNDS * sum(p.numel() for p in aggregator.parameters())
    return {**split.found, "sizes": {"R": sent / _size(split)}}


def _some(task: Task, client: int, most: int) -> list[Any]:
    """Return batches of some of a client's examples, drawn once."""
    images = task.train_images(client)
    drawn = torch.randperm(len(images), generator=torch.Generator().manual_seed(client))
    return list(task.eval_loader(images.subset(drawn[:most].tolist())))


def heads(setting: Setting, data_dir: Path) -> Found:
    """Return accuracy and cost of heads on the network as it was before training.

    Sums over clients are those of their pooled data: splits of one seed have one start,
    and differ in nothing that a head sees.
    """
    return _heads(replace(setting, alpha=0.1), data_dir)


@cache
def _heads(setting: Setting, data_dir: Path) -> Found:
    split = started(setting, data_dir)
    name = find_head(split.model, None)
    model, layer = copy.deepcopy(split.model), split.model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    model.set_submodule(name, nn.Linear(layer.in_features, layer.out_features))
    began = process_time()
    every = [
        head_sums(model, split.task.eval_loader(split.task.train_images(client)), name)
        for client in range(setting.clients)
    ]
    sums, took = HeadSums.total(every), process_time() - began
    ridge = partial(closed_form_head, bias=True, ridge=RIDGE)
    for title, solve in ((AFL, ridge), (CGS, fedcgs), (LDA, gh_lda)):
        made = partial(_with_head, split.model, name, solve(sums))
        split.run(title, made, before=took)
    sent = sums.gram.numel() + sums.cross.numel()
    return {**split.found, "sizes": {"H": sent / _size(split) - 1}}


def _with_head(
    model: nn.Module, name: str, head: tuple[Tensor, ...]
) -> dict[str, Tensor]:
    """Return the network's parameters with another head, which has a bias."""
    own = dict(model.named_parameters())
    solved = zip(("weight", "bias"), head, strict=True)
    there = {f"{name}.{kind}": value.float() for kind, value in solved}
    return {k: p.detach() for k, p in own.items()} | there


def _size(split: Rivals) -> int:
    return sum(p.numel() for p in split.model.parameters())
