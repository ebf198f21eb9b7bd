r"""Likelihoods: how outputs define a distribution over labels, and its expectation.

A likelihood splits the Fisher with respect to one example's outputs into rank-one
pieces, :math:`\sum_k v_k v_k^\top`. Each piece costs one backward pass.
Outputs are seen as ``[n, T, C]``: C numbers at each of T independent positions, with
T = 1 for an ordinary classifier.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from flwr_fisher.curvature.data import (
    IGNORED,
    Batch,
    are_probabilities,
    check_classes,
    count_labels,
    is_whole,
)
from flwr_fisher.curvature.estimate.options import FisherOptions
from flwr_fisher.curvature.estimate.pieces import (
    GivenVectors,
    OutputVectors,
    Pieces,
    SoftmaxVectors,
    drawn,
    given_pieces,
)
from flwr_fisher.curvature.losses import check_same_shape
from flwr_fisher.curvature.operators.base import Diagonal
from flwr_fisher.errors import (
    ConfigurationError,
    DataError,
    StructureError,
    check_known,
)
from flwr_fisher.params import Sums, trainable, widened


class Likelihood(ABC):
    """A distribution over labels, given a model's outputs; base of users' own.

    For a loss that has no name here, derive from it, and pass an instance as the
    `likelihood` of :func:`~flwr_fisher.curvature.fisher` or of a ``FisherClient``.

    Examples
    --------
    Counts; the model returns the logarithm of their rate:

    >>> class Poisson(Likelihood):
    ...     def columns(self, outputs):
    ...         return outputs.exp().sqrt().reshape(1, len(outputs), -1, 1)
    ...
    ...     def sample_score(self, outputs, generator):
    ...         return torch.poisson(outputs.exp(), generator) - outputs.exp()
    ...
    ...     def score(self, outputs, labels):
    ...         return labels - outputs.exp()
    >>> from flwr_fisher.curvature import fisher
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(model.weight)  # so that every rate is 1
    >>> x = torch.tensor([[1.0], [3.0]])
    >>> fisher(model, [x], "diagonal", likelihood=Poisson()).diagonal()
    {'weight': tensor([[5.]])}
    """

    labels_are_classes: ClassVar[bool] = False
    """Whether outputs are logits of classes, so that there is an accuracy."""

    @abstractmethod
    def columns(self, outputs: Tensor) -> Tensor:
        r"""Return the rank-one pieces of the exact Fisher with respect to the outputs.

        Parameters
        ----------
        outputs : Tensor
            The outputs of a batch, ``[n, ...]``, seen as ``[n, T, C]``: C numbers at
            each of T positions, which are independent given the outputs.

        Returns
        -------
        Tensor
            ``[k, n, T, C]``, detached: :math:`v_1, …, v_k` at every position, whose
            :math:`\sum_i v_i v_i^\top` is the Fisher there.
        """

    @abstractmethod
    def sample_score(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return the gradient of the log-likelihood of labels drawn from the model.

        Parameters
        ----------
        outputs : Tensor
            ``[n, ...]``, on the CPU.
        generator : torch.Generator
            Draws them, on the CPU.

        Returns
        -------
        Tensor
            The gradient, in the outputs' shape.
        """

    @abstractmethod
    def score(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the gradient of the log-likelihood of given labels.

        Parameters
        ----------
        outputs, labels : Tensor
            ``[n, ...]``; each likelihood has its own form of labels.

        Returns
        -------
        Tensor
            The gradient, in the outputs' shape.
        """

    def num_labels(self, labels: Tensor) -> int:
        """Return how many terms a batch's mean loss has; at least 1.

        By default: how many examples have a label other than the integer -100.
        """
        if not is_whole(labels):
            return len(labels)
        return max(1, int((labels != IGNORED).reshape(len(labels), -1).any(1).sum()))

    def check_labels(self, outputs: Tensor, labels: Tensor) -> None:
        """Raise an error if labels show that the outputs have another meaning.

        It is called for each batch.
        """
        return

    def pieces(
        self,
        outputs: Tensor,
        max_passes: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Pieces:
        """Return the pieces of the Fisher with respect to a batch's outputs.

        Parameters
        ----------
        outputs : Tensor
            ``[n, ...]``.
        max_passes : int, optional
            About how many pieces an example may have; by default any number. If there
            are more, the result is an unbiased estimate.
        generator : torch.Generator, optional
            Draws the estimate.

        Raises
        ------
        StructureError
            If :meth:`columns` do not fit the outputs.
        """
        vectors = self.vectors(outputs, max_passes, generator)
        if max_passes is None or vectors.count * vectors.positions <= max_passes:
            return Pieces(vectors, outputs.shape)
        return Pieces(vectors, outputs.shape, generator)

    def vectors(
        self, outputs: Tensor, most: int | None, generator: torch.Generator | None
    ) -> OutputVectors:
        """Return the vectors of :meth:`columns`, or fewer that estimate their sum."""
        values = self.columns(outputs)
        fits = values.dim() == 4 and values[0].numel() == outputs.numel()
        if not fits or values.shape[1] != len(outputs):
            raise StructureError(
                f"{type(self).__name__}.columns returned shape {tuple(values.shape)} "
                f"for outputs of shape {tuple(outputs.shape)}: return [k, n, T, C]"
            )
        return GivenVectors(values)


class Categorical(Likelihood):
    """Softmax over the last dimension: ``[n, C]``, or ``[n, T, C]`` for tokens."""

    labels_are_classes = True

    def columns(self, outputs: Tensor) -> Tensor:
        """Return C - 1 pieces for each position; see :class:`SoftmaxVectors`."""
        vectors = self.vectors(outputs, None, None)
        every = torch.arange(vectors.count, device=outputs.device)
        return vectors.at(every.unsqueeze(1).expand(-1, len(outputs)))

    def vectors(
        self, outputs: Tensor, most: int | None, generator: torch.Generator | None
    ) -> OutputVectors:
        """Return these vectors, each computed when it is needed.

        If there are more than `most`, they are those of the ``most - 1`` likeliest
        classes, and one label that is drawn from the others.
        """
        logits = _at_least_2d(outputs)
        seen = logits.reshape(len(logits), -1, logits.shape[-1])
        return SoftmaxVectors(seen, most, generator)

    def sample_score(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return ``onehot(y) - p`` for y drawn from p."""
        p = _at_least_2d(outputs).softmax(-1)
        races = drawn(Tensor.exponential_, p, generator)
        return _from_probabilities((p / races).argmax(-1), p)

    def score(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return ``onehot(y) - p`` for labels ``[n]`` or ``[n, T]``, 0 for -100.

        Labels may be probabilities of the classes, in place of the one-hot ones.
        """
        p = _at_least_2d(outputs).softmax(-1)
        if labels.shape == p.shape:
            return labels.to(p.dtype) - p
        scores = _from_probabilities(labels.clamp_min(0), p)
        return scores.masked_fill((labels == IGNORED).unsqueeze(-1), 0)

    def num_labels(self, labels: Tensor) -> int:
        """Return the number of labels other than -100."""
        if labels.is_floating_point():  # probabilities, of every class
            return max(1, labels[..., 0].numel())
        return max(1, count_labels(labels))

    def check_labels(self, outputs: Tensor, labels: Tensor) -> None:
        """Raise an error for labels that are no classes of the outputs' last dimension.

        Raises
        ------
        DataError
            If a label is no class.
        StructureError
            If labels show that classes are the second dimension, PyTorch's order, or
            that outputs are no logits of classes.
        """
        shape = tuple(_at_least_2d(outputs).shape)
        if labels.shape == shape[:-1] and is_whole(labels):
            check_classes(labels, shape[-1])
        elif len(shape) > 2 and labels.shape == (shape[0], *shape[2:]):
            raise StructureError(
                "the labels show that the second dimension of the outputs, of shape "
                f"{shape}, is the classes: make it the last, by outputs.movedim(1, -1)"
            )
        elif labels.shape != shape or not are_probabilities(labels):
            raise StructureError(
                f"labels of shape {tuple(labels.shape)} and dtype {labels.dtype} are "
                f"neither classes nor probabilities of outputs of shape {shape}: pass "
                "likelihood='gaussian' for numbers, 'bernoulli' for sigmoids, or a "
                "Likelihood of your own; make one-hot labels floats, or classes by "
                "argmax(-1), in the data or by FisherClient(batch_fn=...)"
            )


class Bernoulli(Likelihood):
    """Independent sigmoids, with logits ``[n]`` or ``[n, …]`` and labels 0 or 1."""

    def columns(self, outputs: Tensor) -> Tensor:
        """Return one piece for each output, the square root of p (1 - p)."""
        flat = outputs.detach().reshape(len(outputs), -1, 1)
        return (flat.sigmoid() * (-flat).sigmoid()).sqrt().unsqueeze(0)

    def sample_score(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return ``y - p`` for y drawn from p."""
        numbers = drawn(Tensor.uniform_, outputs, generator)
        return _minus_sigmoid((numbers < outputs.sigmoid()).to(outputs), outputs)

    def score(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return ``y - p``."""
        return _minus_sigmoid(_same_shape(outputs, labels), outputs)

    def check_labels(self, outputs: Tensor, labels: Tensor) -> None:
        """Raise :class:`DataError` unless labels are from 0 to 1, one an output."""
        labels = _same_shape(outputs, labels)
        for wrong in labels[~((labels >= 0) & (labels <= 1))][:1]:
            raise DataError(
                f"label {float(wrong):g} is outside [0, 1], where labels of sigmoids "
                "are: there is none for a missing label, and -1 and 1 are not 0 and 1. "
                "Change them in the data, or by FisherClient(batch_fn=...)"
            )


class Gaussian(Likelihood):
    """Regression with unit variance: the loss is half the squared error."""

    def columns(self, outputs: Tensor) -> Tensor:
        """Return one piece for each output, with the entry 1."""
        return torch.ones_like(outputs.detach().reshape(1, len(outputs), -1, 1))

    def sample_score(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return standard normal noise."""
        return drawn(Tensor.normal_, outputs, generator)

    def score(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return ``y - output``."""
        return _same_shape(outputs, labels) - outputs

    def check_labels(self, outputs: Tensor, labels: Tensor) -> None:
        """Raise :class:`DataError` unless there is a finite number for each output."""
        if not _same_shape(outputs, labels).isfinite().all():
            raise DataError(
                "a label is NaN or infinite, and likelihood='gaussian' has none for a "
                "missing label: leave such examples out, or pass a Likelihood of your "
                "own, whose score is 0 there"
            )


LIKELIHOODS: dict[str, Likelihood] = {
    "categorical": Categorical(),
    "bernoulli": Bernoulli(),
    "gaussian": Gaussian(),
}


def likelihood_of(likelihood: str | Likelihood) -> Likelihood:
    """Return the likelihood of a name, or a user's own object unchanged.

    Raises
    ------
    UnknownNameError
        If it is neither.
    ConfigurationError
        If the object has a method ``ignored``, which nothing calls any more.
    """
    if isinstance(likelihood, Likelihood):
        if hasattr(likelihood, "ignored"):
            raise ConfigurationError(
                f"{type(likelihood).__name__}.ignored is not called: give a label that "
                "is none the integer -100, or leave the example out of the data"
            )
        return likelihood
    check_known("likelihood", likelihood, LIKELIHOODS)
    return LIKELIHOODS[likelihood]


def _at_least_2d(outputs: Tensor) -> Tensor:
    if outputs.dim() < 2 or outputs.shape[-1] < 2:
        raise StructureError(
            "the model's output must be logits of shape [batch, classes], or [batch, "
            f"time, classes], with at least 2 classes, got {tuple(outputs.shape)}: "
            "pass likelihood='bernoulli' for one logit, or 'gaussian' for numbers"
        )
    return outputs.detach()


def _same_shape(outputs: Tensor, labels: Tensor) -> Tensor:
    check_same_shape(outputs, labels)
    return labels.to(outputs.dtype)


# For a confident model, 1 - p has no digits left if p is rounded first.


def _minus_sigmoid(labels: Tensor, outputs: Tensor) -> Tensor:
    """Return ``labels - p``."""
    return labels * (-outputs).sigmoid() - (1 - labels) * outputs.sigmoid()


def _from_probabilities(labels: Tensor, p: Tensor) -> Tensor:
    """Return ``onehot(labels) - p``, with the sum of the other classes for 1 - p."""
    index = labels.unsqueeze(-1)
    others = p.scatter(-1, index, 0)
    return others.neg().scatter_(-1, index, others.sum(-1, keepdim=True))


@dataclass(frozen=True)
class Expectation:
    """The expectation over labels, which decides the rank-one pieces of a batch.

    Parameters
    ----------
    likelihood : Likelihood
        What the model's outputs mean.
    options : FisherOptions
        Whether it is exact, and what it may cost.
    seed : int
        As for :func:`flwr_fisher.curvature.fisher`.
    """

    likelihood: Likelihood
    options: FisherOptions
    seed: int

    @property
    def tolerance(self) -> float:
        """The share that may be left out; 0 if every piece counts."""
        return self.options.tolerance if self.options.expectation == "exact" else 0.0

    def with_labels(self, batch: Batch) -> Batch:
        """Return a batch without the examples that have no label other than -100."""
        label_mask = self.label_mask(batch)
        if label_mask is None or len(label_mask) != len(batch):
            return batch
        return batch[label_mask.reshape(len(batch), -1).any(1)]

    def label_mask(self, batch: Batch) -> Tensor | None:
        """Return which labels are not -100, in their shape; None if none is -100."""
        labels, likelihood = batch.labels, self.likelihood
        may_be_none = _is_users(likelihood) or likelihood.labels_are_classes
        if not isinstance(labels, Tensor) or not may_be_none:
            return None
        # No device is waited for: the batch has counted its labels.
        return None if batch.num_labels == labels.numel() else labels != IGNORED

    def pieces(
        self,
        outputs: Tensor,
        batch: Batch,
        label_mask: Tensor | None,
        generator: torch.Generator,
    ) -> Pieces:
        """Return the rank-one pieces of the Fisher with respect to a batch's outputs.

        Parameters
        ----------
        outputs : Tensor
            ``[n, ...]``.
        batch : Batch
            Has the labels.
        label_mask : Tensor | None
            From :meth:`label_mask`. Positions with the label -100 are left out.
        generator : torch.Generator
            Draws labels, and the random passes that replace those above `max_passes`;
            on the CPU.
        """
        kind = self.options.expectation
        if kind == "empirical":
            given = _score(self.likelihood, outputs, batch.tensor_labels())
            return given_pieces(given.unsqueeze(0))
        if label_mask is not None and label_mask.shape[1:] != outputs.shape[1:-1]:
            label_mask = None
        if kind == "exact":
            pieces = self.likelihood.pieces(outputs, self.options.max_passes, generator)
            mask = None if label_mask is None else label_mask.flatten(1)
            return replace(pieces, mask=mask)
        # A likelihood of the user's draws where its outputs are.
        seen = outputs.cpu() if _is_users(self.likelihood) else outputs
        scores = self.likelihood.sample_score(seen, generator).to(outputs.device)
        return given_pieces(_labelled(scores, label_mask).unsqueeze(0))


def _is_users(likelihood: Likelihood) -> bool:
    """Return whether a likelihood is of a user's own."""
    return likelihood not in LIKELIHOODS.values()


def _labelled(scores: Tensor, label_mask: Tensor | None) -> Tensor:
    """Return scores, with zeros where there is no label."""
    if label_mask is None:
        return scores
    if label_mask.shape != scores.shape:  # or else each example has one number
        label_mask = label_mask.unsqueeze(-1)
    return scores.where(label_mask, 0)


def check_labels(likelihood: Likelihood, outputs: Tensor, labels: Tensor) -> None:
    """Check labels of any device by :meth:`Likelihood.check_labels`."""
    if _is_users(likelihood):  # it may compare the two
        labels = labels.to(outputs.device)
        expected = outputs.shape[:-1] or outputs.shape
        if count_labels(labels) < labels.numel() and labels.shape != expected:
            raise DataError(
                f"labels of -100 in shape {tuple(labels.shape)} for outputs of shape "
                f"{tuple(outputs.shape)}: with {type(likelihood).__name__}, they mean "
                f"'no label' in shape {tuple(expected)} alone"
            )
    likelihood.check_labels(outputs.detach(), labels)


def _score(likelihood: Likelihood, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return a likelihood's score, after a check of its shape."""
    score = likelihood.score(outputs, labels)
    if score.shape != outputs.shape:
        raise StructureError(
            f"{type(likelihood).__name__}.score returned shape {tuple(score.shape)} "
            f"for outputs of shape {tuple(outputs.shape)} and labels of shape "
            f"{tuple(labels.shape)}: return the outputs' shape; labels may be "
            "broadcast, so give them that shape by batch_fn"
        )
    if _is_users(likelihood) and count_labels(labels) < labels.numel():
        return _labelled(score, labels != IGNORED)
    return score


def squared_batch_gradients(
    model: nn.Module, batches: Iterable[Batch], likelihood: Likelihood
) -> Diagonal:
    r"""Return :math:`\frac1B \sum_b (\nabla \bar\ell_b)^2`, elementwise.

    :math:`\bar\ell_b` is a batch's mean negative log-likelihood of the given labels
    (FedFish, Algorithm 2, which takes the sum over batches): as for
    ``F.cross_entropy``, the mean is over the labels other than -100. An example has one
    label for each position. A batch without any label is none of the B batches.

    Parameters
    ----------
    model : nn.Module
        In eval mode.
    batches : Iterable[Batch]
        On any device.
    likelihood : Likelihood
        What the model's outputs mean.

    Raises
    ------
    DataError
        If no batch has a label, or one has no tensor of labels, or wrong ones.
    """
    parameters = trainable(model)
    leaves, sums, count = list(parameters.values()), Sums(parameters), 0
    device = leaves[0].device
    for some in batches:
        batch = some.to(device)
        given = batch.tensor_labels()
        outputs = batch.inputs(model)
        check_labels(likelihood, outputs, some.tensor_labels())
        score = _score(likelihood, widened(outputs), given)
        mean = (score / likelihood.num_labels(given)).to(outputs.dtype)
        sums.add_squares(torch.autograd.grad(outputs, leaves, mean, allow_unused=True))
        count += batch.num_labels > 0
    if not count:
        raise DataError("the loader has no examples with a label, so it has no Fisher")
    return Diagonal(sums.mean(count))
