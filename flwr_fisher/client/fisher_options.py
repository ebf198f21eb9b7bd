"""Which Fisher the server's config asks for, and how it is uploaded."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.client.last_epoch import SquaredGradients
from flwr_fisher.client.limits import real_number
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.training import LocalSGD, TrainFn
from flwr_fisher.curvature import (
    TOLERANCE,
    Curvature,
    Diagonal,
    check_options,
    fisher,
)
from flwr_fisher.errors import (
    ClientError,
    DataError,
    check_known,
    check_positive,
    check_range,
)
from flwr_fisher.merge import DiagonalSums, LocalPosterior, contribution
from flwr_fisher.params import Params, select, subtract
from flwr_fisher.progress import count_of, watching
from flwr_fisher.wire import (
    AGGREGATES,
    Codec,
    FisherUpload,
    ProductUpload,
    SumsUpload,
    VectorUpload,
    resolve,
    tensors_to_arrays,
)

_SOURCES = ("extra-pass", "last-epoch")
_REDUCTIONS = ("mean", "sum")
_UPLOADS = ("fisher", "product", "summands")
_PRIVATE = "private-sums"
_OF_PAPER = (None, "kfac", "diagonal")


@dataclass(frozen=True)
class FisherOptions:
    """What the server asks for, checked before any training.

    Parameters
    ----------
    structure : str | None
        Of the curvature; ``None``: an ordinary reply without one.
    expectation, tolerance, examples, max_passes, max_positions, weight_sharing
        As for :func:`flwr_fisher.curvature.fisher`.
    source : "extra-pass" | "last-epoch"
        Where a Fisher of squared batch gradients is taken.
    reduction : "mean" | "sum"
        Of squared batch gradients.
    power : float
        That each entry of a diagonal Fisher is taken to, in [0, 1].
    balance : float
        The power of its trace that a Fisher is then divided by, in [0, 1].
    upload : "fisher" | "product" | "summands"
        Parameters and Fisher, or each step times its Fisher, or all three.
    aggregate : "parts" | "sums" | "private-sums"
        Whether the server can do with sums over clients, and bounds what each adds.
    clipping_norm : float
        Of the step from the server's parameters, for private sums.
    codec : Codec
        How it is packed.
    """

    structure: str | None
    expectation: str
    tolerance: float
    examples: int | None
    max_passes: int | None
    max_positions: int | None
    weight_sharing: str
    source: str
    reduction: str
    power: float
    balance: float
    upload: str
    aggregate: str
    clipping_norm: float
    codec: Codec

    @classmethod
    def of(
        cls, options: Mapping[str, Any], params: Params, train_fn: TrainFn
    ) -> "FisherOptions":
        """Read the server's options.

        Parameters
        ----------
        options : Mapping[str, Any]
            Those of the request.
        params : Mapping[str, Tensor]
            What arrived; a codec's budget must hold it.
        train_fn : Callable
            The client's loop.

        Raises
        ------
        ConfigurationError
            If a name is unknown, a number out of range, or a budget too small.
        ClientError
            If the combination is none that this client can give.
        """
        structure = options.get("structure")
        real_number(options, "codec-budget", 1.0)
        wanted = cls(
            None if structure is None else str(structure),
            str(options.get("expectation", "exact")),
            real_number(options, "tolerance", TOLERANCE),
            options.get("examples"),
            options.get("max-passes"),
            options.get("max-positions"),
            str(options.get("weight-sharing", "expand")),
            str(options.get("fisher-source", "extra-pass")),
            str(options.get("fisher-reduction", "mean")),
            real_number(options, "fisher-power", 1.0),
            real_number(options, "fisher-balance", 0.0),
            str(options.get("upload", "fisher")),
            str(options.get("aggregate", "parts")),
            real_number(options, "clipping-norm", 1.0),
            resolve(Codec.from_options(options), params),
        )
        wanted._check(train_fn)
        return wanted

    def _check(self, train_fn: TrainFn) -> None:
        check_options(
            [] if self.structure is None else [self.structure],
            expectation=self.expectation,
            tolerance=self.tolerance,
            weight_sharing=self.weight_sharing,
            counts={
                "examples": self.examples,
                "max_passes": self.max_passes,
                "max_positions": self.max_positions,
            },
        )
        check_known("fisher-source", self.source, _SOURCES)
        check_known("fisher-reduction", self.reduction, _REDUCTIONS)
        check_range("fisher-power", self.power, 0, 1)
        check_range("fisher-balance", self.balance, 0, 1)
        check_known("upload", self.upload, _UPLOADS)
        check_known("aggregate", self.aggregate, (*AGGREGATES, _PRIVATE))
        if self.source == "last-epoch" and not isinstance(train_fn, LocalSGD):
            raise ClientError(
                "fisher-source='last-epoch' squares gradients while training, so it "
                f"needs train_fn=LocalSGD(...), not {train_fn!r}: use it, or let the "
                "server ask for 'extra-pass'"
            )
        check_positive("clipping-norm", self.clipping_norm)
        plain = self.structure, self.codec.scheme
        if self.aggregate != "parts" and plain != ("diagonal", "lossless"):
            raise ClientError(
                "the server asks for sums, which exist for structure='diagonal' and "
                f"codec='lossless' alone, not for {plain[0]!r} and {plain[1]!r}"
            )
        if self.codec.scheme == "paper" and self.structure not in _OF_PAPER:
            raise ClientError(
                f"codec='paper' has no form for structure={self.structure!r}, only for "
                "'kfac' and 'diagonal'"
            )
        for name, asked in (
            (f"upload={self.upload!r}", self.upload != "fisher"),
            (f"fisher-power={self.power}", self.power != 1),
        ):
            if asked and self.structure != "diagonal":
                raise ClientError(
                    f"{name} exists for structure='diagonal' alone, not for "
                    f"{self.structure!r}"
                )

    def train(
        self, problem: LocalProblem, config: Mapping[str, Any]
    ) -> tuple[dict[str, float], Curvature | None]:
        """Run the client's loop; return its metrics, and the Fisher if there is one."""
        if self.source == "extra-pass":
            metrics = problem.train(config)
            curvature = None if self.structure is None else self._extra_pass(problem)
            return metrics, curvature
        loop = problem.train_fn
        assert isinstance(loop, LocalSGD)
        squares = SquaredGradients(problem.model, loop.epochs)
        metrics = problem.train(config, on_gradients=squares)
        return metrics, self._reduced(squares.curvature(), problem.trainloader)

    def tried(self, problem: LocalProblem, batches: list[Any]) -> Curvature:
        """Return the curvature of a few examples, as cheaply as tells what may fail.

        The basis in place of E-KFAC, and one pass an example where there may be many.
        """
        if self.source == "last-epoch":  # the loop's own first step tells
            trained = problem.trained()
            return Diagonal({name: torch.ones_like(p) for name, p in trained.items()})
        if self.structure == "ekfac" and isinstance(problem.trainloader, Iterator):
            raise DataError(
                "structure='ekfac' reads the loader twice; pass one that can be"
            )
        few = replace(
            self,
            structure="kfac" if self.structure == "ekfac" else self.structure,
            max_passes=1 if self.expectation == "exact" else None,
        )
        return few._extra_pass(problem, batches)

    def _extra_pass(
        self, problem: LocalProblem, loader: Iterable[Any] | None = None
    ) -> Curvature:
        """Take the Fisher in another pass, of all data or of a few batches."""
        assert self.structure is not None
        most = problem.limits.examples(self.examples)
        passes = 2 if self.structure == "ekfac" else 1
        count = count_of(problem.trainloader)
        total = most if count is None else min(count, most or count)
        with watching("curvature", None if total is None else passes * total):
            curvature = fisher(
                problem.model,
                problem.train_pairs if loader is None else loader,
                structure=self.structure,
                expectation=self.expectation,
                tolerance=self.tolerance,
                examples=most,
                max_passes=self.max_passes,
                max_positions=self.max_positions,
                weight_sharing=self.weight_sharing,
                likelihood=problem.likelihood,
                seed=int(torch.randint(2**62, ())),
            )
        return self._reduced(curvature, problem.trainloader)

    def _reduced(self, curvature: Curvature, loader: Any) -> Curvature:
        """Return it as a sum over batches, to a power, and balanced, as asked for."""
        if self.reduction == "sum" and self.balance < 1:  # which takes out any factor
            curvature = curvature.scaled(_batches_of(loader))
        if self.power != 1:
            entries = curvature.diagonal()
            curvature = Diagonal({k: v**self.power for k, v in entries.items()})
        if self.balance and (trace := curvature.trace()):
            curvature = curvature.scaled(trace**-self.balance)
        return curvature

    def arrays(
        self,
        start: Params,
        params: dict[str, Tensor],
        curvature: Curvature | None,
        num_examples: float,
    ) -> ArrayRecord:
        """Return the uploaded record, for parameters before and after training."""
        if curvature is None:
            return tensors_to_arrays(params)
        if self.upload != "fisher":
            away = subtract(
                select(start, curvature.shapes), select(params, curvature.shapes)
            )
            product = curvature.matvec(away)
            if self.upload == "summands":
                vectors = {"product": product, "fisher": curvature.diagonal()}
                return VectorUpload(vectors, params).to_arrays()
            buffers = {k: v for k, v in params.items() if k not in away}
            return ProductUpload(product, buffers).to_arrays()
        if self.aggregate == _PRIVATE:
            diagonal = curvature.diagonal()
            vectors = contribution(start, params, diagonal, self.clipping_norm)
            return VectorUpload(vectors).to_arrays()
        if self.aggregate == "sums":
            posterior = LocalPosterior(params, curvature, num_examples)
            return SumsUpload(DiagonalSums.of(posterior)).to_arrays()
        with watching("packing", unit="steps"):
            return FisherUpload(params, curvature).to_arrays(self.codec)


def _batches_of(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError:  # a stream
        return sum(1 for _ in loader)
