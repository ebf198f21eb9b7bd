"""Training and the Fisher after it, as FedFisher asks for it; without one, FedAvg's."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from flwr.app import ArrayRecord

from flwr_fisher.client.jobs import get_job, register_job
from flwr_fisher.client.jobs.evaluate import local_scores
from flwr_fisher.client.limits import real_number
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import Reply, Request
from flwr_fisher.client.trial import Batch, Trained, TrainedUpload, try_upload
from flwr_fisher.curvature import Curvature, FisherOptions, fisher
from flwr_fisher.errors import DataError
from flwr_fisher.log_lines import logger
from flwr_fisher.progress import count_of, watching
from flwr_fisher.wire import Codec, FisherUpload, resolve, tensors_to_arrays

Upload = TypeVar("Upload", bound=type[TrainedUpload])
_UPLOADS: dict[str, type[TrainedUpload]] = {}


def training_job(name: str) -> Callable[[Upload], Upload]:
    """Return a decorator that makes an upload a job: try it, train, upload it.

    ``report-local`` among the options adds ``local-loss`` and ``local-accuracy`` to the
    metrics.

    Parameters
    ----------
    name : str
        As of :func:`register_job`.
    """

    def register(upload: Upload) -> Upload:
        def job(problem: LocalProblem, request: Request) -> Reply:
            return _trained(problem, request, upload.of(problem, request))

        job.__module__, job.__qualname__ = upload.__module__, upload.__qualname__
        register_job(name)(job)
        _UPLOADS[name] = upload
        return upload

    return register


def uploads_of(name: str) -> type[TrainedUpload] | None:
    """Return what a job uploads after training; None, if it does anything else."""
    get_job(name)
    return _UPLOADS.get(name)


def _trained(problem: LocalProblem, request: Request, upload: TrainedUpload) -> Reply:
    try_upload(problem, request, upload)
    metrics, curvature = upload.train(problem, request.config)
    count = request.weight(metrics)
    arrays = packed(upload, problem, request, curvature, count)
    if request.options.get("report-local"):
        metrics |= local_scores(problem, request.client)
    logger.info("Partition %s: trained on %g examples", request.client, count)
    return Reply(metrics, arrays)


def packed(
    upload: TrainedUpload,
    problem: LocalProblem,
    request: Request,
    curvature: Curvature | None,
    count: float,
) -> ArrayRecord:
    """Return what is uploaded of a problem's trained model, of weight `count`."""
    params = problem.state_like(request.params)
    if curvature is None:
        return tensors_to_arrays(params)
    return upload.arrays(Trained(request.params, params, curvature, count))


def client_fisher(
    problem: LocalProblem,
    loader: Iterable[Any] | None = None,
    *,
    structure: str,
    examples: int | None = None,
    **options: Any,
) -> Curvature:
    """Return the Fisher of a client's model on its data, within its limits.

    Parameters
    ----------
    problem : LocalProblem
        The client's.
    loader : Iterable, optional
        Other data, a few batches to try.
    structure : str
        As of :func:`flwr_fisher.curvature.fisher`.
    examples : int, optional
        How many the server asks for at most.
    **options
        Of :func:`flwr_fisher.curvature.fisher`.
    """
    most, count = problem.limits.examples(examples), count_of(problem.trainloader)
    total = most if count is None else min(count, most or count)
    passes = 2 if structure == "ekfac" else 1
    with watching("curvature", None if total is None else passes * total):
        return fisher(
            problem.model,
            problem.train_pairs if loader is None else loader,
            structure=structure,
            examples=most,
            likelihood=problem.likelihood,
            seed=int(torch.randint(2**62, ())),
            **options,
        )


@training_job("train")
@dataclass(frozen=True)
class FisherTraining:
    """The trained model, and its Fisher if the server asks for one.

    Parameters
    ----------
    structure : str | None
        Of the curvature; ``None``: an ordinary reply without one.
    fisher : FisherOptions
        How it is taken.
    codec : Codec
        How it is packed.
    """

    structure: str | None
    fisher: FisherOptions
    codec: Codec

    @classmethod
    def of(cls, problem: LocalProblem, request: Request) -> "FisherTraining":
        """Read the server's options.

        Raises
        ------
        ConfigurationError
            If a name is unknown, a number out of range, or a codec's budget too small
            for the parameters that arrived.
        ClientError
            If the combination is none that this client can give.
        DataError
            If the loader can be read once only, and is to be read twice.
        """
        options = request.options
        structure = options.get("structure")
        wanted = cls(
            None if structure is None else str(structure),
            FisherOptions.from_options(options),
            codec_of(request),
        )
        wanted._check()
        if structure == "ekfac" and isinstance(problem.trainloader, Iterator):
            raise DataError(
                "structure='ekfac' reads the loader twice; pass one that can be"
            )
        return wanted

    def _check(self) -> None:
        if self.structure is not None:
            self.fisher.check(self.structure)

    def train(
        self, problem: LocalProblem, config: Mapping[str, Any]
    ) -> tuple[dict[str, float], Curvature | None]:
        """Run the client's loop; return its metrics, and the Fisher if there is one."""
        metrics = problem.train(config)
        return metrics, None if self.structure is None else self._fisher(problem)

    def tried(self, problem: LocalProblem, batch: Batch) -> Curvature:
        """Return a batch's Fisher: the basis of E-KFAC, and one pass an example."""
        passes = 1 if self.fisher.expectation == "exact" else None
        few = replace(
            self,
            structure="kfac" if self.structure == "ekfac" else self.structure,
            fisher=replace(self.fisher, max_passes=passes),
        )
        return few._fisher(problem, [batch])

    def _fisher(
        self, problem: LocalProblem, loader: Iterable[Any] | None = None
    ) -> Curvature:
        assert self.structure is not None
        own = asdict(self.fisher)
        return client_fisher(problem, loader, structure=self.structure, **own)

    def arrays(self, trained: Trained) -> ArrayRecord:
        """Return parameters and Fisher, packed."""
        with watching("packing", unit="steps"):
            upload = FisherUpload(trained.params, trained.curvature)
            return upload.to_arrays(self.codec)


def codec_of(request: Request) -> Codec:
    """Return the codec that the server asks for, sized for its parameters."""
    if "codec-budget" in request.options:
        real_number(request.options, "codec-budget", 1.0)
    return resolve(Codec.from_options(request.options), request.params)
