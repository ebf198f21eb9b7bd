"""The training job: FedFisher's training and Fisher, or FedAvg's training alone.

Long: the trial before training runs the same steps as the upload after it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import update_wrapper
from typing import Any, TypeVar

import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from flwr_fisher.client.batch_norms import catch_up_norms
from flwr_fisher.client.jobs import (
    Job,
    LocalProblem,
    Reply,
    Request,
    get_job,
    register_job,
)
from flwr_fisher.client.jobs.evaluate import local_scores
from flwr_fisher.client.training import LocalSGD, score
from flwr_fisher.client.trial import (
    check_outputs,
    log_once,
    on_few_examples,
    upload_summary,
)
from flwr_fisher.curvature import Curvature, FisherOptions, fisher
from flwr_fisher.curvature.batch import Batch
from flwr_fisher.curvature.batches import check_can_be_read_again, count_of
from flwr_fisher.curvature.models import device_of
from flwr_fisher.errors import ClientError, check_number
from flwr_fisher.log_lines import logger, watching
from flwr_fisher.merge import LocalPosterior
from flwr_fisher.params import Params, check_finite
from flwr_fisher.wire import (
    NUM_EXAMPLES,
    REGRESSION,
    Codec,
    FisherUpload,
    arrays_bytes,
    fedavg_bytes,
    resolve,
    tensors_to_arrays,
)
from flwr_fisher.wire.answer import client_name

_ENTRIES, _CUBES = 3 * 10**5, 10**8  # that take about a tenth of a second to pack
J = TypeVar("J", bound="type[TrainingJob]")


def training_job(name: str) -> Callable[[J], J]:
    """Return a decorator that registers a :class:`TrainingJob`: try, train, upload.

    With the option ``report-local``, the metrics also have ``local-loss`` and
    ``local-accuracy``.
    """

    def register(job: J) -> J:
        def run(problem: LocalProblem, request: Request) -> Reply:
            return job.of(problem, request).reply(problem, request)

        register_job(name)(update_wrapper(run, job, updated=()))
        return job

    return register


def training_job_of(job: Job) -> "type[TrainingJob] | None":
    """Return the class of a registered job, or None if it does not train."""
    own = getattr(job, "__wrapped__", None)  # as `training_job` leaves it
    return own if isinstance(own, type) and issubclass(own, TrainingJob) else None


def requested_training(options: Mapping[str, Any]) -> "type[TrainingJob]":
    """Return the class of the requested job, for an app that only trains.

    Raises
    ------
    ClientError
        If the server requests another kind of job. It names the job and the way out.
    """
    job: type[TrainingJob] | None = None
    for name in (options.get("check", "train"), options.get("job")):
        if (job := training_job_of(get_job(str(name or "train")))) is None:
            raise ClientError(
                f"the strategy requests the job {name!r:.80}, but fisher_arrays "
                "supports only jobs that train: pass your model, loader and training "
                "function to FisherClient(model, trainloader, train_fn=...)"
            )
    assert job is not None
    return job


@training_job("train")
@dataclass(frozen=True)
class TrainingJob:
    """Train the model, compute its Fisher if requested, and upload both.

    It reads the server's options ``structure`` and ``codec``, those of
    :class:`~flwr_fisher.curvature.FisherOptions`, and ``report-local``. Jobs that
    derive from it read further options in their own ``of``.

    Parameters
    ----------
    structure : str | None
        The structure of the Fisher. With ``None`` the client computes no Fisher, and
        uploads only the model.
    fisher_options : FisherOptions
        How the client computes the Fisher.
    codec : Codec
        How the client packs the Fisher.
    """

    structure: str | None
    fisher_options: FisherOptions
    codec: Codec

    @classmethod
    def of(cls, problem: LocalProblem, request: Request) -> "TrainingJob":
        """Read the server's options.

        Raises
        ------
        ConfigurationError
            If a name is unknown, a number out of range, or a codec's budget too small
            for the received parameters.
        DataError
            If the loader can be read only once, but the job must read it twice.
        """
        options = request.options
        structure = options.get("structure")
        job = cls(
            None if structure is None else str(structure),
            FisherOptions.from_options(options),
            codec_of(request),
        )
        if job.structure is not None:
            job.fisher_options.check([job.structure])
        if structure == "ekfac":
            check_can_be_read_again(
                problem.trainloader, "structure='ekfac' reads the loader twice"
            )
        return job

    def reply(self, problem: LocalProblem, request: Request) -> Reply:
        """Try the upload, train, and return the upload."""
        if self.structure is not None:
            problem.check_can_be_read_again()
        try_upload(problem, request, self)
        metrics, curvature = self.train(problem, request.config)
        count = request.weight(metrics, problem)
        arrays = self.packed(problem, request, curvature, count)
        metrics |= local_scores(problem, request)
        name = client_name(request.client).capitalize()
        logger.info("%s: trained on %g examples", name, count)
        return Reply({**metrics, NUM_EXAMPLES: count}, arrays)

    def train(
        self, problem: LocalProblem, config: Mapping[str, Any]
    ) -> tuple[dict[str, float], Curvature | None]:
        """Run the client's loop; return its metrics, and the Fisher if it has one."""
        metrics = problem.train(config)
        if self.structure is None:
            return metrics, None
        catch_up_norms(problem)
        if problem.likelihood == "gaussian":
            # By default the merge takes one iteration then: strategies/fedfisher.py.
            metrics = {**metrics, REGRESSION: 1}
        loader: Iterable[Any] = problem.train_batches
        if self.fisher_options.examples is None:
            loader = problem.batches_trained_on(metrics)
        return metrics, self.curvature(problem, loader)

    def trial_curvature(self, problem: LocalProblem, batch: Batch) -> Curvature:
        """Return a batch's cheap Fisher: K-FAC for E-KFAC, one pass an example."""
        passes = 1 if self.fisher_options.expectation == "exact" else None
        structure = "kfac" if self.structure == "ekfac" else self.structure
        cheap = replace(self.fisher_options, max_passes=passes)
        job = replace(self, structure=structure, fisher_options=cheap)
        return job.curvature(problem, [batch])

    def curvature(self, problem: LocalProblem, loader: Iterable[Any]) -> Curvature:
        """Return the Fisher on some of the client's data, within its limits."""
        count = count_of(problem.trainloader)
        options = self.fisher_options.for_client(count)
        most = problem.limits.examples(options.pop("examples"))
        total = most if count is None else min(count, most or count)
        readings = 2 if self.structure == "ekfac" else 1
        # At most so many are read; fewer if the bound on passes is reached first.
        with watching("curvature", None if total is None else readings * total):
            return fisher(
                problem.model,
                loader,
                structure=str(self.structure),
                examples=most,
                likelihood=problem.likelihood,
                seed=int(torch.randint(2**62, ())),
                **options,
            )

    def packed(
        self,
        problem: LocalProblem,
        request: Request,
        curvature: Curvature | None,
        count: float,
    ) -> ArrayRecord:
        """Return the upload of a problem's trained model with weight `count`."""
        params = problem.state_like(request.params)
        log_untrained_share(problem.model, params)
        warn_if_unchanged(problem, request.params)
        if curvature is None:
            return tensors_to_arrays(params)
        return self.arrays(LocalPosterior(params, curvature, count), request.params)

    def arrays(self, posterior: LocalPosterior, start: Params) -> ArrayRecord:
        """Return parameters and Fisher, packed.

        Parameters
        ----------
        posterior : LocalPosterior
            The client's parameters and buffers after the training, and their Fisher.
        start : Mapping[str, Tensor]
            Those before the training, for jobs that upload a step.
        """
        with watching("packing", unit="steps"):
            upload = FisherUpload(posterior.params, posterior.curvature)
            return upload.to_arrays(self.codec)


