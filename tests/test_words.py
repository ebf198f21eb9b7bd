"""Names that say nothing stay out of the sources; each page says for whom it is."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
# In place of these, the field's word: `reply`, `config`, `request`, `norms`, …
NAMES = {
    *("by_hand", "undisturbed", "tell_once", "summand", "turn_away", "miss"),
    *("masses", "in_range", "alike", "told", "heard", "settled"),
    *("KeptExchange", "Late", "Gathering"),
}
# What a caller passes: a function may find, but an argument is a key, a request, …
ARGUMENTS = {"found", "asked", "place"}


@cache
def texts() -> dict[str, str]:
    """What people read: pages, and the sources of what they install or copy."""
    pages = ("*.md", "docs/*.md", "apps/*/*.md", "federation/*.md", "examples/*.rst")
    sources = ("flwr_fisher", "strategies", "apps", "examples", "federation")
    found = [path for pattern in pages for path in ROOT.glob(pattern)]
    found += [path for folder in sources for path in (ROOT / folder).rglob("*.py")]
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in sorted(found)
        if path.name != "CHANGELOG.md"
    }


def test_no_name_says_nothing():
    there = set()
    for path, text in texts().items():
        if path.endswith(".py") and any(name in text for name in NAMES):
            for node in ast.walk(ast.parse(text)):
                name = getattr(node, "arg", None) or getattr(node, "name", None)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    name = node.id
                if name in NAMES:
                    there.add(f"{path}: {name}")
    assert not there


def test_no_argument_is_found_or_asked():
    there = set()
    for path, text in texts().items():
        if path.startswith(("flwr_fisher", "strategies")) and path.endswith(".py"):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    named = [*node.args.args, *node.args.kwonlyargs]
                    bad = {arg.arg for arg in named} & ARGUMENTS
                    there |= {f"{path}: {node.name}({name})" for name in bad}
    assert not there


def test_every_page_says_on_its_first_screen_for_whom_it_is():
    first = re.compile(r"# .+\n+(For |This page is for you|flwr-fisher )")
    pages = [text for path, text in texts().items() if path.startswith("docs/")]
    assert len(pages) > 30
    assert not [text[:80] for text in pages if not first.match(text)]
