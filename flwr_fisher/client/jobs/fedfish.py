"""FedFish's job: training, with squared batch gradients after it or during it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord
from torch import nn

from flwr_fisher.client.jobs import LocalProblem, Request
from flwr_fisher.client.jobs.norm_statistics import catch_up_norms
from flwr_fisher.client.jobs.train import Trained, TrainingJob, codec_of, training_job
from flwr_fisher.client.training import local_sgd
from flwr_fisher.curvature import Curvature, Diagonal, FisherOptions
from flwr_fisher.curvature.data import Batch, read
from flwr_fisher.merge import LocalPosterior
from flwr_fisher.params import Params, Sums, double, subtract, sum_dtype, trainable
from flwr_fisher.rounds import FishOptions
from flwr_fisher.wire import Additive
from flwr_fisher.wire.additive import products

_SQUARES = "FedFish(fisher_source='last-epoch') squares gradients while training"


@training_job("fedfish")
@dataclass(frozen=True)
class FedFishJob(TrainingJob):
    """Train, sum squared batch gradients, and upload them with the model.

    Parameters
    ----------
    fish_options : FishOptions
        How the Fisher is made of squared batch gradients.
    as_sums : bool
        Whether the upload is for a sum over clients: the model, the Fisher, and the
        step times the Fisher, without packing. (The option ``upload`` is "sums" then.)
    """

    fish_options: FishOptions
    as_sums: bool

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
        fish_options = FishOptions.from_options(request.options)
        if fish_options.fisher_source == "last-epoch":
            local_sgd(problem.train_fn, _SQUARES)
        fisher_options = FisherOptions.full(expectation="empirical-batch")
        as_sums = request.options.get("upload") == "sums"
        return cls("diagonal", fisher_options, codec_of(request), fish_options, as_sums)

    def train(self, problem: LocalProblem, request: Request) -> Trained:
        """Run the client's loop; return its metrics, and the Fisher."""
        mean: Curvature
        if self.fish_options.fisher_source == "extra-pass":
            metrics = self.run_loop(problem, request)
            catch_up_norms(problem)
            problem.count_examples(request.client)  # before a part of them is read
            labelled: list[bool] = []  # a batch without any label has no gradient

            def noted(one: Any) -> Batch:
                batch = read(one, problem.model)
                labelled.append(batch.num_labels > 0)
                return batch

            mean = self.curvature(problem, map(noted, problem.train_batches))
            num_batches = sum(labelled)
        else:
            epochs = local_sgd(problem.train_fn, _SQUARES).epochs
            squares = LastEpochSquares(problem.model, epochs)
            # Of the loop's own loss, whatever the likelihood is.
            metrics = problem.train(request.config, on_gradients=squares)
            mean, num_batches = squares.curvature(), squares.count
        return metrics, self.fish_options.scaled(mean, num_batches)

    def arrays(self, posterior: LocalPosterior, start: Params) -> ArrayRecord:
        """Return the model with its Fisher, packed or as a contribution to a sum."""
        if not self.as_sums:
            return super().arrays(posterior, start)
        params, names = posterior.params, posterior.curvature.shapes
        step = subtract(double(start, names), double(params, names))
        squares = posterior.curvature.diagonal().items()
        fisher = {k: v.to(sum_dtype(v.dtype)) for k, v in squares}
        parts = {"product": products(fisher, step), "fisher": fisher, "params": params}
        return Additive(parts).to_arrays()


class LastEpochSquares:
    r"""The mean of squared batch gradients, collected during training.

    FedFish, Appendix A.5.1: it uses the gradients of the last local epoch, in which the
    parameters still change, instead of another pass at the end. `count` is how many
    batches had gradients; one without any label has none.
    """

    def __init__(self, model: nn.Module, epochs: int) -> None:
        self._parameters = trainable(model)
        self._sums = Sums(self._parameters)
        self.count, self._epochs = 0, epochs

    def __call__(self, epoch: int, step: int) -> None:
        """Add the current gradients, if this is the last epoch."""
        if epoch == self._epochs:
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
        self._sums.totals = dict(state["sums"])
