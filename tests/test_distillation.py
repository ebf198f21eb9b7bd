"""DENSE and Co-Boosting: their terms by hand, and that students learn from models."""

import math

import pytest
import torch
import torch.nn.functional as F
from oracles import randn
from torch import Tensor, nn

from flwr_fisher.distillation import Normalised, co_boosting, dense
from flwr_fisher.distillation.co_boosting import harder, reweighted
from flwr_fisher.distillation.images import Pool, augmented, generator_of, reset
from flwr_fisher.distillation.losses import (
    disagreement,
    divergence,
    hard_cross_entropy,
    statistics_of,
)
from flwr_fisher.distillation.synthesis import Synthesis, synthesised
from flwr_fisher.distillation.teacher import Ensemble
from flwr_fisher.errors import ConfigurationError

SHAPE = (1, 8, 8)
INPUTS = Normalised(SHAPE, (0.5,), (0.5,))
SMALL = Synthesis(steps=4, count=32, latent=8, width=4)


def net(seed: int, norm: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    middle = [nn.BatchNorm2d(3)] if norm else []
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), *middle, nn.ReLU(), nn.Flatten(), nn.Linear(108, 4)
    )


# Terms by hand


def test_the_divergence_is_the_sum_over_classes() -> None:
    student, teacher = (
        torch.log(torch.tensor([[0.2, 0.8]])),
        torch.log(torch.tensor([[0.5, 0.5]])),
    )
    want = 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.8)
    assert float(divergence(student, teacher)) == pytest.approx(want)
    # At T = 2 the student's probabilities go with roots: 1/3 and 2/3.
    want = 4 * (0.5 * math.log(0.5 * 3) + 0.5 * math.log(0.5 * 3 / 2))
    assert float(divergence(student, teacher, 2.0)) == pytest.approx(want)


def test_only_examples_with_other_classes_disagree() -> None:
    student, teacher = torch.tensor([[2.0, 0], [0, 2.0]]), torch.tensor([[1.0, 0]] * 2)
    second = float(divergence(student, teacher)[1])
    assert float(disagreement(student, teacher)) == pytest.approx(second / 2)


def test_hard_examples_count_by_what_is_missing() -> None:
    logits = torch.log(torch.tensor([[0.9, 0.1], [0.3, 0.7]])).requires_grad_()
    labels = torch.tensor([0, 0])
    loss = hard_cross_entropy(logits, labels, 2.0)
    want = (0.01 * -math.log(0.9) + 0.49 * -math.log(0.3)) / 2
    assert float(loss.detach()) == pytest.approx(want)
    # The factor has no gradient: that of the cross-entropy, p - 1 and p, times it.
    loss.backward()
    assert logits.grad is not None
    want_grad = torch.tensor([[-0.1 * 0.01, 0.1 * 0.01], [-0.7 * 0.49, 0.7 * 0.49]]) / 2
    torch.testing.assert_close(logits.grad, want_grad)


def test_batch_norms_tell_how_far_their_inputs_are() -> None:
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


def test_weights_step_against_the_gradients_sign_and_stay_within_bounds() -> None:
    logits = torch.stack([torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 3.0]])])
    weights = reweighted(torch.tensor([0.5, 0.005]), logits, torch.tensor([0]), 0.01)
    torch.testing.assert_close(weights, torch.tensor([0.51, 0.0]))


def test_inputs_are_moved_by_the_sign_of_a_gradient() -> None:
    torch.manual_seed(0)
    teacher = Ensemble.of([net(0), net(1)])
    x = randn(0, 3, *SHAPE)
    moved = (harder(teacher, x, 0.25) - x).abs()
    assert moved.max() == pytest.approx(0.25, abs=1e-6)
    assert ((moved < 1e-6) | ((moved - 0.25).abs() < 1e-6)).all()


# Images


def test_images_are_moved_and_flipped_and_no_pixel_is_made_up() -> None:
    torch.manual_seed(0)
    images = torch.arange(1.0, 65).reshape(1, 1, 8, 8).expand(40, 1, 8, 8)
    seen = augmented(images)
    assert seen.shape == images.shape
    values = set(range(65))
    assert {int(v) for v in seen.unique()} <= values
    assert len({tuple(image.flatten().tolist()) for image in seen}) > 20


