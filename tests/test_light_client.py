"""What a client's machine needs: flwr, torch, numpy, safetensors, and no more."""

import os
import subprocess
import sys

import pytest
from bare import hidden, write_sitecustomize
from test_layers import FILES, imported

from flwr_fisher.errors import MissingExtraError, extra

# What each room may import of others' packages, beside Python's own; torch brings
# filelock, and flwr cryptography.
MAY = {"flwr", "torch", "numpy", "safetensors", "filelock", "cryptography"}
BEYOND = {
    "report": {"matplotlib"},
    "server": {"opacus"},  # the accountant
}

ROUND = """
import sys
import torch
from flwr.app import ArrayRecord
from torch.utils.data import DataLoader, TensorDataset
from flwr_fisher.client import FisherClient, LocalSGD
from flwr_fisher.params import shared_state
from flwr_fisher.strategies import FedFisherOneShot
from flwr_fisher.testing import LocalGrid

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
data = TensorDataset(torch.randn(12, 4), torch.arange(12) % 3)
loader = DataLoader(data, batch_size=4)
client = FisherClient(model, loader, loader, train_fn=LocalSGD(epochs=2))
grid = LocalGrid(client.as_client_app(), 3)
strategy = FedFisherOneShot(structure="kfac")
result = strategy.start(grid, ArrayRecord(shared_state(model)))
print(len(result.uploads), sorted(sys.modules.keys() & set(HIDDEN)))
"""

NEEDED = """
from flwr_fisher.errors import MissingExtraError

def told(act):
    try:
        act()
    except MissingExtraError as error:
        print(error)

def report():
    from flwr_fisher.report import plot_accuracies
    plot_accuracies("a.png", {"a": 1.0}, best="a")

def epsilon():
    from flwr_fisher.strategies import Privacy
    Privacy(noise_multiplier=1.0, clipping_norm=1.0).epsilon(1, 1e-5)
"""

# What needs a package, and the extra that brings it.
MISSING = {"report": ("matplotlib", "report"), "epsilon": ("opacus", "privacy")}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What a client's round prints, and then each act that needs an extra.

    In one process without extras, since each takes seconds to begin.
    """
    round_ = ROUND.replace("set(HIDDEN)", f"set({sorted(hidden())})")
    acts = "\n".join(f"told({act})" for act in MISSING)
    return bare(tmp_path_factory.mktemp("bare"), f"{round_}\n{NEEDED}\n{acts}")


def bare(tmp_path, code):
    """What a program prints where no extra is installed."""
    path = os.pathsep.join([str(write_sitecustomize(tmp_path / "bare")), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_extras_packages_are_hidden():
    names = {"ray", "torchvision", "sklearn", "matplotlib", "nngeometry", "datasets"}
    assert names <= hidden()
    assert not hidden() & (MAY | {"rich"})  # which flwr brings


def test_a_client_trains_and_uploads_a_kfac_without_any_extra(said):
    assert said.splitlines()[0] == "3 []"


def test_a_missing_extra_is_named_when_it_is_needed(said):
    assert said.splitlines()[1:] == [
        f"'{package}' is not installed: pip install \"flwr-fisher[{name}]\""
        for package, name in MISSING.values()
    ]


def test_what_is_missing_within_a_package_is_named_too():
    says = pytest.raises(MissingExtraError, match="'no_such' is not installed")
    with says, extra("report"):
        import no_such.thing  # noqa: F401


def test_a_file_imports_no_more_than_its_room_may():
    for room, name, path in FILES:
        modules = imported(name, path.read_text(encoding="utf-8"))
        names = {module.partition(".")[0] for module in modules}
        others = names - sys.stdlib_module_names - {"flwr_fisher"}
        assert others <= MAY | BEYOND.get(room, set()), name