def try_upload(problem: LocalProblem, request: Request, job: TrainingJob) -> None:
    """Compute a few examples' Fisher at the server's parameters, and pack it.

    If the client could not compute or upload something after its training, the same
    error is raised now. This needs a few examples: see :func:`on_few_examples`. What
    would take long to pack is not packed, because its codec is known to work. The log
    says, once a process, which layer has which structure.

    Raises
    ------
    FlwrFisherError
        Any error of the computation that is tried. It is a :class:`DataError` or
        :class:`ClientError` if the model's outputs are not finite.
    """
    if job.structure is None:
        return
    device_of(problem.model, None)  # which refuses a model without a Fisher

    def attempt(problem: LocalProblem, batch: Batch) -> list[str]:
        check_outputs(problem, batch)
        curvature = job.trial_curvature(problem, batch)
        if request.options.get("report-local"):
            classes = problem.has_classes
            score(problem.model, [batch], problem.device, problem.loss, classes=classes)
        size = _size_in_words(problem, request, job, curvature)
        return upload_summary(problem.model, curvature, job.structure, size)

    if (lines := on_few_examples(problem, attempt)) is not None:
        log_once(lines)


def log_untrained_share(model: nn.Module, params: Params) -> None:
    """Log, once a process, that an upload has parameters that are not trained."""
    frozen = [
        params[name].nbytes
        for name, parameter in model.named_parameters()
        if name in params and not parameter.requires_grad
    ]
    if frozen:
        share = sum(frozen) / sum(tensor.nbytes for tensor in params.values())
        text = (
            f"{len(frozen)} frozen parameters are {share:.0%} of the upload, since the "
        )
        text += "server sent them: start from shared_state(model), which has none"
        log_once([text])


