"""The pages for readers of the code name files, and functions in them, that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["where-to-look.md", "fedfisher-in-code.md"]
# A file, and what to read in it: `server/driver.py` (`rounds`, `Driver`).
FILE = re.compile(r"`([\w/]+\.py)`(?: \((`[\w.]+`(?:, `[\w.]+`)*)\))?")


@cache
def definitions(path):
    """The names of a file's functions, classes and constants."""
    tree = list(ast.walk(ast.parse(path.read_text())))
    named = [n for n in tree if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    stored = [n.id for n in tree if isinstance(n, ast.Name) if type(n.ctx) is ast.Store]
    return {n.name for n in named} | set(stored)


def named(folder):
    return ROOT / "flwr_fisher" / folder


def missing(part):
    """What a text names and is not there; a file alone is beside one named before."""
    folders = [
        ROOT,
        ROOT / "flwr_fisher",
        *map(named, re.findall(r"`([\w/]+)/`", part)),
    ]
    found = []
    for name, inside in FILE.findall(part):
        path = next((f / name for f in folders if (f / name).is_file()), None)
        if path is None:
            found.append(name)
            continue
        folders.insert(0, path.parent)
        words = re.findall(r"\w+", inside)
        found += [f"{name}: {w}" for w in words if w not in definitions(path)]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page):
    text = (ROOT / "docs" / page).read_text()
    assert len(FILE.findall(text)) > 20
    parts = re.split(r"\n(?=\|)|\n\n", text)  # rows and paragraphs
    assert [name for part in parts for name in missing(part)] == []
