"""The apps as bundles: what Flower Hub would take."""

import importlib.util
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from apps import APPS
from flwr_fisher import __version__

ROOT = APPS.parent


def release() -> ModuleType:
    path = ROOT / "release" / "build_fabs.py"
    spec = importlib.util.spec_from_file_location("build_fabs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("app", sorted(path.name for path in APPS.iterdir()))
def test_an_app_is_a_valid_bundle(app: str, tmp_path: Path) -> None:
    fab = release().build(APPS / app, tmp_path)
    with zipfile.ZipFile(fab) as bundle:
        names = set(bundle.namelist())
        content = tomllib.loads(bundle.read("pyproject.toml").decode())
    parts = {"server_app.py", "client_app.py", "my_data.py", "README.md", "LICENSE"}
    assert parts <= names
    assert (
        f"flwr-fisher[tasks,report]=={__version__}"
        in content["project"]["dependencies"]
    )
    assert content["tool"]["flwr"]["app"]["fab-format-version"] == 1


def test_a_bundle_beyond_the_hubs_limits_is_refused(tmp_path: Path) -> None:
    fab = tmp_path / "flwr-fisher.big.1-0-0.00000000.fab"
    with zipfile.ZipFile(fab, "w") as bundle:
        bundle.writestr("a.py", "#" * (2**20 + 1))
    with pytest.raises(ValueError, match="1048577 bytes in a file, and may have"):
        release().check(fab)


def test_the_apps_own_dependencies_are_there_today() -> None:
    for app in APPS.iterdir():
        content = tomllib.loads((app / "pyproject.toml").read_text())
        assert content["project"]["dependencies"] == []
        license_ = (app / content["project"]["license"]["file"]).read_text()
        assert license_ == (ROOT / "LICENSE").read_text()


def test_the_apps_have_one_way_to_their_data() -> None:
    files = {(app / "my_data.py").read_text() for app in APPS.iterdir()}
    assert len(files) == 1