def warn_if_unchanged(problem: LocalProblem, start: Params) -> None:
    """Log a warning if a loop of the user's own has changed no parameter."""
    own = problem.trainable().items()
    if not isinstance(problem.train_fn, LocalSGD) and all(
        torch.equal(tensor, start[name].to(tensor)) for name, tensor in own
    ):
        logger.warning(
            "The training has changed no parameter, so the client uploads what the "
            "server sent. If it trained a copy of the model, load the copy's "
            "state_dict() into the model at the end"
        )


def _size_in_words(
    problem: LocalProblem, request: Request, job: TrainingJob, curvature: Curvature
) -> str:
    """Return an upload's size in words, without packing large matrices."""
    tensors = {f"tensor {i}": t for i, t in enumerate(curvature.tensors())}
    check_finite(tensors, "the curvature of a few examples")
    plain, codec = fedavg_bytes(request.params), job.codec
    if codec.budget is not None and _takes_long(list(tensors.values())):
        size, about = int(codec.budget * plain), "at most"
    else:
        params, count = problem.state_like(request.params), max(request.num_examples, 1)
        posterior = LocalPosterior(params, curvature, count)
        arrays = job.arrays(posterior, request.params)
        size, about = arrays_bytes(arrays), "about"
    return f"upload {about} {amount(size, plain)}"


def amount(size: int, plain: int) -> str:
    """Return an upload's size in words, with its ratio to FedAvg's plain upload."""
    own = f"{size / 1e6:.2f} MB" if size >= 10**5 else f"{size / 1e3:.1f} kB"
    return f"{own}, {size / plain:.2f} of FedAvg's"


def _takes_long(tensors: Sequence[Tensor]) -> bool:
    """Return whether packing takes long: many tensors, or large matrices."""
    entries = sum(t.numel() for t in tensors)
    cubes = sum(t.numel() * t.shape[-1] for t in tensors if t.dim() > 1)
    return entries > _ENTRIES or cubes > _CUBES


def codec_of(request: Request) -> Codec:
    """Return the codec that the server requests, with a budget for its parameters."""
    if (budget := request.options.get("codec-budget")) is not None:
        check_number("codec-budget", budget)
    return resolve(Codec.from_options(request.options), request.params)
