"""Who may import whom: the design's table of rooms, read from the imports."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"flwr", "ray", "datasets", "flwr_datasets", "nngeometry"}

# Each room with the rooms that it may import, besides itself.
MATHS = {"errors", "params", "curvature", "merge"}
ALLOWED = {
    "": set(),  # flwr_fisher/__init__.py itself
    "errors": set(),
    "params": {"errors"},
    "curvature": {"errors", "params"},
    "merge": {"errors", "params", "curvature"},
    "wire": MATHS,
    "measures": MATHS | {"wire"},
    "client": MATHS | {"wire", "measures"},
    "strategies": MATHS | {"wire", "measures"},
    "testing": {"errors", "params", "wire", "client"},
    "tasks": {"errors", "params"},
    # What runs end to end stands beside the apps: nothing but them imports it.
    "report": MATHS | {"wire", "measures", "client", "strategies", "tasks"},
}
FORBIDDEN = {
    "": HEAVY | {"torch", "numpy", "torchvision"},
    "errors": HEAVY | {"torch"},
    "params": HEAVY,
    "curvature": HEAVY,
    "merge": HEAVY,
}
ONLY_NNGEOMETRY = "curvature/nngeometry_engine.py"


def sources(root: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield (room, name, path) for each source file; names as they are installed."""
    for path in sorted((root / "flwr_fisher").rglob("*.py")):
        name = path.relative_to(root / "flwr_fisher").as_posix()
        yield name.removesuffix(".py").split("/")[0].replace("__init__", ""), name, path
    for path in sorted((root / "strategies").rglob("*.py")):
        yield "strategies", path.relative_to(root).as_posix(), path


def imported(name: str, source: str) -> set[str]:
    """Return every module that a file imports, anywhere in it, as an absolute name.

    ``from a import b`` gives both ``a`` and ``a.b``, since b may be a module.
    """
    package = ["flwr_fisher", *name.split("/")[:-1]]
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                base = package[: len(package) - node.level + 1] + base
            start = ".".join(base)
            found |= {start, *(f"{start}.{alias.name}" for alias in node.names)}
    return found


def rooms(modules: set[str]) -> set[str]:
    parts = [module.split(".") for module in modules]
    return {p[1] for p in parts if p[0] == "flwr_fisher" and len(p) > 1}


def complaints(room: str, name: str, source: str) -> list[str]:
    """Return what is wrong with one file's imports, in words."""
    if room not in ALLOWED:
        return [f"{name}: the room '{room}' is not in the design's table"]
    modules = imported(name, source)
    known = {r for r in rooms(modules) if r in ALLOWED}
    wrong = known - ALLOWED[room] - {room}
    found = [f"{name}: '{room}' must not import '{other}'" for other in sorted(wrong)]
    packages = {module.split(".")[0] for module in modules}
    heavy = packages & FORBIDDEN.get(room, set())
    if name == ONLY_NNGEOMETRY:
        heavy -= {"nngeometry"}
    elif "nngeometry" in packages:
        heavy |= {"nngeometry"}
    return found + [f"{name} must not import {other}" for other in sorted(heavy)]


FILES = list(sources(ROOT))


def test_every_file_of_the_checkout_is_seen() -> None:
    seen = {room for room, _, _ in FILES}
    assert {"", "errors", "params", "curvature", "merge", "wire"} <= seen
    assert {"client", "strategies", "tasks", "testing"} <= seen
    assert ONLY_NNGEOMETRY in {name for _, name, _ in FILES}


@pytest.mark.parametrize(
    ("room", "name", "path"), FILES, ids=[name for _, name, _ in FILES]
)
def test_no_arrow_points_the_wrong_way(room: str, name: str, path: Path) -> None:
    assert complaints(room, name, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("room", "name", "source"),
    [
        ("errors", "errors.py", "from flwr_fisher.params import add"),
        ("errors", "errors.py", "import torch"),
        ("params", "params.py", "from flwr_fisher import curvature"),
        ("curvature", "curvature/fisher.py", "import flwr_fisher.merge.fisher"),
        ("curvature", "curvature/fisher.py", "from ..merge import merge_fisher"),
        ("curvature", "curvature/fisher.py", "from .. import wire"),
        ("curvature", "curvature/fisher.py", "def f():\n    import flwr.app"),
        ("curvature", "curvature/fisher.py", "from nngeometry.metrics import FIM"),
        ("merge", "merge/fisher.py", "from flwr_fisher.wire import FisherUpload"),
        ("merge", "merge/fisher.py", "if True:\n    from ray import remote"),
        ("merge", "merge/fisher.py", "from datasets import Dataset"),
        ("wire", "wire/payload.py", "from flwr_fisher.client import FisherClient"),
        ("wire", "wire/payload.py", "import nngeometry"),
        ("client", "client/x.py", "from flwr_fisher.strategies import FedFisher"),
        ("strategies", "strategies/base.py", "from flwr_fisher.client import score"),
        ("strategies", "strategies/base.py", "from flwr_fisher.tasks import Task"),
        ("client", "client/x.py", "from ..tasks import Task"),
        ("measures", "measures/x.py", "from flwr_fisher.client import score"),
        ("measures", "measures/x.py", "from flwr_fisher.strategies import cohort"),
        ("tasks", "tasks/x.py", "from flwr_fisher.client import score"),
        ("tasks", "tasks/x.py", "from flwr_fisher.merge import fedavg"),
        ("strategies", "strategies/x.py", "from flwr_fisher.report import ReportDir"),
        ("", "__init__.py", "from flwr_fisher.errors import FlwrFisherError"),
        ("", "__init__.py", "from .strategies import FedFisherOneShot"),
        ("attic", "attic/x.py", "import os"),
    ],
)
def test_a_wrong_arrow_is_seen(room: str, name: str, source: str) -> None:
    assert len(complaints(room, name, source)) == 1


@pytest.mark.parametrize(
    ("room", "name", "source"),
    [
        ("curvature", ONLY_NNGEOMETRY, "from nngeometry.metrics import FIM"),
        ("curvature", "curvature/x.py", "from . import base\nfrom .base import Blocks"),
        ("merge", "merge/x.py", "from flwr_fisher.curvature import fisher"),
        ("strategies", "strategies/x.py", "from flwr_fisher.strategies.base import A"),
        ("wire", "wire/x.py", "from flwr.app import ArrayRecord"),
        ("tasks", "tasks/x.py", "import datasets"),
    ],
)
def test_a_right_arrow_is_allowed(room: str, name: str, source: str) -> None:
    assert complaints(room, name, source) == []


def loaded_by(statement: str, *blocked: str) -> set[str]:
    """Return the packages that a fresh interpreter has loaded after a statement."""
    block = "".join(f"sys.modules[{name!r}] = None; " for name in blocked)
    report = "print(*{name.split('.')[0] for name, m in sys.modules.items() if m})"
    code = f"import sys; {block}{statement}; {report}"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = loaded_by("import flwr_fisher; assert flwr_fisher.__version__")
    assert "flwr_fisher" in loaded
    assert loaded.isdisjoint(HEAVY | {"torch", "torchvision"})


def test_the_maths_works_without_flower() -> None:
    statement = "import flwr_fisher.curvature, flwr_fisher.merge"
    loaded = loaded_by(statement, *sorted(HEAVY))
    assert "torch" in loaded
    assert loaded.isdisjoint(HEAVY)
