"""What clients compute, a file a method: ``(LocalProblem, Request) -> Reply``."""

from flwr_fisher.client.jobs import (
    afl,
    direction,
    displaced,
    evaluate,
    fedpm,
    gradient,
    kfac_sums,
    probe,
    scaffold,
    tct,
    train,
)
from flwr_fisher.client.jobs.registry import Job, get_job, register_job

# Each of these registers its job.
BUILT_IN = (
    afl,
    direction,
    displaced,
    evaluate,
    fedpm,
    gradient,
    kfac_sums,
    probe,
    scaffold,
    tct,
    train,
)

__all__ = ["BUILT_IN", "Job", "get_job", "register_job"]
