"""The training job: FedFisher's training and Fisher, or FedAvg's training alone.

The first batch of a process's first training is checked before the model is trained.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from flwr.app import ArrayRecord

from flwr_fisher.client.jobs import LocalProblem, Reply, Request, get_job, register_job
from flwr_fisher.client.jobs.norm_statistics import catch_up_norms
from flwr_fisher.client.training import PRETRAINED, keeping_what_is_known
from flwr_fisher.client.trial import try_upload, upload_summary
from flwr_fisher.curvature import Curvature, FisherOptions, fisher
from flwr_fisher.curvature.data import check_can_be_read_again
from flwr_fisher.curvature.models import device_of, evaluating
from flwr_fisher.errors import ClientError, DataError, check_number
from flwr_fisher.log_lines import log_once, logger, watching
from flwr_fisher.merge import LocalPosterior
from flwr_fisher.params import Params
from flwr_fisher.tangent.frozen_head import output_layer
from flwr_fisher.wire import NUM_EXAMPLES, Codec, FisherUpload, resolve
from flwr_fisher.wire.arrays import arrays_bytes, fedavg_bytes, tensors_to_arrays
from flwr_fisher.wire.options import client_name

J = TypeVar("J", bound="type[TrainingJob]")
Trained = tuple[dict[str, float], Curvature | None]
"""A loop's metrics, and the Fisher of the trained model if it has one."""


def training_job(name: str) -> Callable[[J], J]:
    """Return a decorator that registers a :class:`TrainingJob`: train, upload."""

    def register(kind: J) -> J:
        register_job(name)(Training(kind))
        return kind

    return register


@dataclass(frozen=True)
class Training:
    """A registered job that trains, with the class that reads its options."""

    kind: "type[TrainingJob]"

    def __call__(self, problem: LocalProblem, request: Request) -> Reply:
        """Read the server's options, train, and return the upload."""
        return self.kind.of(problem, request).reply(problem, request)


def requested_training(options: Mapping[str, Any]) -> "type[TrainingJob]":
    """Return the class of the requested job, for an app that only trains.

    Raises
    ------
    ClientError
        If the server requests another kind of job. It names the job and the way out.
    """
    names = [options.get("check", "train"), options.get("job", "train")]
    jobs = {str(name): get_job(str(name)) for name in names}
    for name, job in jobs.items():
        if not isinstance(job, Training):
            raise ClientError(
                f"the strategy requests the job {name!r:.80}, but this app only "
                "trains: use FisherClient(model, trainloader, train_fn=...)"
            )
    return jobs[str(names[-1])].kind  # type: ignore[attr-defined, no-any-return]


