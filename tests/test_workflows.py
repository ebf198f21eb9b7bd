"""GitHub's workflows do what the Makefile and pyproject.toml say."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]


def test_the_tests_run_on_every_python_that_is_supported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    supported = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == supported
    (python,) = (s["with"]["python-version"] for s in jobs["oldest"]["steps"][1:2])
    assert f">={python}" == project["requires-python"]


def test_nothing_is_published_that_was_not_tested():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert set(jobs["publish"]["needs"]) == jobs.keys() - {"publish"}
    assert jobs["tests"]["uses"].endswith("/tests.yml")
