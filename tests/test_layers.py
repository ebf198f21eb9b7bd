"""Who may import whom: the design's table of rooms, read from the imports.

Every import counts, wherever it stands in a file: also those for types alone, and those
inside a function.
"""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"flwr", "ray", "datasets", "flwr_datasets", "nngeometry"}

# Each room with the rooms that it may import, besides itself.
GROUND = {
    *("devices", "errors", "files", "log_lines", "options"),
    *("params", "randomness"),
}
MATHS_ROOMS = ("curvature", "merge", "rounds", "tangent")
MATHS = GROUND | {*MATHS_ROOMS}
FLOWERS = {"flower_internals"}
ALLOWED = {
    "": set(),  # flwr_fisher/__init__.py itself
    "devices": {"errors"},
    "errors": set(),
    "files": set(),
    "flower_internals": set(),
    "log_lines": {"errors"},
    "options": {"errors"},
    "params": {"errors"},
    "randomness": {"devices", "errors"},
    "curvature": GROUND,
    "merge": GROUND | {"curvature"},
    "rounds": GROUND | {"curvature"},
    "tangent": GROUND | {"curvature"},
    "wire": MATHS | FLOWERS,
    "callbacks": GROUND | {"wire"},
    "client": MATHS | FLOWERS | {"wire"},
    "server": MATHS | FLOWERS | {"wire", "callbacks"},
    "strategies": MATHS | {"wire", "callbacks", "server"},
    "testing": GROUND | FLOWERS,
    # A wing: nothing in front imports it.
    "secure": GROUND | FLOWERS | {"wire", "client", "server"},
    # What Flower will drop, translated at the door.
    "legacy": MATHS | {"wire", "client", "server", "strategies"},
    # What runs end to end stands beside the apps: nothing but them imports it.
    "report": MATHS | {"callbacks", "wire", "client", "server", "strategies"},
}
# Rooms within the room of curvature: the algebra knows no model and no data.
CURVATURE = {"operators": set(), "estimate": {"operators"}}
FORBIDDEN = {
    "": HEAVY | {"torch", "numpy", "torchvision"},
    "errors": HEAVY | {"torch"},
    **dict.fromkeys(("log_lines",), HEAVY | {"torch"}),
    **dict.fromkeys(("devices", "files", "params", "randomness", *MATHS_ROOMS), HEAVY),
}
ONLY_FLOWERS_INTERNALS = "flower_internals.py"
PROMISED = ("flwr.app", "flwr.serverapp", "flwr.clientapp")


def sources(root):
    """Yield (room, name, path) for each source file; names as they are installed."""
    for path in sorted((root / "flwr_fisher").rglob("*.py")):
        name = path.relative_to(root / "flwr_fisher").as_posix()
        if not name.startswith("strategies/"):
            room = name.removesuffix(".py").split("/")[0].replace("__init__", "")
            yield room, name, path
    for path in sorted((root / "strategies").rglob("*.py")):
        yield "strategies", path.relative_to(root).as_posix(), path


def imported(name, source):
    """Return every module that a file imports, anywhere in it, as an absolute name.

    ``from a import b`` gives both ``a`` and ``a.b``, since b may be a module.
    """
    found = set()
    for module, item, _ in imported_names(name, source):
        found |= {module, f"{module}.{item}"} if item else {module}
    return found


def rooms(modules):
    parts = [module.split(".") for module in modules]
    return {p[1] for p in parts if p[0] == "flwr_fisher" and len(p) > 1}


def complaints(room, name, source):
    """Return what is wrong with one file's imports, in words."""
    if room not in ALLOWED:
        return [f"{name}: the room '{room}' is not in the design's table"]
    modules = imported(name, source)
    known = {r for r in rooms(modules) if r in ALLOWED}
    wrong = known - ALLOWED[room] - {room}
    found = [f"{name}: '{room}' must not import '{other}'" for other in sorted(wrong)]
    found += inner_complaints(name, modules)
    packages = {module.split(".")[0] for module in modules}
    heavy = packages & FORBIDDEN.get(room, set())
    if name != ONLY_FLOWERS_INTERNALS and "flwr" in packages - heavy:
        flowers = {m for m in modules if m.split(".")[0] == "flwr" and m != "flwr"}
        heavy |= {m for m in flowers if not m.startswith(PROMISED)}
    return found + [f"{name} must not import {other}" for other in sorted(heavy)]


def inner_complaints(name, modules):
    """Return what is wrong between the rooms within the room of curvature."""
    parts = name.split("/")
    if parts[0] != "curvature" or parts[1] not in CURVATURE:
        return []
    start = "flwr_fisher.curvature."
    others = {m.removeprefix(start).split(".")[0] for m in modules if start in m}
    wrong = others & CURVATURE.keys() - CURVATURE[parts[1]] - {parts[1]}
    return [f"{name}: '{parts[1]}' must not import '{other}'" for other in wrong]


FILES = list(sources(ROOT))


def test_every_file_of_the_checkout_is_seen():
    assert {room for room, _, _ in FILES} == set(ALLOWED)
    names = {name for _, name, _ in FILES}
    assert ONLY_FLOWERS_INTERNALS in names
    assert len(names) == len(FILES) > 100


def test_no_arrow_points_the_wrong_way():
    for room, name, path in FILES:
        assert complaints(room, name, path.read_text(encoding="utf-8")) == []


# Circles of files


