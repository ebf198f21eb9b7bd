"""Renew docs/tutorials/: the scripts of examples/ as pages, with what they print.

    python tools/tutorial_pages.py           runs scripts whose code has changed, or all
                                             if the library has
    python tools/tutorial_pages.py one_shot  runs these, whatever has changed

Each script runs in a process and a folder of its own, two at a time. A block of text
begins with `# %%`. The pictures that a block saves or shows stand below it.
docs/tutorials/runs.json has what scripts printed, and the digest of the code that did.
So a page is made anew without a run, and a test sees which code has not run yet.
"""

import contextlib
import io
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import NamedTuple

from PIL import Image
from reference import ROOT, Reference, Resolver, renew
from rst_to_markdown import fence, markdown

import flwr_fisher
from flwr_fisher import strategies

COMMAND = "python tools/tutorial_pages.py"
EXAMPLES, PAGES = ROOT / "examples", ROOT / "docs" / "tutorials"
RUNS = PAGES / "runs.json"
_TEXT = re.compile(r"^# %%\n((?:#.*\n)+)", re.MULTILINE)


class Block(NamedTuple):
    """A text, and the code that follows it."""

    text: str  # reStructuredText
    code: str
    line: int  # of the code's first line


class Shown(NamedTuple):
    """What a block of code printed, and its pictures."""

    output: str
    pictures: Sequence[str]


NOTHING = Shown("", [])


class Run(NamedTuple):
    """A run of a script: its code's digest, and what blocks showed, by their number."""

    code: str
    shown: Mapping[str, Shown]


def blocks(script: str) -> list[Block]:
    """Return a script's blocks; the first text is its docstring."""
    begin = script.index('"""') + 3
    end = script.index('"""', begin)
    marks = list(_TEXT.finditer(script, end))
    texts = [script[begin:end], *(re.sub("(?m)^# ?", "", mark[1]) for mark in marks)]
    starts = [end + 3, *(mark.end() for mark in marks)]
    ends = [*(mark.start() for mark in marks), len(script)]
    return [
        Block(text, script[start:end], script.count("\n", 0, start))
        for text, start, end in zip(texts, starts, ends, strict=True)
    ]


def digest(path: Path) -> str:
    """Return the digest of a script's code, without its texts."""
    code = "".join(block.code for block in blocks(path.read_text("utf-8")))
    return sha256(code.encode()).hexdigest()


def page(path: Path, shown: Mapping[str, Shown], reference: Reference) -> str:
    """Return a script's page."""
    library = flwr_fisher.__name__
    resolver = Resolver(reference, PAGES / f"{path.stem}.md", "errors", library, None)
    lines = [f"<!-- Made by `{COMMAND}` from examples/{path.name}. -->"]
    for number, block in enumerate(blocks(path.read_text("utf-8"))):
        own = shown.get(str(number), NOTHING)
        lines.append(markdown(block.text, resolver, 2 if number else 1).strip())
        if block.code.strip():
            lines.append(fence(block.code.strip("\n"), "python"))
        if own.output.strip():
            lines += ["It prints:", fence(own.output.strip("\n"), "text")]
        lines += (f"![A picture of this step]({picture})" for picture in own.pictures)
    script = f"[`{path.name}`](../../examples/{path.name})"
    lines.append(
        f"This page is {script} with what it shows. Run the script where flwr-fisher\n"
        "is installed with its extra `all`."
    )
    return "\n\n".join(lines) + "\n"


def ran_with() -> str:
    """Return the digest of the library that all scripts have run with."""
    found = json.loads(RUNS.read_text("utf-8")) if RUNS.exists() else {}
    return str(found.get("library", ""))


def runs() -> dict[str, Run]:
    """Return the scripts' last runs, by name."""
    found = json.loads(RUNS.read_text("utf-8"))["runs"] if RUNS.exists() else {}
    return {
        name: Run(run["code"], {n: Shown(*each) for n, each in run["shown"].items()})
        for name, run in found.items()
    }


