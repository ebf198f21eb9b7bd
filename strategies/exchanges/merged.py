"""The step of a merge: the merged model, its metrics, and its log lines."""

from flwr_fisher.log_lines import logger
from flwr_fisher.merge import MergeResult
from flwr_fisher.merge.options import Report
from flwr_fisher.progress import Progress
from flwr_fisher.server.exchange import ServerState, Step


def progress_of_merge() -> Report:
    """Return a function that logs the progress of a long merge."""
    progress = Progress("merging")

    def report(text: str) -> None:
        if progress.due:
            progress.tell(text)

    return report


def step_of(merged: MergeResult) -> Step:
    """Return the step to a merged model; log how its systems were solved.

    Warn about parameters whose system was not solved.
    """
    solver = merged.settings and merged.settings.solver
    logger.info(
        "merged by %s: %d iterations left %.1e of the residual%s",
        solver or "sums",
        merged.iterations,
        merged.residuals[-1],
        "; so few are by design" if solver == "pcg" else "",
    )
    if merged.unsolved:
        logger.warning(
            "the merge's solver failed for %s: these parameters are the clients' "
            "mean, as in FedAvg",
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
