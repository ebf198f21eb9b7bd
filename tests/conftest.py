"""Lets the tests import their shared oracles: ``from oracles import …``."""

import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from beside import Beside

_BESIDE = pytest.StashKey[Beside]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what runs beside the others last."""
    items.sort(key=lambda item: item.get_closest_marker("beside") is not None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start it first."""
    wanted = any(item.get_closest_marker("beside") for item in session.items)
    if wanted and not session.config.option.collectonly:
        folder = Path(tempfile.mkdtemp(prefix="flwr-fisher-"))
        session.config.stash[_BESIDE] = Beside(folder)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave nothing running."""
    if (started := config.stash.get(_BESIDE, None)) is not None:
        started.end()


@pytest.fixture
def beside(request: pytest.FixtureRequest) -> Beside:
    """What was started when the tests began."""
    return request.config.stash[_BESIDE]


@pytest.fixture(scope="session", autouse=True)
def long_lines():
    """A test reads what the log says; where lines end, test_log_lines.py looks at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flwr_fisher.log_lines.width", lambda: 10_000)
        yield
