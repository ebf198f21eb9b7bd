"""DENSE and Co-Boosting: their terms by hand, and that students learn from models."""

import copy
import sys

import pytest
import rivals_path  # noqa: F401
import torch
import torch.nn.functional as F
from oracles import randn
from rivals import Normalised, co_boosting, dense
from rivals.co_boosting import harder, reweighted
from rivals.images import generator_of, reset
from rivals.losses import disagreement, divergence, hard_cross_entropy, statistics_of
from rivals.synthesis import Synthesis
from rivals.teacher import Ensemble
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


def test_co_boosting_takes_the_steps_that_it_says(monkeypatch):
    module = sys.modules["rivals.co_boosting"]
    models, student = [net(0), net(1)], net(9, True)
    rates, moves, made = [], [], []

    def reweigh(*arguments):
        rates.append(arguments[3])
        return reweighted(*arguments)

    def move(teacher, shown, distance):
        moves.append(distance)
        assert student.training
        return harder(teacher, shown, distance)

    def synthesise(generator, loss, num_classes, how):
        assert not student.training
        images, labels = torch.rand(32, *SHAPE), torch.arange(32) % 4
        if not made:  # the ensemble's weights are equal yet
            both = Ensemble.of(models), student
            logits, own = (model(INPUTS(images)).detach() for model in both)
            want = hard_cross_entropy(logits, labels, 2.0)
            want -= 0.5 * divergence(own, logits, 3.0).mean()
            torch.testing.assert_close(loss(images, labels).detach(), want)
        made.append(how)
        return images, labels

    monkeypatch.setattr(module, "reweighted", reweigh)
    monkeypatch.setattr(module, "harder", move)
    monkeypatch.setattr(module, "synthesised", synthesise)
    co_boosting(
        models, student, INPUTS, num_classes=4, epochs=3, batch_size=32,
        weight_lr=0.1, weight_decay_rate=0.5, perturbation=0.2, hardness=2.0,
        adversarial=0.5,
    )  # fmt: skip
    assert rates == [0.05] * 2 + [0.025] * 3  # a step on each batch, from the second on
    assert moves == [0.2] * 6
    assert [(how.clip, how.count) for how in made] == [(10.0, 32)] * 3


def test_denses_loss_is_the_sum_of_its_three_terms(monkeypatch):
    module = sys.modules["rivals.dense"]
    monkeypatch.setattr(module, "augmented", lambda images: images)
    models, student = [net(i, True).eval() for i in range(2)], net(9, True)
    checked = []

    def synthesise(generator, loss, num_classes, how):
        images, labels = torch.rand(32, *SHAPE), torch.arange(32) % 4
        other = copy.deepcopy(student).train()
        assert student.training
        with statistics_of(models) as found:
            logits = sum(model(INPUTS(images)) for model in models) / 2
        apart = disagreement(other(INPUTS(images)), logits)
        want = F.cross_entropy(logits, labels) + 3.0 * sum(found) - 2.0 * apart
        for _ in range(2):  # what batch norms collect is of one pass alone
            torch.testing.assert_close(loss(images, labels), want)
        checked.append(how)
        return images, labels

    monkeypatch.setattr(module, "synthesised", synthesise)
    own = {"num_classes": 4, "epochs": 1, "batch_norm": 3.0, "adversarial": 2.0}
    dense(models, student, INPUTS, **own)
    assert checked
