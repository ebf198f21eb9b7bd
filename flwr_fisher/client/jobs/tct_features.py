"""A client's regression in TCT: its standardised features, computed or from a cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from flwr_fisher.client.disk import ClientDisk
from flwr_fisher.client.jobs import LocalProblem
from flwr_fisher.client.request import whole_number
from flwr_fisher.client.training import Loader
from flwr_fisher.curvature.data import IGNORED, Batch, batches_of, is_whole
from flwr_fisher.curvature.models import check_rows, evaluating
from flwr_fisher.devices import CPU
from flwr_fisher.errors import ClientError, DataError
from flwr_fisher.files import digest_of
from flwr_fisher.log_lines import logger, watching
from flwr_fisher.randomness import derive_seed, seeded
from flwr_fisher.tangent import Spectrum, TangentFeatures, gram_spectrum
from flwr_fisher.tangent.spectrum import MOST_EXAMPLES, largest_gram_eigenvalue
from flwr_fisher.wire.options import client_name

_DTYPES = {"float32": torch.float32, "float16": torch.float16}
_FEATURES, _LABELS = "features", "labels"
_FEW = 2  # examples whose features are computed before the first stage
_AT_ONCE = 512  # examples with features on the model's device at a time


def read_examples(loader: Loader, model: nn.Module, partition: int) -> list[Batch]:
    """Return the loader's batches on the CPU, without examples that have no label.

    They are read with the same random numbers every time. So a loader that shuffles, or
    augments images, gives the same examples in the same order.
    """
    with seeded(derive_seed("training data", partition)):
        every = map(with_labels, batches_of(loader, model, CPU, labelled=True))
        batches = [batch for batch in every if len(batch)]
    if not batches:
        raise DataError(
            f"the training loader of {client_name(partition)} has no example with a "
            f"label other than {IGNORED}"
        )
    return batches


def with_labels(batch: Batch) -> Batch:
    """Return a batch without its examples that have no label (-100)."""
    labels = batch.tensor_labels()
    return batch[labels != IGNORED] if labels.dim() == 1 else batch


def classes_in(batches: Sequence[Batch], num_classes: int) -> Tensor:
    """Return all labels; raise :class:`DataError` unless each example has one class."""
    for batch in batches:
        y = batch.tensor_labels()
        if y.dim() != 1 or not is_whole(y) or y.min() < 0 or y.max() >= num_classes:
            raise DataError(
                "labels must be one class for each example, integers [n] from 0 to "
                f"{num_classes - 1}; got {y.dtype} of shape {tuple(y.shape)} from "
                f"{y.min()} to {y.max()}"
            )
    return torch.cat([batch.labels for batch in batches])


@dataclass(frozen=True)
class LocalRegression:
    """A client's least squares problem, on the model's device.

    Parameters
    ----------
    features : Tensor
        ``[n, p]``, standardised.
    labels : Tensor
        ``[n]``.
    spectrum : Spectrum | None
        The features' spectrum. It is None if steps are taken one by one.
    largest : float
        Its largest eigenvalue.
    """

    features: Tensor
    labels: Tensor
    spectrum: Spectrum | None
    largest: float

    def targets(self, num_classes: int) -> Tensor:
        """Return one-hot labels minus 1/C, ``[n, C]`` in float64."""
        one_hot = nn.functional.one_hot(self.labels, num_classes)
        return one_hot.double().sub_(1 / num_classes)


class ClientFeatures:
    """A client's features of its examples, at its model's current parameters.

    The client reads its data and computes features once for all rounds of a run. They
    stay on its disk, with the labels, under a key of the run, the partition, the
    network's parameters and what determines the features.

    Parameters
    ----------
    problem : LocalProblem
        Its model holds the server's parameters.
    partition : int
        The client's.
    run : int
        The run's number.
    options : Mapping[str, Any]
        The server's: ``num-features``, ``features-seed``, ``head`` (if empty, the
        client finds it), ``solver`` and ``feature-dtype``.

    Raises
    ------
    ClientError
        If this client cannot do it, because its examples have no classes or are too
        many, or its cache is too small. It is raised before anything is computed.
    """

    def __init__(
        self,
        problem: LocalProblem,
        partition: int,
        run: int,
        options: Mapping[str, Any],
    ) -> None:
        self.problem, self.partition, self.run = problem, partition, run
        self.solver = options.get("solver", "closed-form")
        self.dtype = _DTYPES[options.get("feature-dtype", "float32")]
        if not problem.has_classes:
            raise ClientError(
                "TCT needs classes, but this client's likelihood is "
                f"{problem.likelihood!r}: use another strategy, such as FedFish"
            )
        self.tangent = TangentFeatures(
            problem.model,
            whole_number(options, "num-features", 20_000),
            seed=whole_number(options, "features-seed", 0),
            head=str(options.get("head", "")) or None,
        )

    def check_classes(self, batches: Sequence[Batch]) -> Tensor:
        """Return all labels, after a check that each is a class of the head."""
        try:
            return classes_in(batches, self.tangent.num_classes)
        except DataError:
            # If the head is not the model's last layer, that error is better.
            self.tangent(batches[0].inputs[:1].to(self.problem.device))
            raise

    def check_examples(self, batch: Batch) -> None:
        """Raise an error if an example's features fail, or depend on other examples."""
        model, inputs = self.problem.model, batch.inputs.to(self.problem.device)
        with evaluating(model), torch.no_grad():
            check_rows(model, inputs, inputs(model))
        self.tangent(inputs[:_FEW])

    def check_room(self, n: int) -> None:
        """Raise an error for more examples than the spectrum or the cache can hold."""
        steps = self.solver == "steps"
        if n > MOST_EXAMPLES and not steps:
            raise ClientError(
                f"{n} examples are too many for the closed form, which decomposes a "
                f"matrix of n x n, for at most {MOST_EXAMPLES}: use TCT(regression="
                "Regression(solver='steps')), or distribute the data over more clients"
            )
        wide = self.tangent.num_features * self.dtype.itemsize
        what = f"{self.tangent.num_features} features of {n} examples"
        instead = "use TCT(num_features=...) with fewer, or "
        if self.dtype != torch.float16:
            instead += "TCT(regression=Regression(feature_dtype='float16')), or "
        room = n * (wide + 8) + (0 if steps else 8 * n * (n + 1))
        self._disk("raw").check_room(room, what, instead)

    def raw(self) -> dict[str, Tensor]:
        """Return features ``[n, p]`` in float32 with their labels, and keep them."""
        return self._disk("raw").made_once(_FEATURES, self._computed)

    def regression(self, mean: Tensor, std: Tensor) -> LocalRegression:
        """Return the problem for features standardised over all clients."""
        mean, std = mean.float().cpu(), std.float().cpu()
        disk = self._disk(f"{self.dtype} {self.solver}", mean, std)

        def standardised() -> dict[str, Tensor]:
            # Its vectors are in the order of features that are lost.
            disk.drop("spectrum")
            raw = self.raw()
            stored = raw[_FEATURES].sub(mean).div_(std).to(self.dtype)
            return {_FEATURES: stored, _LABELS: raw[_LABELS]}

        kept = disk.made_once(_FEATURES, standardised)
        device = self.problem.device
        features, labels = (kept[key].to(device) for key in (_FEATURES, _LABELS))
        eigen = disk.made_once("spectrum", lambda: self._eigen(features))
        values, vectors = eigen["values"].to(device), eigen.get("vectors")
        spectrum = None if vectors is None else Spectrum(values, vectors.to(device))
        return LocalRegression(features, labels, spectrum, float(values.max()))

    def _eigen(self, features: Tensor) -> dict[str, Tensor]:
        """Return the features' spectrum; for steps, only the largest eigenvalue."""
        self._disk("raw").drop()  # the standardised ones are on the disk
        if self.solver == "steps":
            largest = [largest_gram_eigenvalue(features)]
            return {"values": torch.tensor(largest, dtype=torch.float64)}
        made = gram_spectrum(features)
        return {"values": made.eigenvalues, "vectors": made.eigenvectors}

    def _computed(self) -> dict[str, Tensor]:
        """Read the client's data, and return all features and labels."""
        problem, name = self.problem, client_name(self.partition)
        batches = read_examples(problem.train_batches, problem.model, self.partition)
        labels, p = self.check_classes(batches), self.tangent.num_features
        n = len(labels)
        self.check_room(n)
        logger.info("%s: computing %s features of %s examples", name, p, n)
        out = torch.empty(n, p, dtype=torch.float32)
        with watching("features", n) as progress:
            start = 0
            for batch in batches:
                for some in batch.inputs.split(_AT_ONCE):
                    end = start + len(some)
                    out[start:end] = self.tangent(some.to(problem.device))
                    start = end
                    progress.advance(len(some))
        if not out.isfinite().all():
            raise ClientError(
                f"the features of {name} hold NaN or infinity: check its inputs for "
                "such values"
            )
        return {_FEATURES: out, _LABELS: labels}

    @cached_property
    def _key(self) -> str:
        """A digest of all that determines the raw features."""
        model = self.problem.model
        named = dict(model.named_parameters()) | dict(model.named_buffers())
        return digest_of([self.run, self.tangent.digest, list(named)], named)

    def _disk(self, kind: str, *statistics: Tensor) -> ClientDisk:
        """Return the entry of these features."""
        numbered = {str(i): value for i, value in enumerate(statistics)}
        key = digest_of([kind, self.partition, self._key], numbered)[:32]
        return self.problem.disk("features", self.partition, key)
