"""A merge as a round's step: the merged model, its metrics, and a warning."""

from flwr_fisher.log_lines import logger
from flwr_fisher.merge import MergeResult
from flwr_fisher.server.exchange import ServerState, Step


def step_of(merged: MergeResult) -> Step:
    """Return the step to a merged model; warn of parameters that were not solved."""
    if merged.unsolved:
        logger.warning(
            "the merge's solver failed for %s: there, the model is the clients' mean, "
            "as FedAvg's",
            ", ".join(merged.unsolved),
        )
    metrics = {
        "solver-iterations": merged.iterations,
        "solver-residual": merged.residuals[-1],
        "solver-fallbacks": len(merged.unsolved),
    }
    if merged.outliers:
        metrics["num-outliers"] = len(merged.outliers)
    shares = {"client-share": merged.shares} if merged.shares else {}
    return Step(ServerState(merged.params), {**metrics, **shares}, merged)
