"""Whether what is tested is what stands in the checkout."""

from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def check_installed() -> None:
    """Refuse to test a copy of the package that was installed before a change."""
    spec = find_spec("flwr_fisher")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    if changed := changed_since(ROOT, installed):
        raise pytest.UsageError(
            f"{installed} is a copy of this checkout from before "
            f"{changed[0].relative_to(ROOT)} changed: `make develop`, or `make test`"
        )


def changed_since(root: Path, installed: Path) -> list[Path]:
    """Return the checkout's files that the installed package has not, or other ones."""
    if installed == root / "flwr_fisher":
        return []
    places = {"flwr_fisher": installed, "strategies": installed / "strategies"}
    return [
        path
        for name, place in places.items()
        for path in sorted((root / name).rglob("*.py"))
        if not _same(path, place / path.relative_to(root / name))
    ]


def _same(one: Path, other: Path) -> bool:
    return other.exists() and one.read_bytes() == other.read_bytes()
