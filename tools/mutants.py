"""Count the changes of single lines that the tests notice, here and in another commit.

    python tools/mutants.py --against REV [--count 300] [--jobs 2] [--seconds 60]

A mutant is the library with one changed expression: a comparison, an operator, a
constant, a condition, or a `raise` that is left out. Mutants are drawn evenly over the
rooms, from statements that are in both trees, in functions of the same name. For each
mutant, forty of the tests that reach its line run, for `--seconds` at most; tests that
reach few other lines run first. coverage.py (`pip install coverage`) measures which
tests reach a line. The table has the number of killed mutants for each room and tree,
and the survivors are listed below it.

The measurements are kept in `build/mutants`, so that a stopped run continues.
"""

import argparse
import ast
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "mutants"
PLACES = ("flwr_fisher", "strategies")
# Long to start, and none of the library's own: a process, Ray, a build.
LEFT_OUT = ("test_ray", "test_crashes", "test_fabs", "test_docs")
_COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
_OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.Pow: "*"}


@dataclass(frozen=True)
class Mutant:
    """One expression of one statement, and what stands in its place."""

    function: str  # the name of the function or class that it is in
    statement: str  # the statement's own lines, without what surrounds them
    before: str
    after: str
    at: int  # where in the statement

    @property
    def key(self) -> tuple[str, str]:
        """What is looked for in another tree."""
        return self.function, self.statement


# Drawing


def statements(path: Path) -> Iterator[tuple[str, ast.stmt, str]]:
    """Yield the functions' statements, with the function's name and the text."""
    source = path.read_text()

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, ast.stmt, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                yield from walk(child, child.name)
            elif isinstance(child, ast.stmt) and function:
                yield function, child, ast.get_source_segment(source, child) or ""
                yield from walk(child, function)
            else:
                yield from walk(child, function)

    yield from walk(ast.parse(source), "")


