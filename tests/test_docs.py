"""The pages are of this code, and GitHub shows them.

`make docs` ends with an error if the site's build has a warning.
"""

import re
import sys
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import reference
import rst_to_markdown
import tutorial_pages
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_the_reference_is_what_the_docstrings_say() -> None:
    check(reference.pages(), reference.API, reference.COMMAND)


def test_every_tutorials_code_has_run_and_its_page_is_of_its_text() -> None:
    scripts = [path.name for path in tutorial_pages.stale()]
    assert not scripts, f"{scripts} have not run: {tutorial_pages.COMMAND}"
    check(tutorial_pages.pages(), tutorial_pages.PAGES, tutorial_pages.COMMAND)


def check(made: dict[Path, str], folder: Path, command: str) -> None:
    stale = [p.name for p, text in made.items() if not p.exists() or text != read(p)]
    assert not stale, f"{stale} are out of date; this renews them: {command}"
    left = [path.name for path in set(folder.glob("*.md")) - made.keys()]
    assert not left, f"{left} are made from nothing that there is"


def test_a_tutorials_prints_and_pictures_stand_below_their_code(tmp_path, monkeypatch):
    script = tmp_path / "mine.py"
    script.write_text(
        '"""\nMine\n====\n"""\n\nprint("one")\n\n# %%\n# Two\n# ---\n\n'
        "import matplotlib.pyplot as plt\n\nplt.figure()\nplt.savefig('saved.png')\n"
        "plt.close()\nplt.figure()\nplt.show()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setitem(sys.modules, "__main__", None)
    shown = tutorial_pages.run(script)
    first, second = shown.values()
    assert first == ("one\n", [])
    assert [Path(path).name for path in second.pictures] == [
        "mine_1_1.png",
        "saved.png",
    ]
    assert all(Path(path).exists() for path in second.pictures)
    page = tutorial_pages.page(script, shown, reference.Reference())
    places = [page.index(text) for text in ("\none\n", "## Two", *second.pictures)]
    assert places == sorted(places)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


BUILT = re.compile(
    r"(docs/(more|benchmarks)|benchmarks/cache|build|dist|outputs|\.[^/]*)/"
)
MARKDOWN = MarkdownIt("commonmark").enable("table")
FENCE = re.compile(r"(?ms)^ *(`{3,})([^`\n]*)$(.*?)^ *\1$")
ROLE = re.compile(r"\{[\w:.+-]+\}$")
SPHINX = re.compile(r"^(\([\w -]+\)=|:::+\s*\{|\+\+\+)")


class Seen(NamedTuple):
    """What GitHub shows of a page."""

    content: list[str]  # but for headings
    anchors: list[str]
    links: list[str]
    sphinx: list[str]  # what is meant for Sphinx: code, or marks that say nothing


@cache
def seen(text: str) -> Seen:
    page = Seen([], [], [], [])
    tokens = MARKDOWN.parse(text)
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type == "fence":
            meant = page.sphinx if token.info.startswith("{") else page.content
            meant.append(token.content)
        elif token.type == "code_block":
            page.content.append(token.content)
        elif token.type == "html_block":
            page.anchors.extend(re.findall(r'\b(?:id|name)="([^"]+)"', token.content))
        elif token.type == "inline":
            children = token.children or []
            words = "".join(
                each.content for each in children if each.type != "html_inline"
            )
            if before and before.type == "heading_open":
                anchor = rst_to_markdown.slug(words)
                times = len(
                    [a for a in page.anchors if re.fullmatch(rf"{anchor}(-\d+)?", a)]
                )
                page.anchors.append(f"{anchor}-{times}" if times else anchor)
            elif SPHINX.match(token.content):
                page.sphinx.append(token.content)
            else:
                page.content.append(words)
            for each, after in zip_longest(children, children[1:]):
                if after and after.type == "code_inline" and ROLE.search(each.content):
                    page.sphinx.append(f"{each.content}`{after.content}`")
                target = each.attrs.get("href") or each.attrs.get("src")
                page.links.extend([unquote(str(target))] if target else [])
    return page


def pages() -> list[Path]:
    folders = [p for p in ROOT.iterdir() if p.is_dir() and not built(p)]
    found = [*ROOT.glob("*.md"), *(p for each in folders for p in each.rglob("*.md"))]
    return sorted(path for path in found if not built(path))


def built(path: Path) -> bool:
    """Whether it is a copy for the site, or no part of the repository."""
    return bool(BUILT.match(f"{path.relative_to(ROOT).as_posix()}/"))


def dead(path: Path, link: str) -> str:
    """Return why a link ends nowhere on GitHub; nothing if it does not."""
    address, _, anchor = link.partition("#")
    if re.match(r"\w+:", link):
        return ""
    there = (path.parent / address).resolve() if address else path
    if not there.exists() or built(there):
        return "is not in the repository"
    if there.suffix != ".md":
        return ""
    page = seen(read(there))
    if not "".join(page.content).strip():
        return "is a page of which GitHub shows nothing"
    return f"has no heading {anchor!r}" if anchor and anchor not in page.anchors else ""


def test_no_page_says_what_only_sphinx_shows_or_links_to_nothing() -> None:
    told = {}
    for path in pages():
        page = seen(read(path))
        assert page.sphinx == [], path
        told |= {(path, link): why for link in page.links if (why := dead(path, link))}
    assert told == {}


def not_drawn(text: str) -> list[str]:
    """Return the equations that GitHub shows otherwise than they are meant."""
    fenced = [match for match in FENCE.finditer(text) if match[2] == "math"]
    wrong = [match[3] for match in fenced if r"\operatorname" in match[3]]
    text = re.sub(r"(`+)[^`]+\1(?!`)", "", FENCE.sub("", text))
    wrong += re.findall(r".*(?:\\operatorname|\$\$).*", text)
    for before, equation, after in re.findall(r"(\w?)(?<!\\)\$([^$]+)\$(\w?)", text):
        if before or after or re.search(r"\\[^\w\s]|<\w|\*|^\s|\s$|[^\w\s]_", equation):
            wrong.append(equation)
    return wrong


def test_github_draws_every_equation() -> None:
    assert {path: found for path in pages() if (found := not_drawn(read(path)))} == {}