def pages() -> dict[Path, str]:
    """Return all pages, as they should be, of the scripts whose code has run."""
    reference, known = Reference(), runs()
    return {
        PAGES / f"{path.stem}.md": page(path, known[path.stem].shown, reference)
        for path in sorted({*EXAMPLES.glob("*.py")} - {*stale()})
    }


def stale() -> list[Path]:
    """Return the scripts whose code has not run yet."""
    known = runs()
    return [
        path
        for path in sorted(EXAMPLES.glob("*.py"))
        if path.stem not in known or known[path.stem].code != digest(path)
    ]


def library() -> str:
    """Return the digest of the library's files."""
    found = sha256()
    for package in (flwr_fisher, strategies):
        for path in sorted(Path(package.__file__).parent.rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def run(path: Path) -> dict[str, Shown]:
    """Run a script in this process and this folder; return what its blocks show."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")
    sys.argv = [str(path)]
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = str(path)
    before: set[Path] = set()
    found = {}
    for number, block in enumerate(blocks(path.read_text("utf-8"))):
        printed = io.StringIO()
        code = compile("\n" * block.line + block.code, path, "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, module.__dict__)
        saved = {each for each in Path.cwd().rglob("*.png") if each not in before}
        for figure in plt.get_fignums():
            name = Path(f"{path.stem}_{number}_{figure}.png")
            plt.figure(figure).savefig(name, dpi=100)
            saved.add(name.absolute())
        plt.close("all")
        before |= saved
        shown = Shown(printed.getvalue(), [str(each) for each in sorted(saved)])
        if shown != NOTHING:
            found[str(number)] = shown
    return found


def ran(path: Path) -> Run:
    """Run a script, put its pictures where its page is, and return what it showed."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--run", str(path), f"{folder}/shown.json"]
        told = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if told.returncode:
            raise SystemExit(f"{path.name} failed:\n{told.stdout}{told.stderr}")
        found = json.loads(Path(folder, "shown.json").read_text("utf-8"))
        for picture in PAGES.glob(f"{path.stem}-*.png"):
            picture.unlink()
        numbers, shown = count(1), {}
        for number, (output, pictures) in found.items():
            names = [f"{path.stem}-{next(numbers)}.png" for _ in pictures]
            for picture, name in zip(pictures, names, strict=True):
                small(Path(picture), PAGES / name)
            shown[number] = Shown(output, names)
    return Run(digest(path), shown)


def small(picture: Path, there: Path) -> None:
    """Copy a picture with a palette: a third of the bytes."""
    with Image.open(picture) as image:
        image.convert("RGB").quantize(128).save(there, optimize=True)


def main(*arguments: str) -> None:
    """Run the scripts that are named, or all that need it; write all pages."""
    if arguments[:1] == ("--run",):
        _, script, there = arguments
        Path(there).write_text(json.dumps(run(Path(script))), "utf-8")
        return
    PAGES.mkdir(exist_ok=True)
    known, before = runs(), ran_with()
    scripts = [EXAMPLES / f"{name}.py" for name in arguments]
    if not scripts:
        scripts = stale() if before == library() else sorted(EXAMPLES.glob("*.py"))
    with ThreadPoolExecutor(2) as pool:
        for path, own in zip(scripts, pool.map(ran, scripts), strict=True):
            known[path.stem] = own
            keep(known, before)
            print(f"ran examples/{path.name}", flush=True)
    keep(known, before if arguments else library())
    renew(pages())


def keep(known: Mapping[str, Run], ran_with: str) -> None:
    """Write the runs of the scripts that there are."""
    names = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    found = {name: known[name]._asdict() for name in names if name in known}
    data = {"library": ran_with, "runs": found}
    text = json.dumps(data, indent=1, ensure_ascii=False)
    RUNS.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