def changes(statement: ast.stmt, text: str) -> Iterator[tuple[int, str, str]]:
    """Yield where a statement can be changed: from where, what, and into what."""
    if isinstance(statement, ast.Raise):
        yield 0, text, "pass"
        return
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line.encode()))

    def place(node: Any, end: bool = False) -> int:
        line = node.end_lineno if end else node.lineno
        column = node.end_col_offset if end else node.col_offset
        first = line == statement.lineno
        return lines[line - statement.lineno] + column - first * statement.col_offset

    def between(left: ast.expr, right: ast.expr, into: str) -> tuple[int, str, str]:
        start, end = place(left, end=True), place(right)
        return start, text.encode()[start:end].decode(), f" {into} "

    own = [
        value
        for name, value in ast.iter_fields(statement)
        if name in ("test", "value", "iter", "exc", "targets", "target")
    ]
    flat = [x for value in own for x in (value if isinstance(value, list) else [value])]
    for node in (n for x in flat if isinstance(x, ast.AST) for n in ast.walk(x)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            into = _COMPARISONS[type(node.ops[0])]
            yield between(node.left, node.comparators[0], into)
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            yield between(node.left, node.right, _OPERATORS[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            into = "or" if isinstance(node.op, ast.And) else "and"
            yield between(node.values[0], node.values[1], into)
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            start, end = place(node), place(node, end=True)
            new = not node.value if isinstance(node.value, bool) else node.value + 1
            yield start, text.encode()[start:end].decode(), repr(new)
    if isinstance(statement, ast.If | ast.While):
        start, end = place(statement.test), place(statement.test, end=True)
        condition = text.encode()[start:end].decode()
        yield start, condition, f"not ({condition})"
    if isinstance(statement, ast.Return) and statement.value is not None:
        start, end = place(statement.value), place(statement.value, end=True)
        yield start, text.encode()[start:end].decode(), "None"


def head(statement: ast.stmt, text: str) -> str:
    """Return a statement's text up to its body."""
    body = getattr(statement, "body", None)
    if not body:
        return text
    lines = text.splitlines(keepends=True)
    return "".join(lines[: max(1, body[0].lineno - statement.lineno)])


@dataclass(frozen=True)
class Place:
    """Where a statement stands in one tree, and how it can be changed there."""

    file: str
    line: int
    column: int
    mutants: list[Mutant]


def all_mutants(tree: Path) -> dict[tuple[str, str], Place]:
    """Return a tree's mutants by their statement; of statements that stand once."""
    every: dict[tuple[str, str], list[Place]] = defaultdict(list)
    for name in PLACES:
        for path in sorted((tree / name).rglob("*.py")):
            for function, statement, text in statements(path):
                own = head(statement, text)
                mutants = [
                    mutant
                    for at, before, after in changes(statement, text)
                    if valid(mutant := Mutant(function, own, before, after, at))
                ]
                line, column = statement.lineno, statement.col_offset
                file = str(path.relative_to(tree))
                every[function, own].append(Place(file, line, column, mutants))
    return {key: places[0] for key, places in every.items() if len(places) == 1}


def changed(mutant: Mutant) -> str:
    """Return the statement as the mutant has it."""
    own, length = mutant.statement.encode(), len(mutant.before.encode())
    start = own[: mutant.at]
    return (start + mutant.after.encode() + own[mutant.at + length :]).decode()


def valid(mutant: Mutant) -> bool:
    """Return whether a mutant is Python, and another one than before."""
    new = changed(mutant)
    body = "\n        pass" if new.rstrip().endswith(":") else ""
    try:
        ast.parse(f"if 1:\n    {new}{body}")
    except SyntaxError:
        return False
    return new != mutant.statement


def room(file: str) -> str:
    """Return the room that a file is in."""
    parts = file.split("/")
    return parts[0] if parts[0] == "strategies" or len(parts) == 2 else parts[1]


def drawn(trees: dict[str, Path], count: int, seed: int) -> list[Mutant]:
    """Draw mutants that all trees have, as evenly over the rooms as they allow."""
    found = {name: all_mutants(tree) for name, tree in trees.items()}
    first, *others = found.values()
    by_room: dict[str, list[Mutant]] = defaultdict(list)
    for key, place in first.items():
        if place.mutants and all(key in other for other in others):
            by_room[room(place.file)] += place.mutants
    source = random.Random(seed)
    for mutants in by_room.values():
        source.shuffle(mutants)
    chosen: list[Mutant] = []
    while len(chosen) < count and any(by_room.values()):
        chosen += [mutants.pop() for mutants in by_room.values() if mutants]
    return chosen[:count]


# What reaches a line


def reached(tree: Path, kept: Path, workers: int) -> dict[str, dict[str, list[str]]]:
    """Return, for each file and line, the tests that reach it; measure it once."""
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    data, python = kept.with_suffix(".coverage"), sys.executable
    tests = [p for p in sorted(tree.glob("tests/test_*.py")) if p.stem not in LEFT_OUT]
    config = kept.with_suffix(".rc")
    config.write_text("[run]\ndynamic_context = test_function\nsource = .\n")

    def measure(path: Path) -> None:
        own = Path(f"{data}.{path.stem}")
        if not own.exists():
            command = [python, "-m", "coverage", "run", f"--rcfile={config}"]
            command += [f"--data-file={own}.part", "-m", "pytest", "-q", str(path)]
            subprocess.run(command, cwd=tree, env=environment(tree), check=False)
            Path(f"{own}.part").rename(own)

    with ThreadPool(workers) as pool:
        pool.map(measure, tests, chunksize=1)
    from coverage import CoverageData

    lines: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in tests:
        measured = CoverageData(f"{data}.{path.stem}")
        measured.read()
        for file in measured.measured_files():
            short = str(Path(file).relative_to(tree))
            if not short.startswith(PLACES):
                continue
            for line, contexts in measured.contexts_by_lineno(file).items():
                names = {c.rpartition(".")[2] for c in contexts if c}
                lines[short][str(line)] += [f"tests/{path.name}::{n}" for n in names]
    kept.write_text(json.dumps(lines))
    return dict(json.loads(kept.read_text()))


def every_test(lines: dict[str, dict[str, list[str]]]) -> Iterator[str]:
    """Yield each test once for each line that it reaches."""
    return (test for own in lines.values() for tests in own.values() for test in tests)


def environment(tree: Path) -> dict[str, str]:
    """Return what a tree's tests run in."""
    return {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}


# Killing


def tried(tree: Path, place: Place, mutant: Mutant, tests: list[str], most: int) -> str:
    """Return whether the tests that reach a mutant's line notice it."""
    path = tree / place.file
    source = path.read_bytes()
    lines = source.splitlines(keepends=True)
    start = sum(map(len, lines[: place.line - 1])) + place.column
    end = start + len(mutant.statement.encode())
    path.write_bytes(source[:start] + changed(mutant).encode() + source[end:])
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        run = subprocess.run(
            [*command, *tests],
            cwd=tree,
            env=environment(tree),
            capture_output=True,
            timeout=most,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "slow"
    finally:
        path.write_bytes(source)
    return "lived" if run.returncode == 0 else "killed"


def work(job: tuple[str, Path, Place, Mutant, list[str], int]) -> dict[str, Any]:
    """Try one mutant in a copy of a tree that this process has for itself."""
    name, tree, place, mutant, tests, most = job
    own = tree.with_name(f"{tree.name}-{os.getpid()}")
    if not own.exists():
        shutil.copytree(tree, own)
    result = tried(own, place, mutant, tests, most) if tests else "unreached"
    return {"tree": name, "file": place.file, "result": result, **vars(mutant)}


def export(revision: str, into: Path) -> None:
    """Write a commit's files."""
    if into.exists():
        return
    command = ["git", "archive", revision]
    tar = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(tar)) as archive:
        archive.extractall(into, filter="data")


def main() -> None:
    """Draw, try, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", required=True, help="the commit before")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    revisions = {"before": args.against, "now": "HEAD"}
    trees: dict[str, Path] = {}
    for name, revision in revisions.items():
        command = ["git", "rev-parse", "--short", revision]
        short = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        trees[name] = WORK / short.stdout.strip()
        export(revision, trees[name])
    lines = {t: reached(t, t.with_suffix(".json"), args.jobs) for t in trees.values()}
    places = {tree: all_mutants(tree) for tree in trees.values()}
    width = {tree: Counter(every_test(own)) for tree, own in lines.items()}
    jobs = []
    # One tree after the other for each mutant: what was stopped early is a comparison.
    for mutant in drawn(trees, args.count, args.seed):
        for name, tree in trees.items():
            place = places[tree][mutant.key]
            own = lines[tree].get(place.file, {})
            end = place.line + mutant.statement.count("\n")
            span = range(place.line, end + 1)
            found = {test for n in span for test in own.get(str(n), [])}
            tests = sorted(found, key=lambda t, tree=tree: (width[tree][t], t))
            jobs.append((name, tree, place, mutant, tests[:40], args.seconds))
    report(results_of(jobs, WORK / f"results-{args.seed}.jsonl", args.jobs))


def results_of(jobs: list[Any], kept: Path, workers: int) -> list[dict[str, Any]]:
    """Do the jobs that are not done yet; return all results."""
    kept.touch()
    done = [json.loads(line) for line in kept.read_text().splitlines()]
    seen = {(r["tree"], r["function"], r["statement"], r["at"]) for r in done}

    def is_left(job: Any) -> bool:
        mutant = job[3]
        return (job[0], *mutant.key, mutant.at) not in seen

    with multiprocessing.Pool(workers) as pool, kept.open("a") as file:
        for result in pool.imap_unordered(work, filter(is_left, jobs)):
            file.write(json.dumps(result) + "\n")
            file.flush()
            done.append(result)
    return done


def report(done: list[dict[str, Any]]) -> None:
    """Print the table, and what was killed before and lives now."""
    pairs: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = defaultdict(dict)
    for one in done:
        key = (one["function"], one["statement"], one["at"], one["after"])
        pairs[key][one["tree"]] = one
    rooms: dict[str, list[dict[str, dict[str, Any]]]] = defaultdict(list)
    for pair in pairs.values():
        if len(pair) == 2:
            rooms[room(pair["now"]["file"])].append(pair)
    rooms["all"] = [pair for own in rooms.values() for pair in own]
    print("| room | mutants | killed before | killed now |\n|---|---|---|---|")
    for name, own in sorted(rooms.items()):
        counts = [sum(map(is_killed, (p[t] for p in own))) for t in ("before", "now")]
        print(f"| {name} | {len(own)} | {counts[0]} | {counts[1]} |")
    for pair in rooms["all"]:
        if is_killed(pair["before"]) and not is_killed(now := pair["now"]):
            print(f"\n{now['file']}, {now['function']}: {now['result']}")
            print(f"    {now['before']!r} -> {now['after']!r} in")
            print(f"    {now['statement'].strip()[:300]}")


def is_killed(result: dict[str, Any]) -> bool:
    """Return whether the tests noticed it, or never ended."""
    return result["result"] in ("killed", "slow")


if __name__ == "__main__":
    main()
