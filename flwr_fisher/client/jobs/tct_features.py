"""A client's regression in TCT: its standardised features, computed or from a cache.

Long: the examples and their order are here, too.
"""

import hashlib
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
from flwr_fisher.curvature.batch import IGNORED, Batch, Inputs, concatenated
from flwr_fisher.curvature.batches import batches_of
from flwr_fisher.devices import CPU
from flwr_fisher.errors import ClientError, DataError, check_known
from flwr_fisher.files import digest_of
from flwr_fisher.log_lines import logger, watching
from flwr_fisher.randomness import derive_seed, seeded
from flwr_fisher.tangent import Spectrum, TangentFeatures, gram_spectrum
from flwr_fisher.tangent.spectrum import MOST_EXAMPLES, largest_gram_eigenvalue
from flwr_fisher.wire.answer import client_name

_DTYPES = {"float32": torch.float32, "float16": torch.float16}
_SOLVERS = ("closed-form", "steps")
_FEATURES = "features"
_AT_ONCE = 512  # examples with features on the model's device at a time


@dataclass(frozen=True)
class Examples:
    """All examples of a client, sorted by their digests.

    Parameters
    ----------
    parts : list[tuple[Inputs, Tensor]]
        Each part has inputs of one form, on the CPU, and the numbers ``[k]`` of their
        rows among all examples. Texts of different lengths have different forms.
    labels : Tensor
        The labels from the loader.
    digest : str
        A digest of the examples, which does not depend on their order.
    """

    parts: list[tuple[Inputs, Tensor]]
    labels: Tensor
    digest: str

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> "Examples":
        """Return the labelled examples of some batches, sorted.

        Raises
        ------
        DataError
            If labels are no tensors, or their shapes differ from batch to batch.
        """
        batches = [_labelled(batch.to(CPU)) for batch in batches]
        if len({batch.labels.shape[1:] for batch in batches}) != 1:
            shapes = sorted({tuple(batch.labels.shape) for batch in batches})
            raise DataError(f"labels must be one class for each example; got {shapes}")
        labels = torch.cat([batch.labels for batch in batches])
        digests = [digest for batch in batches for digest in _digests(batch)]
        order = sorted(range(len(digests)), key=digests.__getitem__)
        whole = hashlib.blake2b(b"".join(digests[i] for i in order), digest_size=16)
        forms = {f"{b.inputs.form} {b.labels.dtype}" for b in batches}
        whole.update("\n".join(sorted(forms)).encode())
        place = torch.empty(len(digests), dtype=torch.long)
        place[torch.tensor(order)] = torch.arange(len(digests))
        parts: dict[Any, list[tuple[Inputs, Tensor]]] = {}
        start = 0
        for batch in batches:
            rows = place[start : start + len(batch)]
            parts.setdefault(batch.inputs.form, []).append((batch.inputs, rows))
            start += len(batch)
        made = [
            _sorted(concatenated([x for x, _ in each]), torch.cat([r for _, r in each]))
            for each in parts.values()
        ]
        return cls(made, labels[order], whole.hexdigest())

    def check_classes(self, num_classes: int) -> None:
        """Raise :class:`DataError` unless each example has one class as its label."""
        y = self.labels
        whole = y.dim() == 1 and not y.is_floating_point() and not y.is_complex()
        if not whole or int(y.min()) < 0 or int(y.max()) >= num_classes:
            raise DataError(
                "labels must be one class for each example, integers [n] from 0 to "
                f"{num_classes - 1}; got {y.dtype} of shape {tuple(y.shape)}"
                + (f" from {int(y.min())} to {int(y.max())}" if whole else "")
            )


def read_examples(loader: Loader, model: nn.Module, partition: int) -> Examples:
    """Read the loader to its end, always with the same random numbers.

    So a loader that shuffles, or augments images, gives the same examples every time.
    """
    with seeded(derive_seed("training data", partition)):
        batches = list(batches_of(loader, model, CPU, labelled=True))
    batches = [batch for batch in batches if batch.num_labels]
    if not batches:
        raise DataError(
            f"the training loader of {client_name(partition)} has no example with a "
            "label other than -100"
        )
    return Examples.of(batches)


