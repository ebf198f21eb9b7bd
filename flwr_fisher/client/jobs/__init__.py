"""The clients' jobs, each ``(LocalProblem, Request) -> Reply``.

A job's file is imported when a server first requests it, so there is no list of jobs. A
user's own job is registered by its decorator.
"""

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from pkgutil import iter_modules

from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import Reply, Request
from flwr_fisher.errors import ConfigurationError, UnknownNameError, check_known

__all__ = ["Job", "LocalProblem", "Reply", "Request", "get_job", "register_job"]

Job = Callable[[LocalProblem, Request], Reply]

_SECURE = "secure-sums"  # a mod answers these
_JOBS: dict[str, dict[str, Job]] = {"train": {}, "evaluate": {}}


def register_job(name: str, kind: str = "train") -> Callable[[Job], Job]:
    """Return a decorator that registers a function as a job for servers to request.

    A job gets the client's problem and the request. The problem's model holds the
    parameters of the request. The job returns the upload and metrics.

    Parameters
    ----------
    name : str
        The name by which an :class:`~flwr_fisher.strategies.Exchange` of the server
        requests it.
    kind : "train" | "evaluate"
        The kind of message that requests it. A job of kind ``evaluate`` must check by
        itself whether the parameters fit the model (``problem.load(request.params)``).

    Raises
    ------
    ConfigurationError
        If there is another job of that name.

    Examples
    --------
    >>> @register_job("count")
    ... def count(problem, request):
    ...     return Reply({"parameters": len(request.params)})
    >>> get_job("count") is count
    True
    """
    check_known("kind", kind, _JOBS)

    def register(job: Job) -> Job:
        if not job.__module__.startswith(__name__):
            _read(name, kind)  # so that the names of built-in jobs are taken
        taken = _JOBS[kind].get(name, job)
        if _name(taken) != _name(job):  # a notebook's cell may be read again
            raise ConfigurationError(
                f"there is already a job '{name}', {'.'.join(_name(taken))}: register "
                "yours under another name"
            )
        _JOBS[kind][name] = job
        return job

    return register


def _name(job: Job) -> tuple[str, str]:
    kind = getattr(job, "kind", job)  # of a training job
    return kind.__module__, getattr(kind, "__qualname__", type(kind).__qualname__)


def get_job(name: str, kind: str = "train") -> Job:
    """Return the job of a name.

    Raises
    ------
    UnknownNameError
        If there is no such job. It lists those with a name like it.
    ConfigurationError
        If a mod does this job, and the client has no such mod.
    """
    if name == _SECURE:
        raise ConfigurationError(
            "the server requests secure sums: pass mods=[SecureSumsMod()], from "
            "flwr_fisher.secure, to make_client_app or to the app's ClientApp"
        )
    if name not in _JOBS[kind]:
        _read(name, kind)
    if name not in _JOBS[kind]:
        alike = get_close_matches(name[:80], _JOBS[kind])
        raise UnknownNameError("job", name, alike or [_KNOWN])
    return _JOBS[kind][name]


_KNOWN = "this library's, and those whose modules the client app imports"


def _read(name: str, kind: str) -> None:
    """Import this folder's files until one registers the job, its namesake first."""
    files = [module.name for module in iter_modules(__path__)]
    for file in sorted(files, key=lambda file: file != name.replace("-", "_")):
        import_module(f"{__name__}.{file}")
        if name in _JOBS[kind]:
            return
