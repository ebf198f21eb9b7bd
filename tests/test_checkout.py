import shutil
import subprocess
import sys
from pathlib import Path

from checkout import ROOT


def test_a_checkout_can_be_imported_from_its_root(tmp_path: Path) -> None:
    """As a script does that stands in a clone, wherever the package is installed."""
    for name in ("flwr_fisher", "strategies"):
        shutil.copytree(ROOT / name, tmp_path / name)
    ask = "import flwr_fisher; from importlib.util import find_spec as find"
    ask += "; print(find('flwr_fisher.strategies').submodule_search_locations)"
    ended = subprocess.run(
        [sys.executable, "-c", ask], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.stdout.strip() == str([str(tmp_path / "strategies")]), ended.stderr
