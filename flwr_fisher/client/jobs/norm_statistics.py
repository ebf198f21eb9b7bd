"""Statistics of batch norms: a merged model's, and a client's own after training."""

from flwr_fisher.client.jobs import LocalProblem, Reply, Request, register_job
from flwr_fisher.client.training import score
from flwr_fisher.curvature.models import by_batch_statistics, evaluating, is_frozen
from flwr_fisher.errors import FlwrFisherError
from flwr_fisher.log_lines import logger
from flwr_fisher.merge import batch_norms
from flwr_fisher.randomness import seeded
from flwr_fisher.wire import Additive
from flwr_fisher.wire.additive import NORMS

_EXAMPLES = 256  # at least, in the batches that are checked
_FACTOR, _MARGIN = 1.5, 0.5  # of losses, in nats if they are of classes


@register_job("norm-statistics")
def norm_statistics_job(problem: LocalProblem, request: Request) -> Reply:
    """Return the shifts from batch norms' statistics to those of their inputs.

    The option ``norms`` names the norms to measure, by the keys of their statistics up
    to ``running_mean``. With ``frozen`` false, those that the client does not train
    stay as they are.

    Raises
    ------
    DataError
        If there is no batch of two examples.
    """
    named = request.options.get("norms")
    prefixes = list(map(str, named)) if isinstance(named, list) else []
    measured = prefixes
    if request.options.get("frozen") is False:
        norms = batch_norms.norms_by_prefix(problem.model)
        measured = [p for p in prefixes if p not in norms or not is_frozen(norms[p])]
    shifts = batch_norms.zero_shifts(request.params, prefixes)
    shifts |= batch_norms.norm_shifts(problem.model, problem.train_batches, measured)
    shifts = {k: value.to(request.params[k].dtype) for k, value in shifts.items()}
    return Reply({}, Additive({NORMS: shifts}).to_arrays())


def catch_up_norms(problem: LocalProblem) -> None:
    """Recompute the norms' statistics if the model is far worse in eval mode.

    With a small ``momentum``, or few batches, the running statistics belong to weights
    from early in the training. With them, the model that is uploaded would not be the
    model that was trained, and its Fisher would be wrong, too.
    """
    model = problem.model
    norms = set(batch_norms.norms_by_prefix(model).values())
    if not norms:
        return
    with seeded(0):  # nothing else depends on these random numbers
        few, count = [], 0
        for batch in problem.trainloader:
            read = problem.read(batch)
            if len(read) > 1 and read.num_labels:
                few.append(batch)
                count += len(read)
            if count >= _EXAMPLES:
                break
        first = problem.mapped(few), problem.device, problem.loss
        try:
            in_eval, *_ = score(model, *first, classes=False)
            with evaluating(model), by_batch_statistics(norms):
                in_train, *_ = score(model, *first, classes=False, as_it_is=True)
        except FlwrFisherError:  # the labels are for another loss, in the user's loop
            return
        if not in_eval > _FACTOR * in_train + _MARGIN:
            return
        text = "The batch norms' running statistics lag behind the trained model: its "
        text += "loss is %.3g in eval mode and %.3g in train mode. Recomputing them "
        logger.warning(text + "from the training data", in_eval, in_train)
        batch_norms.refresh_norms(model, problem.train_batches)
