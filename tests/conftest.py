"""Lets the tests import the tools and shared oracles: ``from oracles import …``."""

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).parent))

import devices  # before torch's first backward pass: it may register a device
from checkout import check_installed

_HOMES = (f"{os.getpid()}-{i}" for i in count())
_FOLDER = "FLWR_FISHER_TESTS"  # in the environment, where several processes test
# They need the pretended accelerator: test_accelerator.py runs them on it.
collect_ignore_glob = [] if devices.pretended else ["accelerator/*"]


def memory() -> str | None:
    """Where files are in memory, if there is room: a disk takes its time to delete."""
    place = "/dev/shm"
    roomy = os.access(place, os.W_OK) and shutil.disk_usage(place).free > 2**31
    return place if roomy else None


@pytest.hookimpl(tryfirst=True)  # before pytest chooses a folder for tests' files
def pytest_configure(config: pytest.Config) -> None:
    """Choose where it is: the first process's workers have its environment."""
    if not hasattr(config, "workerinput"):
        check_installed()
        os.environ[_FOLDER] = tempfile.mkdtemp(prefix="flwr-fisher-", dir=memory())
        config.option.basetemp = config.option.basetemp or os.environ[_FOLDER] + "/tmp"
        # Matplotlib lists a machine's fonts once a home, which takes seconds.
        os.environ["MPLCONFIGDIR"] = os.environ[_FOLDER] + "/matplotlib"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let collections of garbage pass over what is imported here: they take a tenth."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(700, 10, 100)  # whole ones as rarely as if nothing were frozen
        gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what tests have left in their folder."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ[_FOLDER], ignore_errors=True)


@pytest.fixture
def server_patch() -> Iterator[pytest.MonkeyPatch]:
    """Patch what no client runs: their answers are remembered all the same."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture
def clock(server_patch: pytest.MonkeyPatch) -> object:
    """The server's, which goes on only while it sleeps."""
    from clocked import stop

    return stop(server_patch)


@pytest.fixture(scope="module")
def no_momentum() -> Iterator[None]:
    """Let tiny clients train as SCAFFOLD's do."""
    import virtual

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(virtual, "LocalSGD", partial(virtual.LocalSGD, momentum=0.0))
        yield


@pytest.fixture
def empty_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw none: a picture takes as long as a round, and other tests have them."""

    def touch(figure: object, path: Path, **options: object) -> None:
        path.touch()

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", touch)


@pytest.fixture(autouse=True)
def home() -> Iterator[None]:
    """Give a test a home of its own: it leaves nothing, and finds nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", f"{os.environ[_FOLDER]}/homes/{next(_HOMES)}")
        yield


@pytest.fixture(autouse=True)
def spoiled_answers_are_nobodys(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that patches what clients run takes and leaves no remembered answers."""
    virtual = sys.modules.get("virtual")  # None: nothing is remembered
    if virtual is None or "monkeypatch" not in request.fixturenames:
        yield
        return
    remembered, virtual._ANSWERS = virtual._ANSWERS, {}
    yield
    virtual._ANSWERS = remembered


@pytest.fixture(scope="session", autouse=True)
def power_stays() -> Iterator[None]:
    """Wait for no disk: no test takes away the power; a killed process needs none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_seeds() -> Iterator[None]:
    """Seed the CPU, and the pretended accelerator, without devices that are absent.

    torch notes the caller's stack for each kind of device that may come.
    """
    import torch

    with pytest.MonkeyPatch.context() as patch:
        if devices.ACCELERATOR is None:
            patch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
        elif devices.pretended:
            for absent in (torch.cuda, torch.xpu, torch.mtia):
                patch.setattr(
                    absent, "manual_seed_all", lambda seed: None, raising=False
                )
        yield


@pytest.fixture(autouse=True)
def nothing_is_logged_or_tried() -> None:
    """Let each test be a process's first."""
    for module, name in (("client.trial", "_tried"), ("log_lines", "_logged")):
        if known := sys.modules.get(f"flwr_fisher.{module}"):
            getattr(known, name).clear()
