"""The apps as bundles, as Flower Hub takes them; what a release says of itself."""

import re
import tomllib
import zipfile
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from apps import APPS
from flwr_fisher import __version__

# Flower's own warning, of its way to read a .gitignore.
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatch:DeprecationWarning")
ROOT = APPS.parent
NAMES = sorted(path.name for path in APPS.iterdir())
SECTIONS = (
    *("About this app", "Experimental Setup", "Environment Setup"),
    *("Running the Experiments", "Expected Results"),
)


def pyproject(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def needed(app: str) -> list[str]:
    hub = pyproject(APPS / app)["tool"]["flwr-fisher"]["hub"]
    return list(map(str, hub["dependencies"]))


@pytest.fixture(scope="module")
def hub() -> ModuleType:
    """``release/build_fabs.py``, which calls what Flower checks an app with."""
    target = pyproject(APPS / "fagh")["tool"]["flwr"]["app"]["flwr-version-target"]
    if Version(version("flwr")) < Version(target):
        pytest.skip(f"the apps are bundled by Flower {target} or newer")
    spec = spec_from_file_location("build_fabs", ROOT / "release" / "build_fabs.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("app", NAMES)
def test_flower_takes_an_app_in_format_1(
    app: str, hub: ModuleType, tmp_path: Path
) -> None:
    with zipfile.ZipFile(hub.build(APPS / app, tmp_path)) as bundle:
        names = set(bundle.namelist())
        content = tomllib.loads(bundle.read("pyproject.toml").decode())
    parts = {f"{app}/{part}_app.py" for part in ("client", "server")}
    parts |= {f"{app}/__init__.py", f"{app}/task.py", "README.md", "LICENSE"}
    assert names == parts | {"pyproject.toml", ".info/CONTENT"}
    assert content["tool"]["flwr"]["app"]["fab-format-version"] == 1
    assert content["project"]["dependencies"] == needed(app)


@pytest.mark.parametrize("app", NAMES)
def test_an_app_names_this_version_of_the_library(app: str) -> None:
    library, project = pyproject(ROOT)["project"], pyproject(APPS / app)["project"]
    flower, *_, ours = map(Requirement, needed(app))
    (theirs,) = (
        r for r in map(Requirement, library["dependencies"]) if r.name == "flwr"
    )
    assert (flower.name, flower.specifier) == ("flwr", theirs.specifier)
    assert ours.name == library["name"]
    assert __version__ in ours.specifier
    assert ours.extras <= set(library["optional-dependencies"])
    assert project["requires-python"] == library["requires-python"]
    license_ = (APPS / app / project["license"]["file"]).read_text()
    assert license_ == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("app", NAMES)
def test_an_apps_readme_is_like_those_of_flowers_baselines(app: str) -> None:
    _, front, text = (APPS / app / "README.md").read_text().split("---\n", 2)
    matter = dict(line.split(": ", 1) for line in front.splitlines())
    assert list(matter) == ["title", "url", "labels", "dataset"]
    assert 4 <= len(matter["labels"].split(", ")) <= 10
    assert tuple(re.findall(r"^## (.*)$", text, re.M)) == SECTIONS
    # Upon the Hub, nothing is above the app's folder.
    assert not re.findall(r"\]\(\.\.", text)


def test_one_version_is_named_everywhere() -> None:
    changes, citation = (
        re.search(pattern, (ROOT / name).read_text(), re.M)
        for name, pattern in (
            ("CHANGELOG.md", r"^## (\S+) —"),  # an unreleased part has no date
            ("CITATION.cff", r"^version: (\S+)$"),
        )
    )
    assert changes is not None
    assert citation is not None
    assert changes[1] == citation[1] == __version__
    for folder in (ROOT, *(APPS / app for app in NAMES)):
        assert pyproject(folder)["project"]["version"] == __version__, folder