def test_a_generator_makes_images_of_any_such_shape_in_range() -> None:
    for shape in ((1, 28, 28), (3, 32, 32), (2, 8, 12)):
        made = generator_of(shape, 5, 4)(torch.randn(3, 5))
        assert made.shape == (3, *shape)
        assert 0 <= made.min() <= made.max() <= 1


def test_the_best_batch_is_kept() -> None:
    torch.manual_seed(0)
    generator = generator_of(SHAPE, 8, 4)
    values: list[float] = []

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        assert labels.shape == (32,)
        values.append(float(images.detach().mean()))
        return images.mean()

    images, labels = synthesised(generator, loss, 4, SMALL)
    assert float(images.mean()) == pytest.approx(min(values))
    assert values[-1] < values[0]
    assert set(labels.tolist()) <= set(range(4))


def test_a_pool_yields_all_of_its_images_once() -> None:
    pool = Pool()
    for i in range(3):
        pool.add(torch.full((5, *SHAPE), float(i)), torch.full((5,), i))
    labels = torch.cat([y for _, y in pool.batches(4)])
    assert labels.bincount().tolist() == [5, 5, 5]


@pytest.mark.parametrize(
    ("shape", "mean", "std"),
    [
        ((1, 30, 28), (0.0,), (1.0,)),
        ((1, 28), (0.0,), (1.0,)),
        ((3, 28, 28), (0.0,), (1.0,)),
        ((1, 28, 28), (0.0,), (0.0,)),
    ],
)
def test_inputs_that_cannot_be_made_are_refused(shape, mean, std) -> None:
    with pytest.raises(ConfigurationError, match=r"multiples|channels need"):
        Normalised(shape, mean, std)


# Whole runs


@torch.no_grad()
def apart(student: nn.Module, models: list[nn.Module], batch: Tensor) -> float:
    student.eval()
    logits = torch.stack([model(batch) for model in models]).mean(0)
    return float(divergence(student(batch), logits).mean())


@pytest.mark.parametrize("method", [dense, co_boosting])
@pytest.mark.parametrize("norm", [True, False])
def test_a_student_comes_nearer_to_the_ensemble(method, norm: bool) -> None:
    models, student = [net(i, norm).eval() for i in range(3)], net(9, norm)
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in models]
    [*models[0].modules()][-1].train()  # a layer in another mode than the others
    modes = [[m.training for m in model.modules()] for model in models]
    generator = generator_of(SHAPE, 8, 4)
    reset(generator)
    batch = INPUTS(generator(randn(3, 64, 8))).detach()
    first = apart(student, models, batch)
    params = method(
        models, student, INPUTS, num_classes=4, epochs=15, synthesis=SMALL,
        batch_size=16, lr=0.05,
    )  # fmt: skip
    student.load_state_dict(params)
    assert apart(student, models, batch) < 0.5 * first
    for model, own in zip(models, before, strict=True):
        assert all(torch.equal(v, own[k]) for k, v in model.state_dict().items())
        assert all(p.requires_grad for p in model.parameters())
    assert modes == [[m.training for m in model.modules()] for model in models]


@pytest.mark.parametrize("method", [dense, co_boosting])
def test_it_repeats_and_leaves_random_numbers_alone(method) -> None:
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


def test_the_best_scored_student_is_returned() -> None:
    models, scores = [net(0)], iter([1.0, 3.0, 2.0])
    seen: list[dict[str, Tensor]] = []

    def score(params: dict[str, Tensor]) -> float:
        seen.append(params)
        return next(scores)

    found = dense(
        models, net(9), INPUTS, num_classes=4, epochs=3, synthesis=SMALL, score=score
    )
    assert all(torch.equal(found[k], seen[1][k]) for k in found)
    assert not torch.equal(found["0.weight"], seen[2]["0.weight"])


def test_the_ensemble_is_the_mean_of_logits() -> None:
    models, x = [net(i) for i in range(3)], randn(0, 5, *SHAPE)
    want = sum(model(x) for model in models) / 3
    torch.testing.assert_close(Ensemble.of(models)(x), want)
    with pytest.raises(ConfigurationError, match="no client's model"):
        Ensemble.of([])
    assert F.softmax(want, 1).shape == (5, 4)


@pytest.mark.parametrize("name", ["steps", "count", "lr", "latent", "width", "clip"])
def test_numbers_are_checked(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        Synthesis(**{name: 0})