def _labelled(batch: Batch) -> Batch:
    """Return the examples of a batch that have a label."""
    if not isinstance(batch.labels, Tensor):
        kind = type(batch.labels).__name__
        raise DataError(
            f"labels must be a tensor with one class for each example; got a {kind}"
        )
    return batch[batch.labels != IGNORED] if batch.labels.dim() == 1 else batch


def _sorted(inputs: Inputs, rows: Tensor) -> tuple[Inputs, Tensor]:
    order = rows.argsort()
    return inputs[order], rows[order]


def _digests(batch: Batch) -> list[bytes]:
    columns = [_rows(tensor) for tensor in [*batch.inputs.tensors, batch.labels]]
    rows = zip(*columns, strict=True)
    return [hashlib.blake2b(b"".join(row), digest_size=16).digest() for row in rows]


def _rows(tensor: Tensor) -> list[bytes]:
    """Return each row's bytes."""
    rows = tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1)
    return [row.tobytes() for row in rows.contiguous().view(torch.uint8).numpy()]


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
        The features' spectrum. It is None if there are so many examples that steps are
        taken one by one.
    largest : float
        Its largest eigenvalue.
    """

    features: Tensor
    labels: Tensor
    spectrum: Spectrum | None
    largest: float

    def targets(self, num_classes: int) -> Tensor:
        """Return one-hot labels minus 1/C, ``[n, C]`` in float64."""
        return torch.eye(num_classes, dtype=torch.float64, device=self.labels.device)[
            self.labels
        ].sub_(1 / num_classes)


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
        self.solver = str(options.get("solver", "closed-form"))
        check_known("solver", self.solver, _SOLVERS)
        stored = str(options.get("feature-dtype", "float32"))
        check_known("feature-dtype", stored, _DTYPES)
        self.dtype = _DTYPES[stored]
        self.tangent = _tangent(problem, options)

    @cached_property
    def examples(self) -> Examples:
        """The client's training examples, read once a round."""
        problem = self.problem
        examples = read_examples(problem.train_batches, problem.model, self.partition)
        self.check_classes(examples)
        self.check_room(len(examples.labels))
        return examples

    def check_classes(self, examples: Examples) -> None:
        """Raise :class:`DataError` if labels are no classes of the head."""
        try:
            examples.check_classes(self.tangent.num_classes)
        except DataError:
            # If the head is not the model's last layer, that error is better.
            inputs, _ = examples.parts[0]
            self.tangent(inputs[:1].to(self.problem.device))
            raise

    def check_room(self, n: int) -> None:
        """Raise an error for more examples than the spectrum or the cache can hold."""
        if n > MOST_EXAMPLES and self.solver != "steps":
            raise ClientError(
                f"{n} examples are too many for the closed form, which decomposes a "
                f"matrix of n x n, for at most {MOST_EXAMPLES}: use TCT(regression="
                "Regression(solver='steps')), or distribute the data over more clients"
            )
        squared = 0 if n > MOST_EXAMPLES else 8 * n * (n + 1)
        wide = self.tangent.num_features * self.dtype.itemsize
        what = f"{self.tangent.num_features} features of {n} examples"
        instead = "use TCT(num_features=...) with fewer, or "
        if self.dtype != torch.float16:
            instead += "TCT(regression=Regression(feature_dtype='float16')), or "
        room = n * (wide + 8) + squared
        self._disk("0").check_room(room, what, instead)

    def raw(self) -> Tensor:
        """Return features ``[n, p]`` in float32, kept until they are standardised."""
        return self._raw(self._disk(self._key("raw")))[_FEATURES]

    def _raw(self, disk: ClientDisk) -> dict[str, Tensor]:
        """Return features and labels, from the disk if they are there."""

        def made() -> dict[str, Tensor]:
            return {_FEATURES: self._computed(), "labels": self.examples.labels}

        return disk.made_once(_FEATURES, made)

    def regression(self, mean: Tensor, std: Tensor) -> LocalRegression:
        """Return the problem for features standardised over all clients."""
        statistics = {"mean": mean.float().cpu(), "std": std.float().cpu()}
        disk = self._disk(self._key(str(self.dtype), statistics))
        kept = disk.load(_FEATURES)
        made = self._standardised(disk, statistics) if kept is None else kept.tensors
        device = self.problem.device
        features = made[_FEATURES].to(device)
        spectrum, largest = self._spectrum(disk, features)
        return LocalRegression(features, made["labels"].to(device), spectrum, largest)

    def _standardised(
        self, disk: ClientDisk, statistics: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        disk_of_raw = self._disk(self._key("raw"))
        raw = self._raw(disk_of_raw)
        scaled = raw[_FEATURES].sub(statistics["mean"]).div_(statistics["std"])
        stored = scaled.to(self.dtype)
        if not stored.isfinite().all():
            raise ClientError(
                f"standardised features of {client_name(self.partition)} overflow "
                f"{self.dtype}: use Regression(feature_dtype='float32')"
            )
        held = {_FEATURES: stored, "labels": raw["labels"]}
        made = disk.made_once(_FEATURES, lambda: held)
        disk_of_raw.drop()
        return made

    def _spectrum(
        self, disk: ClientDisk, features: Tensor
    ) -> tuple[Spectrum | None, float]:
        """Return the spectrum from the disk; for steps, perhaps only a part of it."""
        if self.solver == "steps" and len(features) > MOST_EXAMPLES:

            def steepest() -> dict[str, Tensor]:
                largest = torch.tensor(largest_gram_eigenvalue(features)).double()
                return {"largest": largest}

            return None, float(disk.made_once("steepest", steepest)["largest"])

        def decomposed() -> dict[str, Tensor]:
            made = gram_spectrum(features)
            return {"values": made.eigenvalues, "vectors": made.eigenvectors}

        kept = disk.made_once("spectrum", decomposed)
        device = features.device
        spectrum = Spectrum(kept["values"].to(device), kept["vectors"].to(device))
        return spectrum, spectrum.largest

    def _computed(self) -> Tensor:
        n = len(self.examples.labels)
        logger.info(
            "%s: computing %s features of %s examples",
            client_name(self.partition).capitalize(),
            self.tangent.num_features,
            n,
        )
        out = torch.empty(n, self.tangent.num_features)
        with watching("features", n) as progress:
            for inputs, rows in self.examples.parts:
                at_once = inputs.split(_AT_ONCE), torch.split(rows, _AT_ONCE)
                for some, at in zip(*at_once, strict=True):
                    out[at] = self.tangent(some.to(self.problem.device)).to(out)
                    progress.advance(len(some))
        if not out.isfinite().all():
            raise ClientError(
                f"the features of {client_name(self.partition)} hold NaN or infinity: "
                "check its inputs for such values"
            )
        return out

    def _key(self, kind: str, statistics: Mapping[str, Tensor] | None = None) -> str:
        model = self.problem.model
        values = dict(model.named_parameters()) | dict(model.named_buffers())
        own = [self.run, self.partition, self.tangent.digest, repr(model)]
        parts = [values, dict(statistics or {})]
        facts = [kind, own, [list(part) for part in parts]]
        tensors = [value for part in parts for value in part.values()]
        return digest_of(facts, {f"{i}": value for i, value in enumerate(tensors)})[:32]

    def _disk(self, key: str) -> ClientDisk:
        return self.problem.disk("features", self.partition, key)


def _tangent(problem: LocalProblem, options: Mapping[str, Any]) -> TangentFeatures:
    if not problem.has_classes:
        raise ClientError(
            "TCT needs classes, but this client's likelihood is "
            f"{problem.likelihood!r}: use another strategy, such as FedFish"
        )
    return TangentFeatures(
        problem.model,
        whole_number(options, "num-features", 20_000),
        seed=whole_number(options, "features-seed", 0),
        head=str(options.get("head", "")) or None,
    )
