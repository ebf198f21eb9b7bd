"""The command line, and the pages of results."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.size import SMOKE, sized

CACHE = SMOKE or Path(__file__).parents[1] / "cache"
RESULTS = (SMOKE or Path(__file__).parents[1]) / "results"
SHARED = Path(__file__).parents[3] / "shared" / "data"


def command_line(doc: str | None) -> ArgumentParser:
    """Return a parser that knows ``--data-dir``."""
    parser = ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument(
        "--data-dir", type=lambda given: Path(given).resolve(), default=SHARED
    )
    return parser


def with_workers(parser: ArgumentParser) -> ArgumentParser:
    """Let the parser know ``--workers``, the number of processes for jobs."""
    parser.add_argument("--workers", type=int, default=sized(2, 1))
    return parser


def mnist_folder(options: Namespace) -> Path:
    """Return the folder that ``--data-dir`` names; leave, saying so, without MNIST."""
    data_dir: Path = options.data_dir
    if not (data_dir / "MNIST").exists():
        raise SystemExit(f"MNIST is not in {data_dir}: name its folder by --data-dir")
    return data_dir


def blocks(*parts: str | list[str]) -> list[str]:
    """Return the lines of paragraphs, tables and sections, with blank ones between."""
    lines: list[str] = []
    for part in parts:
        lines += ["", part] if isinstance(part, str) else ["", *part]
    return lines[1:]


def opening(title: str, doc: str | None) -> list[str]:
    """Return how a page begins: with the script's docstring, but its first line."""
    return blocks(f"# {title}", (doc or "").split("\n", 2)[2].strip("\n"))


def write_page(
    name: str, lines: list[str], numbers: Any = None, folder: Path = RESULTS
) -> None:
    """Write and print a page; beside it the numbers, if they are given."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(lines)
    (folder / f"{name}.md").write_text(text + "\n")
    if numbers is not None:
        (folder / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")
    print(text)


def numbers_of(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Return the numbers beside a page; none if it was never written."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def keep_part(name: str, part: str, found: Any, folder: Path = RESULTS) -> None:
    """Write the numbers of a part of a page beside those of the others."""
    folder.mkdir(parents=True, exist_ok=True)
    # Read again: another process may have run another part meanwhile.
    text = json.dumps(numbers_of(name, folder) | {part: found})
    (folder / f"{name}.json").write_text(text + "\n")


@dataclass(frozen=True)
class Page:
    """A page of parts that can be run one by one; it has all that were ever run."""

    name: str  # of its files
    opening: list[str]
    sections: Mapping[str, Callable[[Any], list[str]]]  # from a part's numbers
    plots: Mapping[str, Callable[[Any, Path], None]]  # and these, into a folder

    def command_line(self, doc: str | None) -> ArgumentParser:
        """Return a parser of ``--only`` and what all jobs have."""
        parser = with_workers(command_line(doc))
        parser.add_argument("--only", choices=self.sections)
        return parser

    def asked(self, options: Namespace) -> list[str]:
        """Return the parts to run."""
        return [options.only] if options.only else list(self.sections)

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of all parts that were ever run."""
        return numbers_of(self.name)

    def keep(self, part: str, found: Any) -> None:
        """Write a part's numbers beside those of the others."""
        keep_part(self.name, part, found)

    def write(self) -> None:
        """Write and print the page, and draw its plots."""
        numbers = self.numbers()
        known = [name for name in self.sections if name in numbers]
        sections = (self.sections[name](numbers[name]) for name in known)
        write_page(self.name, blocks(self.opening, *sections))
        self.draw()

    def draw(self) -> None:
        """Draw the plots."""
        numbers = self.numbers()
        for name in self.plots.keys() & numbers.keys():
            self.plots[name](numbers[name], RESULTS)
