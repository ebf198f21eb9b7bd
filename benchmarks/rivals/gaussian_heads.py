"""FedCGS and GH-OFL: a frozen network's head from the moments of its features."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_fisher.errors import ConfigurationError, check_range
from flwr_fisher.tangent.frozen_head import HeadSums

_LEAST = 1e-12  # a class's share of the examples: one that nobody has is not foretold
_JITTER = 1e-6  # what GH-OFL's released code adds to its covariance's diagonal


def fedcgs(sums: HeadSums) -> tuple[Tensor, Tensor]:
    r"""Return FedCGS's head (Guan et al., AAAI 2025, arXiv 2503.06962).

    Clients send each class's number of examples and sum of features, and the sum of
    :math:`f f^\top`; classes are taken for Gaussians of one covariance:

    .. math:: w_c = \Sigma^{-1} \mu_c, \qquad
              b_c = \log\frac{n_c}{n} - \tfrac12 \mu_c^\top \Sigma^{-1} \mu_c.

    As in the paper and its code (Yuqin-G/FedCGS, without its :math:`\gamma`, which is
    0), :math:`\Sigma` is the covariance of *all* features about their common mean; that
    of a Gaussian classifier is within classes (:func:`gh_lda`). The code inverts it;
    here a feature that is always 0 counts for nothing.

    Parameters
    ----------
    sums : HeadSums
        Over all clients, of a head with a bias: what AFL's clients send
        (``flwr_fisher.tangent.frozen_head.head_sums``) is all that is needed.

    Returns
    -------
    tuple[Tensor, Tensor]
        The weight ``[C, f]`` and the bias ``[C]``, in float64.

    Raises
    ------
    ConfigurationError
        If the sums are of a head without bias, which lack the counts.
    """
    found = _Moments.of(sums)
    mean = found.total / found.count
    about = found.gram - found.count * torch.outer(mean, mean)
    return found.head(about / (found.count - 1))


def gh_lda(sums: HeadSums, *, shrink: float = 0.05) -> tuple[Tensor, Tensor]:
    r"""Return GH-OFL's linear head (Turazza et al., ICLR 2026, arXiv 2602.01186).

    Of the same sums as :func:`fedcgs`, with the covariance within classes, over
    :math:`n - C`, drawn to a multiple of the identity of its trace. This is "GH-LDA";
    of that paper's other heads some need every class's covariance (C times the upload),
    and two are trained on features that the server draws.

    Parameters
    ----------
    sums : HeadSums
        As for :func:`fedcgs`.
    shrink : float, default 0.05
        In [0, 1]; the default is the released code's (FabioTur-dev/One-Shot-FL).

    Returns
    -------
    tuple[Tensor, Tensor]
        The weight ``[C, f]`` and the bias ``[C]``, in float64.

    Raises
    ------
    ConfigurationError
        If `shrink` is out of range, or the sums are of a head without bias.
    """
    check_range("shrink", shrink, 0, 1)
    found = _Moments.of(sums)
    classes, features = found.means.shape
    within = found.gram - (found.means.mT * found.counts) @ found.means
    within = within / (found.count - classes)
    level = float(within.trace()) / features
    drawn = (1 - shrink) * within + (shrink * level + _JITTER) * torch.eye(features)
    return found.head(drawn)


@dataclass(frozen=True)
class _Moments:
    """The moments of features, in float64: of all, and class by class."""

    gram: Tensor  # [f, f]
    total: Tensor  # [f]
    count: float
    means: Tensor  # [C, f]
    counts: Tensor  # [C]

    @staticmethod
    def of(sums: HeadSums) -> "_Moments":
        """Take apart the sums of features that end in a 1."""
        gram, counts = sums.gram[:-1, :-1], sums.cross[-1]
        count = float(sums.gram[-1, -1])
        if not count == float(counts.sum()) == sums.count:
            raise ConfigurationError(
                "a Gaussian head needs the classes' counts, which are in the sums of a "
                "head with a bias and of classes as labels"
            )
        means = sums.cross[:-1].mT / counts.clamp(min=1).unsqueeze(1)
        return _Moments(gram, sums.gram[:-1, -1], count, means, counts)

    def head(self, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Return the linear classifier of Gaussians that share a covariance."""
        weight = self.means @ torch.linalg.pinv(covariance, hermitian=True)
        prior = (self.counts / self.count).clamp(min=_LEAST).log()
        return weight, prior - (weight * self.means).sum(1) / 2
