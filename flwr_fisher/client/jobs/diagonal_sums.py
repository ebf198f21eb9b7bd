"""FedFisher's job for sums of diagonals: training, and a client's contribution."""

from dataclasses import dataclass, replace

from flwr.app import ArrayRecord

from flwr_fisher.client.jobs import LocalProblem, Request
from flwr_fisher.client.jobs.train import TrainingJob, training_job
from flwr_fisher.client.request import real_number
from flwr_fisher.errors import ClientError, check_positive
from flwr_fisher.merge import DiagonalSums, LocalPosterior, contribution
from flwr_fisher.params import Params
from flwr_fisher.wire import Additive
from flwr_fisher.wire.additive import SUMS


@training_job("diagonal-sums")
@dataclass(frozen=True)
class DiagonalSumsJob(TrainingJob):
    """Train, compute a diagonal Fisher, and upload a contribution to the sums.

    Parameters
    ----------
    clipping_norm : float | None
        The largest norm of the step from the server's parameters, for private sums:
        then the contribution has a norm of at most 1.
    """

    clipping_norm: float | None

    @classmethod
    def of(cls, problem: LocalProblem, request: Request) -> "DiagonalSumsJob":
        """Read the server's options; errors as of :meth:`TrainingJob.of`."""
        own = TrainingJob.of(problem, request)
        if (own.structure, own.codec.name) != ("diagonal", "lossless"):
            raise ClientError(
                "the server requests sums of diagonals: it must use "
                "structure='diagonal' and codec='lossless', not "
                f"{own.structure!r} and {own.codec.name!r}"
            )
        norm = None
        if "clipping-norm" in request.options:
            norm = real_number(request.options, "clipping-norm", 1.0)
            check_positive("clipping-norm", norm)
        return cls(**vars(own), clipping_norm=norm)

    def arrays(self, posterior: LocalPosterior, start: Params) -> ArrayRecord:
        """Return this client's contribution."""
        params, curvature = posterior.params, posterior.curvature
        if self.clipping_norm is None:
            sums = DiagonalSums.of([replace(posterior, num_examples=1)])
            parts = params, sums.fisher, sums.fisher_params
            return Additive(dict(zip(SUMS, parts, strict=True))).to_arrays()
        diagonal = curvature.diagonal()
        vectors = contribution(start, params, diagonal, self.clipping_norm)
        named = {f"contribution/{name}": own for name, own in vectors.items()}
        return Additive(named).to_arrays()