@training_job("train")
@dataclass(frozen=True)
class TrainingJob:
    """Train the model, compute its Fisher if requested, and upload both.

    It reads the server's options ``structure`` and ``codec``, and those of
    :class:`~flwr_fisher.curvature.FisherOptions`. Jobs that derive from it read further
    options in their own ``of``.

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
        """
        named = request.options.get("structure")
        structure = None if named is None else str(named)
        options = FisherOptions.from_options(request.options)
        if structure is not None:
            options.check(structure)
        return cls(structure, options, codec_of(request))

    def reply(self, problem: LocalProblem, request: Request) -> Reply:
        """Train, and return the upload."""
        (metrics, curvature), count = self.trained(problem, request)
        return Reply(metrics, self.packed(problem, request, curvature, count))

    def trained(self, problem: LocalProblem, request: Request) -> tuple[Trained, float]:
        """Run the client's training; return its metrics and Fisher, and its weight."""
        metrics, curvature = self.train(problem, request)
        warn_if_unchanged(problem, request.params)
        count = problem.weight(metrics, request.client)
        logger.info("%s: trained on %g examples", client_name(request.client), count)
        return ({**metrics, NUM_EXAMPLES: count}, curvature), count

    def train(self, problem: LocalProblem, request: Request) -> Trained:
        """Run the client's loop; return its metrics, and the Fisher if it has one."""
        metrics = self.run_loop(problem, request)
        if self.structure is None:
            return metrics, None
        if request.options.get(PRETRAINED) is not True:  # or else they are as published
            catch_up_norms(problem)
        problem.count_examples(request.client)  # before a part of them is read
        return metrics, self.curvature(problem, problem.train_batches)

    def run_loop(self, problem: LocalProblem, request: Request) -> dict[str, Any]:
        """Run the client's loop, whose first batch is checked; return its metrics.

        Raises
        ------
        ConfigurationError, StructureError
            If the model has no trainable parameter, or one that no Fisher covers.
        """
        check = None
        if self.structure is not None:
            device_of(problem.model)
            check_can_be_read_again(problem.counted.loader, "a Fisher is taken of it")
            of_fisher = self.structure, self.fisher_options
            check = partial(try_upload, problem, request, *of_fisher)
        if request.options.get(PRETRAINED) is not True:
            return problem.train(request.config, on_first_batch=check)
        with evaluating(problem.model), torch.no_grad():
            # Not by the loader that counts the examples of an epoch.
            head = output_layer(problem.model, problem.mapped(problem.counted.loader))
        if all(name.startswith(f"{head}.") for name in problem.trainable()):
            raise ClientError(
                f"nothing but the last layer '{head}' is trained, for which "
                "pretrained=True has a closed form: use AFL()"
            )
        with keeping_what_is_known(problem.model, head):
            config = {**request.config, PRETRAINED: True}
            return problem.train(config, on_first_batch=check)

    def curvature(self, problem: LocalProblem, loader: Iterable[Any]) -> Curvature:
        """Return the Fisher on some of the client's data, within its limits."""
        count = problem.num_examples or problem.counted.longest
        most = problem.limits.examples(self.fisher_options.num_examples(count))
        with watching("curvature", min(count, most or count)):
            return fisher(
                problem.model,
                loader,
                str(self.structure),
                options=replace(self.fisher_options, examples=most),
                likelihood=problem.likelihood,
                num_examples=count or None,
                seed=int(torch.randint(2**62, ())),
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
        if curvature is None:
            return tensors_to_arrays(params)
        posterior = LocalPosterior(params, curvature, count)
        with watching("packing", unit="steps"):
            arrays = self.arrays(posterior, request.params)
        size, fedavg = arrays_bytes(arrays), fedavg_bytes(request.params)
        log_once(upload_summary(problem.model, curvature, size, fedavg))
        return arrays

    def arrays(self, posterior: LocalPosterior, start: Params) -> ArrayRecord:
        """Return parameters and Fisher, packed.

        Parameters
        ----------
        posterior : LocalPosterior
            The client's parameters and buffers after the training, and their Fisher.
        start : Mapping[str, Tensor]
            Those before the training, for jobs that upload a step.
        """
        return FisherUpload(posterior.params, posterior.curvature).to_arrays(self.codec)


def dry_run(problem: LocalProblem, request: Request) -> None:
    """Take a Fisher of the first batch with a label, as a job does after its training.

    The log then has what an upload is made of, and its size.

    Raises
    ------
    FlwrFisherError
        What the job would raise after its training, as far as one batch shows it.
    """
    job = requested_training(request.options).of(problem, request)
    device_of(problem.model)
    if job.structure is None:
        return
    batch = next((b for b in problem.trainloader if problem.read(b).num_labels), None)
    if batch is None:
        raise DataError("the trainloader has no batches, or none with a label")
    try_upload(problem, request, job.structure, job.fisher_options, batch)
    alone = replace(problem, trainloader=[batch])
    count = alone.count_examples(request.client)
    job.packed(alone, request, job.curvature(alone, alone.train_batches), count)


def warn_if_unchanged(problem: LocalProblem, start: Params) -> None:
    """Log a warning if a training has changed no parameter."""
    trained = problem.trainable().items()
    if all(torch.equal(tensor, start[name].to(tensor)) for name, tensor in trained):
        logger.warning(
            "The training has changed no parameter. If it trained a copy of the model, "
            "load the copy's state_dict() into the model at the end"
        )


def codec_of(request: Request) -> Codec:
    """Return the codec that the server requests, with a budget for its parameters."""
    if (budget := request.options.get("codec-budget")) is not None:
        check_number("codec-budget", budget)
    return resolve(Codec.from_options(request.options), request.params)
