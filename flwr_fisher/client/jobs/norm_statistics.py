"""The job that measures a merged model's batch norms by one pass over the data."""

from flwr_fisher.client.jobs import LocalProblem, Reply, Request, register_job
from flwr_fisher.curvature.models import is_frozen
from flwr_fisher.errors import ClientError
from flwr_fisher.log_lines import logger
from flwr_fisher.merge.batch_norms import norms_of, zero_shifts
from flwr_fisher.merge.refresh import norm_shifts, norms_by_prefix
from flwr_fisher.wire import Additive
from flwr_fisher.wire.additive import NORMS


@register_job("norm-statistics")
def norm_statistics_job(problem: LocalProblem, request: Request) -> Reply:
    """Return the shifts from batch norms' statistics to those of their inputs.

    The option ``norms`` names the norms to measure, by the keys of their statistics up
    to ``running_mean``. With ``frozen`` false, those that the client does not train
    stay as they are.

    Raises
    ------
    ClientError
        If the server names norms but did not send their statistics.
    DataError
        If there is no batch of two examples.
    """
    asked = request.options.get("norms")
    prefixes = list(map(str, asked)) if isinstance(asked, list) else []
    if unknown := sorted({*prefixes} - {*norms_of(request.params)}):
        raise ClientError(
            f"the server requests statistics of {unknown}, but did not send these: "
            "install the same flwr-fisher on both sides"
        )
    known = norms_by_prefix(problem.model)
    if others := [each[:-1] for each in prefixes if each not in known]:
        logger.warning(
            "The layers %s have running statistics, but are no nn.BatchNorm: theirs "
            "stay the clients' mean, which may not fit the merged model",
            others,
        )
    kept = set[str]()
    if request.options.get("frozen") is False:
        kept = {prefix for prefix, norm in known.items() if is_frozen(norm)}
    measured = [each for each in prefixes if each not in kept]
    shifts = zero_shifts(request.params, prefixes)
    shifts |= norm_shifts(problem.model, problem.train_batches, measured)
    own = {name: value.to(request.params[name].dtype) for name, value in shifts.items()}
    return Reply({}, Additive({NORMS: own}).to_arrays())
