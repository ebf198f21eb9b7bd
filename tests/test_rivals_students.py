"""DENSE and Co-Boosting: their terms by hand, and that students learn from models."""

import copy
import math
import sys
from itertools import product

import pytest
import rivals_path  # noqa: F401
import torch
import torch.nn.functional as F
from oracles import randn
from rivals import Normalised, co_boosting, dense
from rivals.co_boosting import harder, reweighted
from rivals.images import augmented, generator_of, reset
from rivals.losses import disagreement, divergence, hard_cross_entropy, statistics_of
from rivals.synthesis import Synthesis, synthesised
from rivals.teacher import Ensemble
from torch import nn

from flwr_fisher.errors import ConfigurationError

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


def test_the_divergence_is_the_sum_over_classes():
    student, teacher = (
        torch.log(torch.tensor([[0.2, 0.8]])),
        torch.log(torch.tensor([[0.5, 0.5]])),
    )
    want = 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.8)
    assert float(divergence(student, teacher)) == pytest.approx(want)
    # At T = 2 the student's probabilities go with roots: 1/3 and 2/3.
    want = 4 * (0.5 * math.log(0.5 * 3) + 0.5 * math.log(0.5 * 3 / 2))
    assert float(divergence(student, teacher, 2.0)) == pytest.approx(want)


def test_only_examples_with_other_classes_disagree():
    student, teacher = torch.tensor([[2.0, 0], [0, 2.0]]), torch.tensor([[1.0, 0]] * 2)
    second = float(divergence(student, teacher)[1])
    assert float(disagreement(student, teacher)) == pytest.approx(second / 2)


def test_hard_examples_count_by_what_is_missing():
    logits = torch.log(torch.tensor([[0.9, 0.1], [0.3, 0.7]])).requires_grad_()
    labels = torch.tensor([0, 0])
    loss = hard_cross_entropy(logits, labels, 2.0)
    want = (0.01 * -math.log(0.9) + 0.49 * -math.log(0.3)) / 2
    assert float(loss.detach()) == pytest.approx(want)
    # The factor has no gradient: that of the cross-entropy, p - 1 and p, times it.
    loss.backward()
    want_grad = torch.tensor([[-0.1 * 0.01, 0.1 * 0.01], [-0.7 * 0.49, 0.7 * 0.49]]) / 2
    torch.testing.assert_close(logits.grad, want_grad)


def test_batch_norms_tell_how_far_their_inputs_are():
    norm = nn.BatchNorm2d(2).eval()
    x = randn(0, 5, 2, 3, 3)
    with statistics_of([norm]) as found:
        norm(x)
        norm(x)
    values = x.transpose(0, 1).flatten(1)
    want = values.mean(1).norm() + (values.var(1, correction=0) - 1).norm()
    torch.testing.assert_close(torch.stack(found), want.expand(2))
    norm(x)
    assert len(found) == 2


def test_weights_step_against_the_gradients_sign_and_stay_within_bounds():
    logits = torch.stack([torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 3.0]])])
    weights = reweighted(torch.tensor([0.5, 0.005]), logits, torch.tensor([0]), 0.01)
    torch.testing.assert_close(weights, torch.tensor([0.51, 0.0]))


def test_inputs_are_moved_by_the_sign_of_a_gradient():
    torch.manual_seed(0)
    teacher = Ensemble.of([net(0), net(1)])
    x = randn(0, 3, *SHAPE)
    moved = (harder(teacher, x, 0.25) - x).abs()
    assert moved.max() == pytest.approx(0.25, abs=1e-6)
    assert ((moved < 1e-6) | ((moved - 0.25).abs() < 1e-6)).all()


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


@pytest.mark.parametrize("method", [dense, co_boosting])
def test_it_repeats_and_leaves_random_numbers_alone(method):
    models, students = [net(i) for i in range(2)], [net(9) for _ in range(2)]
    torch.manual_seed(5)
    want = torch.rand(1)
    torch.manual_seed(5)
    found = [
        method(models, student, INPUTS, num_classes=4, epochs=2, synthesis=SMALL)
        for student in students
    ]
    assert torch.equal(torch.rand(1), want)
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name])


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


def test_images_are_moved_to_all_places_and_half_of_them_flipped():
    torch.manual_seed(0)
    images = torch.arange(1.0, 65).reshape(1, 1, 8, 8).expand(400, 1, 8, 8)
    padded = F.pad(images[0, 0], [4] * 4)
    crops = {}
    for top, left in product(range(9), range(9)):
        crop = padded[top : top + 8, left : left + 8]
        crops |= {(top, left, False): crop, (top, left, True): crop.flip(-1)}
    found = [
        next(place for place, crop in crops.items() if torch.equal(crop, image[0]))
        for image in augmented(images)
    ]
    tops, lefts, flips = zip(*found, strict=True)
    assert set(tops) == set(lefts) == set(range(9))
    assert 150 < sum(flips) < 250


def test_the_batch_of_the_lowest_loss_is_kept_of_a_new_generator():
    torch.manual_seed(0)
    generator, seen = generator_of(SHAPE, 8, 4), []
    with torch.no_grad():
        for parameter in generator.parameters():
            parameter.fill_(7.0)

    def loss(images, labels):
        assert set(labels.tolist()) <= set(range(4))
        seen.append(images.detach())
        return images.mean() * 0 + (len(seen) - 2) ** 2

    images, labels = synthesised(generator, loss, 4, SMALL)
    assert torch.equal(images, seen[1])
    assert labels.shape == (32,)
    assert seen[0].std() > 0
    assert seen[0].max() < 1  # of the weights that were there it would be 1


def test_an_ensemble_is_the_mean_of_logits_and_frozen_for_a_while():
    models, x = [net(i) for i in range(3)], randn(0, 5, *SHAPE)
    want = sum(model(x) for model in models) / 3
    torch.testing.assert_close(Ensemble.of(models)(x), want)
    model = net(0, True).train()
    model[0].weight.requires_grad_(False)
    with Ensemble.of([model]).frozen():
        assert not model.training
        assert not any(p.requires_grad for p in model.parameters())
    assert model.training
    assert model[0].bias.requires_grad
    assert not model[0].weight.requires_grad


@pytest.mark.parametrize(
    ("make", "culprit"),
    [
        (lambda: Normalised((1, 30, 28), (0.0,), (1.0,)), "multiples"),
        (lambda: Normalised((1, 28), (0.0,), (1.0,)), "multiples"),
        (lambda: Normalised((3, 28, 28), (0.0,), (1.0,)), "channels"),
        (lambda: Normalised((1, 28, 28), (0.0,), (0.0,)), "channels"),
        (lambda: Ensemble.of([]), "no client's model"),
        (lambda: dense([net(0)], net(9), INPUTS, num_classes=4, epochs=0), "epochs"),
        (lambda: Synthesis(count=1), "count"),
        (lambda: Synthesis(clip=0), "clip"),
    ],
)
def test_what_cannot_be_is_refused(make, culprit):
    with pytest.raises(ConfigurationError, match=culprit):
        make()
