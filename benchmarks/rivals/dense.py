"""DENSE: data-free one-shot federated learning (Zhang et al., NeurIPS 2022)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flwr_fisher.errors import check_whole
from flwr_fisher.randomness import seeded
from rivals.images import Normalised, Pool, augmented, generator_of
from rivals.losses import disagreement, divergence, statistics_of
from rivals.synthesis import Synthesis, synthesised
from rivals.teacher import Best, Ensemble, Score


def dense(
    models: Sequence[nn.Module],
    student: nn.Module,
    inputs: Normalised,
    *,
    num_classes: int,
    epochs: int = 200,
    synthesis: Synthesis | None = None,
    batch_norm: float = 1.0,
    adversarial: float = 0.5,
    lr: float = 0.01,
    momentum: float = 0.9,
    batch_size: int = 256,
    score: Score | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    r"""Distil clients' networks into one, on images that a generator makes of them.

    An epoch trains a generator, anew, to make images which the ensemble (the mean of
    the clients' logits, D) takes for random classes, with the statistics that its batch
    norms know, and on which the student S does not agree with it (eq. 2 to 5):

    .. math:: L = \mathrm{CE}(D, y) + \lambda_1 L_{BN}
              - \lambda_2\, E[\omega\, \mathrm{KL}(D \| S)],

    :math:`\omega` = 1 where their classes differ. The best batch joins all earlier
    ones, on each of which the student then takes a step towards the ensemble's
    probabilities (eq. 6). Defaults are those that the FedFisher paper names
    (:math:`T_G` = 30, :math:`\lambda_1` = 1, :math:`\lambda_2` = 0.5, SGD), and the
    released code's where it names none; without batch norm the second term is 0.

    Parameters
    ----------
    models : Sequence[nn.Module]
        The clients', which take `inputs` and return logits; left as they are, on one
        device.
    student : nn.Module
        Trained; any network of as many classes, on the clients' device.
    inputs : Normalised
        What the networks are shown.
    num_classes : int
        How many classes there are.
    epochs : int, default 200
        How many batches are made; the last epoch takes a step on each of them.
    synthesis : Synthesis, optional
        How a batch is made.
    batch_norm, adversarial : float
        :math:`\lambda_1` and :math:`\lambda_2`.
    lr, momentum, batch_size
        The student's.
    score : Callable, optional
        Scores parameters on the server's data after each epoch: the best are returned.
        Without it, the last.
    seed : int, default 0
        Of all that is drawn.

    Returns
    -------
    dict[str, Tensor]
        The student's parameters and buffers.

    Raises
    ------
    ConfigurationError
        If there is no model, or a number is out of range.
    """
    check_whole("epochs", epochs, 1)
    teacher, pool, best = Ensemble.of(models), Pool(), Best(score)
    how = synthesis or Synthesis()
    optimizer = torch.optim.SGD(student.parameters(), lr, momentum)
    with seeded(seed), teacher.frozen(), statistics_of(models) as found:
        generator = generator_of(inputs.shape, how.latent, how.width)
        generator.to(teacher.device)

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            found.clear()
            shown = inputs(augmented(images))
            logits, own = teacher(shown), student(shown)
            total = F.cross_entropy(logits, labels)
            total = total - adversarial * disagreement(own, logits)
            return total + batch_norm * sum(found) if found else total

        for _ in range(epochs):
            student.train()
            pool.add(*synthesised(generator, loss, num_classes, how))
            for images, _ in pool.batches(batch_size):
                shown = inputs(images)
                with torch.no_grad():
                    wanted = teacher(shown)
                optimizer.zero_grad()
                apart = divergence(student(shown), wanted).mean()
                apart.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            best.look(student)
    return dict(best.params)
