"""What generators and students of data-free distillation descend."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Return :math:`T^2\,\mathrm{KL}(p_{teacher} \| p_{student})` by example.

    Both are logits ``[n, C]``; probabilities are softmaxes of a T-th of them (Hinton et
    al. 2015).

    Examples
    --------
    >>> divergence(torch.zeros(1, 2), torch.tensor([[0.0, 1.0986123]]))
    tensor([0.1308])
    """
    log_q = F.log_softmax(student / temperature, 1)
    log_p = F.log_softmax(teacher / temperature, 1)
    return temperature**2 * (log_p.exp() * (log_p - log_q)).sum(1)


def disagreement(student: Tensor, teacher: Tensor) -> Tensor:
    """Return DENSE's boundary term: the mean divergence where the two classes differ.

    Zero for examples on which student and teacher agree; what the generator is to make
    large.
    """
    differ = student.argmax(1) != teacher.argmax(1)
    return (divergence(student, teacher) * differ).mean()


def hard_cross_entropy(logits: Tensor, labels: Tensor, power: float) -> Tensor:
    r"""Return Co-Boosting's mean of :math:`(1 - p_y)^{power} \cdot (-\log p_y)`.

    The first factor has no gradient: examples that the ensemble finds hard count more.
    """
    log_p = F.log_softmax(logits, 1).gather(1, labels.unsqueeze(1)).squeeze(1)
    return ((1 - log_p.detach().exp()) ** power * -log_p).mean()


@contextmanager
def statistics_of(models: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect how far each batch norm's inputs are from what it has seen in training.

    The distances of means and variances from the running ones, which each forward pass
    adds to the list (DeepInversion; Yin et al., CVPR 2020).
    """
    found: list[Tensor] = []

    def collect(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(module, nn.BatchNorm2d)
        assert module.running_mean is not None
        assert module.running_var is not None
        variance, mean = torch.var_mean(args[0], (0, 2, 3), correction=0)
        apart = (mean - module.running_mean).norm()
        found.append(apart + (variance - module.running_var).norm())

    norms = [m for model in models for m in model.modules()]
    handles = [
        m.register_forward_pre_hook(collect)
        for m in norms
        if isinstance(m, nn.BatchNorm2d) and m.track_running_stats
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
