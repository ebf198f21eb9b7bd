"""A client's own batch norms, whose statistics may lag behind its training."""

from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.training import score_batches
from flwr_fisher.curvature.batch import Batch
from flwr_fisher.curvature.batches import batches_of, can_be_read_again, length_of
from flwr_fisher.curvature.models import evaluating
from flwr_fisher.errors import FlwrFisherError
from flwr_fisher.log_lines import logger
from flwr_fisher.merge.refresh import norms_by_prefix, norms_training, refresh_norms
from flwr_fisher.randomness import seeded

_EXAMPLES = 256  # at least, in the batches that are checked
_FACTOR, _MARGIN = 1.5, 0.5  # of losses, in nats if they are of classes


def catch_up_norms(problem: LocalProblem) -> None:
    """Recompute the norms' statistics if the model is far worse in eval mode.

    With a small ``momentum``, or few batches, the running statistics belong to weights
    from early in the training. With them, the model that is uploaded would not be the
    model that was trained, and its Fisher would be wrong, too.
    """
    model, loader = problem.model, problem.trainloader
    norms = set(norms_by_prefix(model).values())
    # A stream may not end; the user's own loop may stop earlier.
    ends = length_of(loader) is not None or not problem.may_count_late
    if not (norms and ends and can_be_read_again(loader)):
        return
    with seeded(0):  # nothing else depends on these random numbers
        few = _first(problem)
        try:
            with evaluating(model):
                in_eval, *_ = score_batches(model, few, problem.loss, classes=False)
            with norms_training(model, norms):
                in_train, *_ = score_batches(model, few, problem.loss, classes=False)
        except FlwrFisherError:  # the labels are for another loss, in the user's loop
            return
        if not in_eval > _FACTOR * in_train + _MARGIN:
            return
        logger.warning(
            "The batch norms' running statistics lag behind the trained model: its "
            "loss is %.3g in eval mode and %.3g in train mode. Recomputing them from "
            "the training data",
            in_eval,
            in_train,
        )
        refresh_norms(model, problem.train_batches)


def _first(problem: LocalProblem) -> list[Batch]:
    """Return the first batches with labels that a norm accepts in train mode."""
    few, count = list[Batch](), 0
    for batch in batches_of(problem.train_batches, problem.model, problem.device):
        if len(batch) > 1 and batch.num_labels:
            few.append(batch)
            count += len(batch)
        if count >= _EXAMPLES:
            break
    return few
