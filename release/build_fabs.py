"""Build the apps as Flower's bundles (FABs), and check them as Flower Hub does.

    python release/build_fabs.py FOLDER [--dist dist]

With `--dist`, a folder with the library's wheel, each app's dependencies are resolved,
too, as Flower does before a run: the wheel stands in for the package index.
Flower's rules are read in this file only, since they may change in any release.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from contextlib import chdir
from pathlib import Path

from flwr.cli.app_cmd.publish import (
    _collect_file_paths,
    _validate_app_name,
    _validate_description,
    _validate_files,
)
from flwr.cli.build import build as flwr_build
from flwr.cli.config_utils import load_and_validate

APPS = Path(__file__).parents[1] / "apps"


def build(app: Path, target: Path) -> Path:
    """Build an app's FAB; return where it is.

    Beside it is a folder of the app's name, which ``flwr app publish`` uploads.

    Raises
    ------
    click.ClickException
        If Flower Hub would refuse the app, with Flower's reason.
    """
    target.mkdir(parents=True, exist_ok=True)
    app = for_hub(app, target)
    check(app)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        flwr_build(app)
        (made,) = Path(folder).glob("*.fab")
        return Path(shutil.move(made, target / made.name))


def for_hub(app: Path, folder: Path) -> Path:
    """Copy an app into a folder, and let it name what it needs, as Flower Hub wants."""
    copy = folder / app.name
    shutil.copytree(app, copy, ignore=shutil.ignore_patterns("__pycache__"))
    file = copy / "pyproject.toml"
    text, needed = file.read_text().split("\n[tool.flwr-fisher.hub]\n")
    text = text.replace("dependencies = []\n", needed)
    text = text.replace(
        "[tool.flwr.app]\n", "[tool.flwr.app]\nfab-format-version = 1\n"
    )
    file.write_text(text)
    return copy


def check(app: Path) -> None:
    """Refuse what ``flwr app publish`` refuses before it uploads an app.

    Raises
    ------
    ValueError
        If Flower recommends a field that the app's ``pyproject.toml`` has not.
    """
    config, warnings = load_and_validate(app / "pyproject.toml", check_module=True)
    if warnings:
        raise ValueError(f"{app.name}: {'; '.join(warnings)}")
    _validate_app_name(app.name, "Flower App directory name")
    _validate_description(config["project"]["description"])
    _validate_files(_collect_file_paths(app))


def resolve(app: Path, dist: Path) -> None:
    """Resolve an app's dependencies, with `dist` beside the package index."""
    with tempfile.TemporaryDirectory() as folder:
        copy = for_hub(app, Path(folder))
        uv = [sys.executable, "-m", "uv", "lock", "--quiet", "--project", str(copy)]
        subprocess.run([*uv, "--find-links", str(dist.resolve())], check=True)
        packages = (copy / "uv.lock").read_text().count("[[package]]")
    print(f"{app.name}: its dependencies are {packages - 1} packages")


def main() -> None:
    """Build and check all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dist", type=Path)
    options = parser.parse_args()
    for app in sorted(APPS.iterdir()):
        print(build(app, options.folder.resolve()))
        if options.dist:
            resolve(app, options.dist)


if __name__ == "__main__":
    main()
