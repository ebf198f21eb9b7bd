"""Build the apps as they are published: each a FAB that installs this version.

    python release/build_fabs.py FOLDER

The apps' own ``dependencies`` name nothing, so that a run from the checkout uses the
library that is installed. A published app names the version that it was released with,
and states what Flower's bundles of format 1 must: the Flower version it is for.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

import tomli_w

from flwr_fisher import __version__

APPS = Path(__file__).parents[1] / "apps"
FLOWER = "1.41.0"
# Flower Hub's limits.
MOST_BYTES, MOST_OF_A_FILE, MOST_FILES, LONGEST_NAME = 10 * 2**20, 2**20, 1000, 32


def build(app: Path, target: Path) -> Path:
    """Build an app's FAB; return where it is.

    Raises
    ------
    ValueError
        If it is beyond a limit.
    """
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / app.name
        shutil.copytree(app, copy, ignore=shutil.ignore_patterns("__pycache__"))
        published(copy / "pyproject.toml")
        subprocess.run(
            [str(Path(sys.executable).parent / "flwr"), "build", "--app", str(copy)],
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
        )
        (made,) = Path(folder).glob("*.fab")
        check(made)
        return Path(shutil.move(made, target / made.name))


def published(path: Path) -> None:
    """Write into a ``pyproject.toml`` what a published app must say."""
    content = tomllib.loads(path.read_text())
    content["project"]["version"] = __version__
    content["project"]["dependencies"] = [
        f"flwr>={FLOWER.removesuffix('.0')},<2",
        f"flwr-fisher[tasks,report]=={__version__}",
    ]
    content["tool"]["flwr"]["app"] |= {
        "fab-format-version": 1,
        "flwr-version-target": FLOWER,
    }
    path.write_text(tomli_w.dumps(content))


def check(fab: Path) -> None:
    """Refuse a FAB that Flower Hub would refuse."""
    with zipfile.ZipFile(fab) as bundle:
        files = bundle.infolist()
    for what, number, most in (
        ("bytes", fab.stat().st_size, MOST_BYTES),
        ("files", len(files), MOST_FILES),
        ("bytes in a file", max(file.file_size for file in files), MOST_OF_A_FILE),
        ("characters", len(fab.name.split(".")[1]), LONGEST_NAME),
    ):
        if number > most:
            raise ValueError(f"{fab.name} has {number} {what}, and may have {most}")


def main() -> None:
    """Build all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for app in sorted(APPS.iterdir()):
        print(build(app, folder))


if __name__ == "__main__":
    main()
