"""DENSE and Co-Boosting: their terms by hand, and that students learn from models."""

import pytest
import rivals_path  # noqa: F401
import torch
from oracles import randn
from rivals import Normalised, co_boosting, dense
from rivals.images import generator_of, reset
from rivals.losses import divergence
from rivals.synthesis import Synthesis
from torch import nn

SHAPE = (1, 8, 8)
INPUTS = Normalised(SHAPE, (0.5,), (0.5,))
SMALL = Synthesis(steps=4, count=32, latent=8, width=4)


def net(seed, norm=False):
    torch.manual_seed(seed)
    middle = [nn.BatchNorm2d(3)] if norm else []
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), *middle, nn.ReLU(), nn.Flatten(), nn.Linear(108, 4)
    )


# Terms by hand


# Images


# Whole runs


@torch.no_grad()
def apart(student, models, batch):
    student.eval()
    logits = torch.stack([model(batch) for model in models]).mean(0)
    return float(divergence(student(batch), logits).mean())


@pytest.mark.parametrize(
    ("method", "norm"), [(dense, True), (dense, False), (co_boosting, True)]
)
def test_a_student_comes_nearer_to_the_ensemble(method, norm):
    models, student = [net(i, norm).eval() for i in range(3)], net(9, norm)
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in models]
    [*models[0].modules()][-1].train()  # a layer in another mode than the others
    modes = [[m.training for m in model.modules()] for model in models]
    generator = generator_of(SHAPE, 8, 4)
    reset(generator)
    batch = INPUTS(generator(randn(3, 64, 8))).detach()
    first = apart(student, models, batch)
    params = method(
        models, student, INPUTS, num_classes=4, epochs=8, synthesis=SMALL,
        batch_size=16, lr=0.1,
    )  # fmt: skip
    student.load_state_dict(params)
    assert apart(student, models, batch) < 0.5 * first
    for model, own in zip(models, before, strict=True):
        assert all(torch.equal(v, own[k]) for k, v in model.state_dict().items())
        assert all(p.requires_grad for p in model.parameters())
    assert modes == [[m.training for m in model.modules()] for model in models]


# What is done in an epoch
