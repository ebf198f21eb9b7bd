"""Co-Boosting: harder images and a better ensemble (Dai et al., ICLR 2024)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flwr_fisher.errors import check_whole
from flwr_fisher.randomness import seeded
from rivals.images import Normalised, Pool, generator_of
from rivals.losses import divergence, hard_cross_entropy
from rivals.synthesis import Synthesis, synthesised
from rivals.teacher import Best, Ensemble, Score

_CLIP = 10.0  # of the gradients, the released code's
_APART, _SOFT = 3.0, 4.0  # temperatures of the adversarial term, and of the rest


def co_boosting(
    models: Sequence[nn.Module],
    student: nn.Module,
    inputs: Normalised,
    *,
    num_classes: int,
    epochs: int = 200,
    synthesis: Synthesis | None = None,
    hardness: float = 1.0,
    adversarial: float = 1.0,
    perturbation: float = 8 / 255,
    weight_lr: float = 0.01,
    weight_decay_rate: float = 0.99,
    lr: float = 0.01,
    momentum: float = 0.9,
    batch_size: int = 128,
    score: Score | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    r"""Distil clients' networks as :func:`dense` does, boosting images and ensemble.

    Images are made to be hard: their cross-entropy counts by :math:`1 - p_y`, and the
    student's divergence from the ensemble is made large wherever it is. Before the
    student is shown them, they are moved by the sign of the gradient of a random mix of
    the ensemble's probabilities. From the second epoch on, clients' weights in the
    ensemble take steps of :math:`\mu\,0.99^{epoch}` against the sign of the gradient of
    its cross-entropy on all images, within [0, 1]. The released code's settings.

    Parameters
    ----------
    models, student, inputs, num_classes, epochs, synthesis, score, seed
        As for :func:`dense`; its batches are of 128 images.
    hardness : float, default 1
        The power of :math:`1 - p_y`.
    adversarial : float, default 1
        The weight of the student's divergence, at temperature 3.
    perturbation : float, default 8 / 255
        How far an image's normalised pixels are moved.
    weight_lr, weight_decay_rate : float
        :math:`\mu`, and what it is multiplied by each epoch.
    lr, momentum, batch_size
        The student's; its rate follows half a cosine, at temperature 4, with a weight
        decay of 1e-4.

    Raises
    ------
    ConfigurationError
        If there is no model, or a number is out of range.
    """
    check_whole("epochs", epochs, 1)
    teacher, pool, best = Ensemble.of(models), Pool(), Best(score)
    how = synthesis or Synthesis(count=batch_size, clip=_CLIP)
    optimizer = torch.optim.SGD(student.parameters(), lr, momentum, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    with seeded(seed), teacher.frozen():
        generator = generator_of(inputs.shape, how.latent, how.width)
        generator.to(teacher.device)

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            shown = inputs(images)
            logits, own = teacher(shown), student(shown)
            apart = divergence(own, logits, _APART).mean()
            return hard_cross_entropy(logits, labels, hardness) - adversarial * apart

        for epoch in range(epochs):
            student.eval()
            pool.add(*synthesised(generator, loss, num_classes, how))
            if epoch:
                rate = weight_lr * weight_decay_rate**epoch
                for images, labels in pool.batches(batch_size):
                    teacher.weights = reweighted(
                        teacher.weights, teacher.each(inputs(images)), labels, rate
                    )
            student.train()
            for images, _ in pool.batches(batch_size):
                shown = harder(teacher, inputs(images), perturbation)
                with torch.no_grad():
                    wanted = teacher(shown)
                optimizer.zero_grad()
                apart = divergence(student(shown), wanted, _SOFT).mean()
                apart.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(student.parameters(), _CLIP)
                optimizer.step()
            schedule.step()
            best.look(student)
    return dict(best.params)


def reweighted(weights: Tensor, logits: Tensor, labels: Tensor, rate: float) -> Tensor:
    """Return an ensemble's weights after a step by signs, within [0, 1].

    Parameters
    ----------
    weights : Tensor
        ``[clients]``.
    logits : Tensor
        Each client's, ``[clients, n, C]``.
    labels : Tensor
        ``[n]``.
    rate : float
        The step.
    """
    weights = weights.detach().requires_grad_()
    mixed = torch.tensordot(weights, logits.detach(), 1)
    (gradient,) = torch.autograd.grad(F.cross_entropy(mixed, labels), weights)
    return (weights.detach() - rate * gradient.sign()).clamp(0, 1)


def harder(teacher: Ensemble, shown: Tensor, distance: float) -> Tensor:
    """Move inputs to where a random mix of the ensemble's probabilities grows fastest.

    Output diversified sampling (Tashiro et al., NeurIPS 2020), at temperature 4.
    """
    shown = shown.detach().requires_grad_()
    probabilities = F.softmax(teacher(shown) / _SOFT, 1)
    mix = torch.empty_like(probabilities).uniform_(-1, 1)
    (gradient,) = torch.autograd.grad((mix * probabilities).sum(), shown)
    return (shown + distance * gradient.sign()).detach()
