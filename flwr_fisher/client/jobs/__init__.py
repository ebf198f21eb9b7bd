"""The clients' jobs, one file a method, each ``(LocalProblem, Request) -> Reply``.

A job's file is imported when a server first requests it, so there is no list of jobs. A
user's own job is registered by its decorator.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import unwrap
from os.path import realpath
from pkgutil import iter_modules

from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import Reply, Request
from flwr_fisher.errors import ConfigurationError, check_known

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
        taken, mine = _origin(_JOBS[kind].get(name, job)), _origin(job)
        if taken[0] != mine[0] or not {*taken[1:]} & {*mine[1:]} - {""}:
            raise ConfigurationError(
                f"there is already a job '{name}', {taken[1]}.{taken[0]}: register "
                "yours under another name"
            )
        _JOBS[kind][name] = job
        return job

    return register


def get_job(name: str, kind: str = "train") -> Job:
    """Return the job of a name.

    Raises
    ------
    UnknownNameError
        If there is no such job. It lists the jobs that there are.
    ConfigurationError
        If a mod does this job, and the client has no such mod.
    """
    if name == _SECURE:
        raise ConfigurationError(
            "the server requests secure sums, but this client has no mod for them: "
            "pass mods=[SecureSumsMod()], from flwr_fisher.secure, to make_client_app "
            "or to the app's ClientApp"
        )
    if name not in _JOBS[kind]:
        _read(name, kind)
    check_known("job", name, sorted(_JOBS[kind]))
    return _JOBS[kind][name]


def _read(name: str, kind: str) -> None:
    """Import this folder's files until one registers the job, its namesake first."""
    files = [module.name for module in iter_modules(__path__)]
    for file in sorted(files, key=lambda file: file != name.replace("-", "_")):
        import_module(f"{__name__}.{file}")
        if name in _JOBS[kind]:
            return


def _origin(job: Job) -> tuple[str, str, str]:
    """Return the name, module and file of a function inside wrappers and partials.

    A job read again has another module, if its file was imported under another name,
    or another file, if it is a notebook's cell. The file is "" if nobody knows.
    """
    while isinstance(job, partial):
        job = job.func
    job = unwrap(job)
    code = getattr(job, "__code__", getattr(type(job).__call__, "__code__", None))
    name = getattr(job, "__qualname__", type(job).__qualname__)
    return name, job.__module__, realpath(code.co_filename) if code else ""
