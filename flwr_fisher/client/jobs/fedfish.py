"""FedFish's job: training, with squared batch gradients after it or during it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord
from torch import nn

from flwr_fisher.client.jobs import LocalProblem, Request
from flwr_fisher.client.jobs.norm_statistics import catch_up_norms
from flwr_fisher.client.jobs.train import TrainingJob, codec_of, training_job
from flwr_fisher.client.request import real_number
from flwr_fisher.client.training import local_sgd
from flwr_fisher.curvature import Curvature, Diagonal, FisherOptions
from flwr_fisher.curvature.sums import Sums
from flwr_fisher.errors import check_known, check_range
from flwr_fisher.merge import LocalPosterior
from flwr_fisher.params import Params, select, subtract, sum_dtype, trainable
from flwr_fisher.wire import Additive

_SOURCES = ("extra-pass", "last-epoch")
_REDUCTIONS = ("mean", "sum")
_UPLOADS = ("fisher", "product", "sums")
_SQUARES = "FedFish(fisher_source='last-epoch') squares gradients while training"


@training_job("fedfish")
@dataclass(frozen=True)
class FedFishJob(TrainingJob):
    """Train, sum squared batch gradients, and upload them with the model or the step.

    Parameters
    ----------
    source : "extra-pass" | "last-epoch"
        Whether the Fisher is computed in a pass after the training, or from its last
        epoch.
    reduction : "mean" | "sum"
        Whether the Fisher is the mean or the sum of squared batch gradients.
    power : float
        Each entry of the Fisher is raised to this power, in [0, 1].
    balance : float
        The Fisher is then divided by this power, in [0, 1], of its trace.
    upload : "fisher" | "product" | "sums"
        What is uploaded: the parameters and the Fisher, the step times the Fisher, or
        all three.
    """

    source: str
    reduction: str
    power: float
    balance: float
    upload: str

    @classmethod
    def of(cls, problem: LocalProblem, request: Request) -> "FedFishJob":
        """Read the server's options.

        Raises
        ------
        ConfigurationError
            If a name is unknown, a number out of range, or a codec's budget too small
            for the received parameters.
        ClientError
            If the gradients of a loop must be squared, and the loop is not this
            library's.
        """
        options = request.options
        job = cls(
            "diagonal",
            FisherOptions.from_options({"expectation": "empirical-batch"}),
            codec_of(request),
            str(options.get("source", "extra-pass")),
            str(options.get("reduction", "mean")),
            real_number(options, "power", 1.0),
            real_number(options, "balance", 0.0),
            str(options.get("upload", "fisher")),
        )
        check_known("source", job.source, _SOURCES)
        check_known("reduction", job.reduction, _REDUCTIONS)
        check_range("power", job.power, 0, 1)
        check_range("balance", job.balance, 0, 1)
        check_known("upload", job.upload, _UPLOADS)
        if job.source == "last-epoch":
            local_sgd(problem.train_fn, _SQUARES)
        return job

    def train(
        self, problem: LocalProblem, request: Request
    ) -> tuple[dict[str, float], Curvature | None]:
        """Run the client's loop; return its metrics, and the Fisher."""
        if self.source == "extra-pass":
            metrics = self.run_loop(problem, request)
            catch_up_norms(problem)
            curvature = self.curvature(problem, problem.train_batches)
            return metrics, self._scaled(curvature, problem)
        epochs = local_sgd(problem.train_fn, _SQUARES).epochs
        squares = LastEpochSquares(problem.model, epochs)
        metrics = self.run_loop(problem, request, on_gradients=squares)
        return metrics, self._scaled(squares.curvature(), problem, squares.count)

    def _scaled(
        self, curvature: Curvature, problem: LocalProblem, batches: int | None = None
    ) -> Curvature:
        """Return the Fisher as a sum, to a power and balanced, as requested."""
        if self.reduction == "sum" and self.balance < 1:  # balancing removes any factor
            if batches is None:
                batches = problem.counted.batches or sum(1 for _ in problem.counted)
            curvature = curvature.scaled(batches)
        if self.power != 1:
            entries = curvature.diagonal()
            curvature = Diagonal({k: v**self.power for k, v in entries.items()})
        if self.balance and (trace := curvature.trace()):
            curvature = curvature.scaled(trace**-self.balance)
        return curvature

    def arrays(self, posterior: LocalPosterior, start: Params) -> ArrayRecord:
        """Return the model with its Fisher, or the Fisher times the step."""
        params, curvature = posterior.params, posterior.curvature
        if self.upload == "fisher":
            return super().arrays(posterior, start)
        names = curvature.shapes
        step = subtract(select(start, names), select(params, names))
        product = curvature.matvec(step)
        if self.upload == "sums":
            squares = curvature.diagonal().items()
            fisher = {k: v.to(sum_dtype(v.dtype)) for k, v in squares}
            own = Additive({"product": product, "fisher": fisher, "params": params})
            return own.to_arrays()
        buffers = {k: v for k, v in params.items() if k not in product}
        return Additive({"product": product, "buffers": buffers}).to_arrays()


class LastEpochSquares:
    r"""The mean of squared batch gradients, collected during training.

    FedFish, Appendix A.5.1: it uses the gradients of the last local epoch, in which the
    parameters still change, instead of another pass at the end. `count` is how many
    batches had gradients; one without any label has none.
    """

    def __init__(self, model: nn.Module, epochs: int) -> None:
        self._parameters = trainable(model)
        self._sums = Sums({})
        self.count, self._epochs = 0, epochs

    def __call__(self, epoch: int, step: int) -> None:
        """Add the current gradients, if this is the last epoch."""
        if epoch < self._epochs:
            return
        if not self.count:
            self._sums = Sums(self._parameters)
        self._sums.add_squares(p.grad for p in self._parameters.values())
        self.count += 1

    def curvature(self) -> Diagonal:
        """Return the mean over the calls."""
        return Diagonal(self._sums.mean(self.count))

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far, for a checkpoint."""
        return {"sums": self._sums.totals, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums of a checkpoint."""
        self.count = state["count"]
        self._sums = Sums(self._parameters if self.count else {})
        self._sums.totals = dict(state["sums"])
