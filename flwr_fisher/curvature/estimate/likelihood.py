r"""Likelihoods: how a model's outputs define a distribution over labels.

A likelihood splits the Fisher with respect to one example's outputs into rank-one
pieces, :math:`\sum_k v_k v_k^\top`. Each piece costs one backward pass.
Outputs are seen as ``[n, T, C]``: C numbers at each of T independent positions, with
T = 1 for an ordinary classifier.

Long: the base class for users' own likelihoods, beside the three built-in ones.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from flwr_fisher.curvature.batch import (
    IGNORED,
    are_probabilities,
    check_all_classes,
    check_from_0_to_1,
    count_labels,
)
from flwr_fisher.curvature.estimate.pieces import (
    GivenVectors,
    OutputVectors,
    Pieces,
    SoftmaxVectors,
)
from flwr_fisher.errors import DataError, StructureError, check_known


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
    >>> fisher(model, [x], structure="dense", likelihood=Poisson()).matrix
    tensor([[5.]])
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
            ``[n, ...]``.
        generator : torch.Generator
            Draws them; on the outputs' device.

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
        """Return how many terms a batch's mean loss has; at least 1."""
        return len(labels)

    def ignored(self, labels: object) -> Tensor | None:
        """Return a mask of entries that are no labels, or None if all are labels."""
        return None

    def check_order(self, outputs: Tensor, labels: object) -> None:
        """Raise an error if the labels show that the outputs have another meaning."""
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
        index = torch.zeros(len(outputs), dtype=torch.long, device=outputs.device)
        return torch.stack([vectors.at(index + i) for i in range(vectors.count)])

    def vectors(
        self, outputs: Tensor, most: int | None, generator: torch.Generator | None
    ) -> OutputVectors:
        """Return the same lazily, or the most likely class's piece and a drawn one.

        They are at most `most`; the last is then a label that is drawn from all other
        labels.
        """
        logits = _at_least_2d(outputs)
        seen = logits.reshape(len(logits), -1, logits.shape[-1])
        return SoftmaxVectors(seen, most, generator)

    def sample_score(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return ``onehot(y) - p`` for y drawn from p."""
        p = _at_least_2d(outputs).softmax(-1)
        # As torch.multinomial draws, but without its check of p, which waits for a GPU.
        races = torch.empty_like(p).exponential_(generator=generator)
        return _from_probabilities((p / races).argmax(-1), p)

    def score(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return ``onehot(y) - p`` for labels ``[n]`` or ``[n, T]``, 0 for -100.

        Labels may be probabilities of the classes, in place of the one-hot ones.
        """
        self.check_order(outputs, labels)
        p = _at_least_2d(outputs).softmax(-1)
        if labels.shape == p.shape and labels.is_floating_point():
            return labels.to(p.dtype) - p
        if labels.shape != p.shape[:-1] or labels.is_floating_point():
            raise DataError(
                f"labels of shape {tuple(labels.shape)} and dtype {labels.dtype} do "
                f"not fit logits of shape {tuple(p.shape)}: labels must be class "
                "indices"
            )
        labels = labels.long()
        check_all_classes(labels, p.shape[-1])
        scores = _from_probabilities(labels.clamp_min(0), p)
        return scores.masked_fill((labels == IGNORED).unsqueeze(-1), 0)

    def num_labels(self, labels: Tensor) -> int:
        """Return the number of labels other than -100."""
        if labels.is_floating_point():  # probabilities, of every class
            return max(1, labels[..., 0].numel())
        return max(1, count_labels(labels))

    def ignored(self, labels: object) -> Tensor | None:
        """Return where integer labels are -100."""
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return None
        return labels == IGNORED

    def check_order(self, outputs: Tensor, labels: object) -> None:
        """Raise an error if labels show that the last dimension is not the classes.

        They show it if they fit classes as the second dimension, PyTorch's order, if
        there is one label for each output, or if they are numbers and no classes.
        """
        _at_least_2d(outputs)
        if not isinstance(labels, Tensor):
            return
        shape, places = labels.shape[1:], outputs.shape[2:]
        if shape == outputs.shape[1:] and shape:
            if are_probabilities(labels):
                return
            raise StructureError(
                f"labels have the outputs' shape, {tuple(outputs.shape)}, and are not "
                "probabilities of classes: pass likelihood='bernoulli' for sigmoids, "
                "or 'gaussian' for numbers. If the second dimension is the classes, "
                "make it the last, by outputs.movedim(1, -1)"
            )
        if shape in (places, (1, *places)) and shape != outputs.shape[1:-1] and places:
            raise StructureError(
                "the labels show that the second dimension of the outputs, of shape "
                f"{tuple(outputs.shape)}, is the classes: make it the last, by "
                "outputs.movedim(1, -1)"
            )
        own = outputs.shape[1:-1]
        if labels.is_floating_point() and shape in (own, (*own, 1)):
            for label in labels[labels != labels.round()][:1]:
                raise StructureError(
                    f"a label is {float(label):g}, and the outputs, of shape "
                    f"{tuple(outputs.shape)}, are taken for logits of classes: pass "
                    "likelihood='gaussian' for numbers, or a Likelihood of your own; "
                    "or, if outputs are such logits, their labels in batch_fn"
                )


class Bernoulli(Likelihood):
    """Independent sigmoids, with logits ``[n]`` or ``[n, …]`` and labels 0 or 1."""

    def columns(self, outputs: Tensor) -> Tensor:
        """Return one piece for each output, the square root of p (1 - p)."""
        flat = outputs.detach().reshape(len(outputs), -1, 1)
        return (flat.sigmoid() * (-flat).sigmoid()).sqrt().unsqueeze(0)

    def sample_score(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return ``y - p`` for y drawn from p."""
        # Not torch.bernoulli, which ends a process with a GPU where p is NaN.
        numbers = torch.empty_like(outputs).uniform_(generator=generator)
        return _minus_sigmoid((numbers < outputs.sigmoid()).to(outputs), outputs)

    def score(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return ``y - p``."""
        labels = _same_shape(outputs, labels)
        check_from_0_to_1(labels)
        return _minus_sigmoid(labels, outputs)


class Gaussian(Likelihood):
    """Regression with unit variance: the loss is half the squared error."""

    def columns(self, outputs: Tensor) -> Tensor:
        """Return one piece for each output, with the entry 1."""
        return torch.ones_like(outputs.detach().reshape(1, len(outputs), -1, 1))

    def sample_score(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return standard normal noise."""
        return torch.empty_like(outputs).normal_(generator=generator)

    def score(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return ``y - output``."""
        labels = _same_shape(outputs, labels)
        if not labels.isfinite().all():
            raise DataError(
                "a label is NaN or infinite, and likelihood='gaussian' has none for a "
                "missing label: leave such examples out, or pass a Likelihood of your "
                "own, whose score is 0 there"
            )
        return labels - outputs


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
    """
    if isinstance(likelihood, Likelihood):
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
    if labels.shape != outputs.shape:
        raise DataError(
            f"labels of shape {tuple(labels.shape)} do not fit outputs of shape "
            f"{tuple(outputs.shape)}: give a number for each output"
        )
    return labels.to(outputs.dtype)


# For a confident model, 1 - p has no digits left if p is rounded first.


def _minus_sigmoid(labels: Tensor, outputs: Tensor) -> Tensor:
    """Return ``labels - p``."""
    return labels * (-outputs).sigmoid() - (1 - labels) * outputs.sigmoid()


def _from_probabilities(labels: Tensor, p: Tensor) -> Tensor:
    """Return ``onehot(labels) - p``, with the sum of the other classes for 1 - p."""
    index = labels.unsqueeze(-1)
    others = p.neg().scatter_(-1, index, 0)
    return others.scatter_(-1, index, -others.sum(-1, keepdim=True))
