"""FedFisher's job for sums of diagonals: training, and a client's contribution."""

from dataclasses import dataclass, replace

from flwr.app import ArrayRecord

from flwr_fisher.client.jobs import LocalProblem, Request
from flwr_fisher.client.jobs.train import TrainingJob, training_job
from flwr_fisher.errors import ClientError
from flwr_fisher.merge import DiagonalSums, LocalPosterior
from flwr_fisher.params import Params
from flwr_fisher.wire import Additive
from flwr_fisher.wire.additive import SUMS


@training_job("diagonal-sums")
@dataclass(frozen=True)
class DiagonalSumsJob(TrainingJob):
    """Train, compute a diagonal Fisher, and upload a contribution to the sums."""

    @classmethod
    def of(cls, problem: LocalProblem, request: Request) -> "DiagonalSumsJob":
        """Read the server's options; errors as of :meth:`TrainingJob.of`."""
        job = TrainingJob.of(problem, request)
        if (job.structure, job.codec.name) != ("diagonal", "lossless"):
            raise ClientError(
                "the server requests sums of diagonals: it must use "
                "structure='diagonal' and codec='lossless', not "
                f"{job.structure!r} and {job.codec.name!r}"
            )
        return cls(**vars(job))

    def arrays(self, posterior: LocalPosterior, start: Params) -> ArrayRecord:
        """Return this client's contribution."""
        sums = DiagonalSums.of([replace(posterior, num_examples=1)])
        parts = posterior.params, sums.fisher, sums.fisher_params
        return Additive(dict(zip(SUMS, parts, strict=True))).to_arrays()
