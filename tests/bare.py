"""An environment without extras: what they alone bring is hidden."""

import json
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"

_HIDE = """
import sys
from importlib.machinery import PathFinder

HIDDEN = set({hidden})


class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in HIDDEN:
            return super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
"""


def closure(requirements):
    """The distributions that these requirements bring, with what those require."""
    names = set()
    open_ = [Requirement(text) for text in requirements]
    while open_:
        requirement = open_.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(requirement.name)
        if name in names:
            continue
        names.add(name)
        try:
            open_ += [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:
            names.discard(name)  # of another platform
    return names


@cache
def hidden():
    """The packages that the bare library does not bring, and that are here."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    # setuptools' own, of older environments, is loaded before any code.
    bare = closure(project["dependencies"]) | {"flwr-fisher", "setuptools"}
    return {
        package
        for package, distributions in packages_distributions().items()
        if not bare.intersection(map(canonicalize_name, distributions))
    }


def write_sitecustomize(folder):
    """Write what hides them from Python; the folder goes first into PYTHONPATH."""
    folder.mkdir(parents=True, exist_ok=True)
    text = _HIDE.format(hidden=json.dumps(sorted(hidden())))
    (folder / "sitecustomize.py").write_text(text)
    return folder
