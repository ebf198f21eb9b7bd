"""FedFisher's client where diagonals are summed: what it adds to the sums."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.client.jobs.train import FisherOptions, training_job
from flwr_fisher.client.limits import real_number
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import Request
from flwr_fisher.client.trial import Batch
from flwr_fisher.curvature import Curvature
from flwr_fisher.errors import ClientError, check_positive
from flwr_fisher.merge import DiagonalSums, LocalPosterior, contribution
from flwr_fisher.params import Params
from flwr_fisher.wire import SumsUpload, VectorUpload


@training_job("diagonal-sums")
@dataclass(frozen=True)
class DiagonalSumsOptions:
    """What the server's sums over clients are of; for diagonals alone.

    Parameters
    ----------
    fisher : FisherOptions
        Which Fisher.
    clipping_norm : float | None
        Of the step from the server's parameters, for sums that are to be private: then
        the contribution has a norm of 1 at most.
    """

    fisher: FisherOptions
    clipping_norm: float | None
    codec = None
    structure = "diagonal"

    @classmethod
    def of(cls, problem: LocalProblem, request: Request) -> "DiagonalSumsOptions":
        """Read the server's options; errors as of :meth:`FisherOptions.of`."""
        fisher = FisherOptions.of(problem, request)
        plain = fisher.structure, fisher.codec.scheme
        if plain != ("diagonal", "lossless"):
            raise ClientError(
                "the server asks for sums, which exist for structure='diagonal' and "
                f"codec='lossless' alone, not for {plain[0]!r} and {plain[1]!r}"
            )
        norm = None
        if "clipping-norm" in request.options:
            norm = real_number(request.options, "clipping-norm", 1.0)
            check_positive("clipping-norm", norm)
        return cls(fisher, norm)

    def train(
        self, problem: LocalProblem, config: Mapping[str, Any]
    ) -> tuple[dict[str, float], Curvature | None]:
        """Run the client's loop; return its metrics, and the Fisher."""
        return self.fisher.train(problem, config)

    def tried(self, problem: LocalProblem, batch: Batch) -> Curvature:
        """Return a batch's Fisher."""
        return self.fisher.tried(problem, batch)

    def arrays(
        self,
        start: Params,
        params: dict[str, Tensor],
        curvature: Curvature | None,
        num_examples: float,
    ) -> ArrayRecord:
        """Return what this client adds to the sums."""
        assert curvature is not None
        if self.clipping_norm is None:
            posterior = LocalPosterior(params, curvature, num_examples)
            return SumsUpload(DiagonalSums.of(posterior)).to_arrays()
        diagonal = curvature.diagonal()
        vectors = contribution(start, params, diagonal, self.clipping_norm)
        return VectorUpload(vectors).to_arrays()
