"""The jobs that a client can do, by name; a user's own may join them."""

from collections.abc import Callable

from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import Reply, Request
from flwr_fisher.errors import ConfigurationError, check_known

Job = Callable[[LocalProblem, Request], Reply]

_JOBS: dict[str, Job] = {}


def register_job(name: str) -> Callable[[Job], Job]:
    """Return a decorator that makes a function a job, which a server can ask for.

    A job works on the client's problem, whose model holds the parameters of the
    request, and returns what to upload, with metrics.

    Parameters
    ----------
    name : str
        What an :class:`~flwr_fisher.strategies.Exchange` of the server calls it.

    Raises
    ------
    ConfigurationError
        If there is a job of that name.

    Examples
    --------
    >>> @register_job("count")
    ... def count(problem, request):
    ...     return Reply({"parameters": len(request.params)})
    >>> get_job("count") is count
    True
    """

    def register(job: Job) -> Job:
        taken = _JOBS.setdefault(name, job)
        # The same function again: its file was imported under another name.
        if taken.__qualname__ != job.__qualname__:
            raise ConfigurationError(
                f"there is a job '{name}' already, {taken.__module__}."
                f"{taken.__qualname__}: register yours by another name"
            )
        _JOBS[name] = job
        return job

    return register


def get_job(name: str) -> Job:
    """Return a job.

    Raises
    ------
    UnknownNameError
        If there is none of that name, with those that there are.
    """
    check_known("job", name, sorted(_JOBS))
    return _JOBS[name]
