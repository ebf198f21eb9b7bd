import shutil
import subprocess
import sys
from pathlib import Path

from checkout import ROOT, changed_since


def test_a_checkout_that_is_imported_by_its_folder_says_so(tmp_path: Path) -> None:
    """As in the root of a clone in which the package was not installed editable."""
    shutil.copytree(ROOT / "flwr_fisher", tmp_path / "flwr_fisher")
    alone = [sys.executable, "-S", "-c", "import flwr_fisher.strategies"]
    ended = subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True)
    said = ended.stderr.splitlines()[-1]
    assert said.startswith(
        f"ImportError: {tmp_path}/flwr_fisher is a checkout's folder"
    )
    assert "make develop" in said


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
