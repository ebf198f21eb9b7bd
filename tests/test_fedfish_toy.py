"""The toy regression of examples/: what its picture claims."""

import importlib.util
import sys
from pathlib import Path
from statistics import mean

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "fedfish_toy.py"


@pytest.fixture(scope="module")
def toy():
    spec = importlib.util.spec_from_file_location("fedfish_toy", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fedfish_toy"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def test_fedfish_has_the_lower_barrier_on_disjoint_supports(toy, tmp_path):
    runs = [toy.one_round("disjoint", seed) for seed in range(1)]
    avg, fish = ([mean(run.barriers[m]) for run in runs] for m in toy.METHODS)
    assert mean(fish) < mean(avg) / 3
    assert all(f < a for a, f in zip(avg, fish, strict=True))
    toy.draw(tmp_path / "new" / "toy.png", dict.fromkeys(toy.SUPPORTS, runs))
    assert (tmp_path / "new" / "toy.png").stat().st_size > 10_000