def module_of(name):
    """Return the module that a file is, by its name as it is installed."""
    parts = ["flwr_fisher", *name.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def graph(files):
    """Return, by module, the modules whose files it imports.

    ``from a import b`` imports the file of ``a.b`` if there is one, and that of ``a``
    if not. A package's face is a file like any other.
    """
    modules = {module_of(name): (name, source) for name, source in files.items()}
    arrows = {}
    for module, (name, source) in modules.items():
        arrows[module] = imported_files(name, source, set(modules)) - {module}
    return arrows


@cache
def imported_names(name, source):
    """Return (module, name in it or "", name here) of each of a file's imports."""
    package, found = ["flwr_fisher", *name.split("/")[:-1]], []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(a.name, "", a.asname or a.name) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                base = package[: len(package) - node.level + 1] + base
            module = ".".join(base)
            found += [(module, a.name, a.asname or a.name) for a in node.names]
    return found


def imported_files(name, source, modules):
    found = set()
    for module, item, _ in imported_names(name, source):
        whole = f"{module}.{item}"
        found.add(whole if whole in modules else module)
    return found & modules


def circles(arrows):
    """Return a circle for each arrow that closes one, in a walk along all arrows."""
    done = set()
    found = []

    def walk(module, path):
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done:
            for other in sorted(arrows[module]):
                walk(other, [*path, module])
            done.add(module)

    for module in sorted(arrows):
        walk(module, [])
    return found


def test_no_files_import_each_other_in_a_circle():
    files = {name: path.read_text(encoding="utf-8") for _, name, path in FILES}
    assert circles(graph(files)) == []


# What lies on an algorithm's way

# How many files are imported, directly or not: a bound to lower, or to raise where a
# long file becomes several.
REACH = {
    "what every strategy stands on": (25, ["flwr_fisher.strategies.base"]),
    "FedFisher's two halves": (
        92,
        [
            "flwr_fisher.strategies.fedfisher",
            "flwr_fisher.client.fisher_client",
            # Jobs are imported when they are asked for.
            "flwr_fisher.client.jobs.train",
            "flwr_fisher.client.jobs.evaluate",
        ],
    ),
}


def reached(files, starts):
    """Return the files that some files import, directly or not, besides themselves.

    A name that a package's face re-exports counts as the file that defines it.
    """
    modules = {module_of(name): (name, source) for name, source in files.items()}
    faces = {
        module: {
            here: (origin, item)
            for origin, item, here in imported_names(*modules[module])
        }
        for module, (name, _) in modules.items()
        if name.endswith("__init__.py")
    }

    def defining(module, item):
        if f"{module}.{item}" in modules:
            return f"{module}.{item}"
        if item in faces.get(module, {}):
            return defining(*faces[module][item])
        return module

    found = set()
    todo = list(starts)
    while todo:
        for module, item, _ in imported_names(*modules[todo.pop()]):
            file = defining(module, item)
            if file in modules and file not in found:
                found.add(file)
                todo.append(file)
    return found - set(starts)


@pytest.mark.parametrize("name", REACH)
def test_no_more_files_lie_on_the_way_than_are_needed(name):
    most, starts = REACH[name]
    files = {name: path.read_text(encoding="utf-8") for _, name, path in FILES}
    assert len(reached(files, starts)) <= most


# How the house looks


def test_the_room_of_strategies_shows_the_algorithms():
    names = [name for room, name, _ in FILES if room == "strategies"]
    assert len([name for name in names if name.count("/") == 1]) <= 8


@pytest.mark.parametrize(
    ("room", "name", "source"),
    [
        ("errors", "errors.py", "import torch"),
        ("params", "params.py", "from flwr_fisher import curvature"),
        ("curvature", "curvature/x.py", "import flwr_fisher.merge.fisher"),
        ("curvature", "curvature/x.py", "from ..merge import fedfisher"),
        ("curvature", "curvature/operators/x.py", "from ..estimate import fisher"),
        ("curvature", "curvature/x.py", "def f():\n    import flwr.app"),
        ("curvature", "curvature/x.py", "from nngeometry.metrics import FIM"),
        ("merge", "merge/x.py", "if True:\n    from ray import remote"),
        ("client", "client/x.py", "from flwr_fisher.server import Cohort"),
        ("server", "server/x.py", "import flwr.common.serde"),
        ("strategies", "strategies/x.py", "from flwr_fisher.secure import SecureSums"),
        ("", "__init__.py", "from .strategies import FedFisherOneShot"),
        ("attic", "attic/x.py", "import os"),
    ],
)
def test_a_wrong_arrow_is_seen(room, name, source):
    assert len(complaints(room, name, source)) == 1


def loaded_by(statement, *blocked):
    """Return the packages that a fresh interpreter has loaded after a statement."""
    block = "".join(f"sys.modules[{name!r}] = None; " for name in blocked)
    report = "print(*{name.split('.')[0] for name, m in sys.modules.items() if m})"
    code = f"import sys; {block}{statement}; {report}"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_one_file_asks_which_accelerator_there_is():
    asks = re.compile(r"torch\.(cuda|accelerator|xpu|mps)\b(?!`)")
    folders = (ROOT / "flwr_fisher", ROOT / "strategies")
    files = [path for folder in folders for path in folder.rglob("*.py")]
    found = [path.name for path in files if asks.search(path.read_text("utf-8"))]
    assert found == ["devices.py"]


def test_importing_the_package_loads_nothing_heavy():
    loaded = loaded_by("import flwr_fisher; assert flwr_fisher.__version__")
    assert "flwr_fisher" in loaded
    assert loaded.isdisjoint(HEAVY | {"torch", "torchvision"})


def test_the_maths_works_without_flower():
    statement = "import " + ", ".join(f"flwr_fisher.{room}" for room in MATHS_ROOMS)
    loaded = loaded_by(statement, *sorted(HEAVY))
    assert "torch" in loaded
    assert loaded.isdisjoint(HEAVY | {"torchvision", "sklearn"})
