import shutil
import subprocess
import sys
from pathlib import Path

from checkout import ROOT, changed_since


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


def test_a_copy_from_before_a_change_is_known(tmp_path: Path) -> None:
    for name in ("flwr_fisher", "strategies"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.py").write_text("1")
    installed = tmp_path / "site-packages" / "flwr_fisher"
    shutil.copytree(tmp_path / "flwr_fisher", installed)
    shutil.copytree(tmp_path / "strategies", installed / "strategies")
    assert changed_since(tmp_path, installed) == []
    (tmp_path / "strategies" / "one.py").write_text("2")
    (tmp_path / "flwr_fisher" / "two.py").write_text("1")
    found = [path.relative_to(tmp_path) for path in changed_since(tmp_path, installed)]
    assert found == [Path("flwr_fisher/two.py"), Path("strategies/one.py")]
    assert changed_since(tmp_path, tmp_path / "flwr_fisher") == []
