"""Renew the reference, docs/api/, from the docstrings, and the drawing of the rooms.

    python tools/reference.py

GitHub shows these pages, and Sphinx takes them in as it does all others. A test
compares them with what the docstrings say.
"""

import builtins
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import zip_longest
from os.path import relpath
from pathlib import Path
from types import GenericAlias, ModuleType, UnionType
from typing import Any

import rooms
from rst_to_markdown import RefusedError, code, fence, markdown, slug
from sphinx.ext.napoleon import Config, NumpyDocstring
from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
API = DOCS / "api"
COMMAND = "python tools/reference.py"
PACKAGE = "flwr_fisher"
# A name that several rooms export is described on the first page of these.
ROOMS = (
    *("params", "errors", "curvature", "merge", "rounds", "tangent", "wire", "client"),
    *("strategies", "callbacks", "report", "testing", "secure", "legacy"),
)
_NAPOLEON = Config(napoleon_use_ivar=True)
_WIDTH = 88
_UNTOLD = ("object", "ABC", "Generic", "Protocol")  # bases that tell a reader nothing
_DOTTED = re.compile(r"\b(?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*")
_TYPES = re.compile(r"^:(?:var)?type .*", re.MULTILINE)
_OBJECT = re.compile(r"<function (\w+) at 0x\w+>")


@dataclass(frozen=True)
class Entry:
    """A function, a class or one of its methods, with a heading of its own."""

    room: str
    name: str  # such as `Policy.strict`
    value: Any

    @property
    def level(self) -> int:
        """How deep its heading is."""
        return 2 + self.name.count(".")

    @property
    def key(self) -> tuple[str, str]:
        """Where it is defined, however it is imported."""
        return _key(self.value)


def _key(value: Any) -> tuple[str, str]:
    value = _function(value)
    return getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")


def _has_heading(value: Any) -> bool:
    return isinstance(value, type) or inspect.isfunction(value)


def _constant(value: Any) -> str:
    """Return what is told of a name that is neither a class nor a function."""
    if isinstance(value, dict):
        return "By name: " + ", ".join(code(_plain(name)) for name in value)
    is_type = isinstance(value, UnionType | GenericAlias)
    return code(_annotation(value) if is_type else _plain(value))


def _function(value: Any) -> Any:
    """Return what a property, a class method or a static method is made of."""
    if isinstance(value, cached_property):
        return value.func
    if isinstance(value, property):
        return value.fget
    return getattr(value, "__func__", value)


class Reference:
    """What the rooms export, each name on one page."""

    def __init__(self) -> None:
        self.modules = {room: import_module(f"{PACKAGE}.{room}") for room in ROOMS}
        self.exported = {room: dict(self._exports(room)) for room in ROOMS}
        self.entries: dict[tuple[str, str], Entry] = {}
        homes: dict[tuple[str, str], str] = {}
        for room in ROOMS:  # a name's own room comes first
            own = f"{PACKAGE}.{room}"
            for value in self.exported[room].values():
                if _has_heading(value) and _key(value)[0].startswith(own):
                    homes[_key(value)] = room
        for room in ROOMS:
            for name, value in self.exported[room].items():
                if _has_heading(value) and homes.setdefault(_key(value), room) == room:
                    for entry in _with_members(room, name, value):
                        self.entries[entry.key] = entry
        self.anchors: dict[tuple[str, str], str] = {}
        for room in ROOMS:
            seen: dict[str, int] = {slug(f"{PACKAGE}.{room}"): 1}
            for entry in self.of(room):
                anchor = slug(entry.name)
                times = seen[anchor] = seen.get(anchor, 0) + 1
                own = f"{anchor}-{times - 1}" if times > 1 else anchor
                self.anchors[entry.key] = own

    def _exports(self, room: str) -> Iterator[tuple[str, Any]]:
        module = self.modules[room]
        if hasattr(module, "__path__"):  # a package lists what it exports
            names = [
                n for n, v in vars(module).items() if not isinstance(v, ModuleType)
            ]
            names = sorted(
                names, key=lambda n: (not n.isupper(), not n[0].isupper(), n)
            )
        else:
            names = [
                n
                for n, v in vars(module).items()
                if getattr(v, "__module__", None) == module.__name__
            ]
        for name in getattr(module, "__all__", names):
            if not name.startswith("_"):
                yield name, getattr(module, name)

    def of(self, room: str) -> list[Entry]:
        """Return what a room's page describes, in its order."""
        return [entry for entry in self.entries.values() if entry.room == room]

    def page(self, room: str) -> str:
        """Return a room's page."""
        module = self.modules[room]
        here = Resolver(self, API / f"{room}.md", room, module.__name__, None)
        lines = [f"<!-- Made by `{COMMAND}` from the docstrings. -->"]
        lines += [f"# `{PACKAGE}.{room}`", markdown(module.__doc__ or "", here).strip()]
        lines += ["\n".join(self._contents(room, here))]
        for entry in self.of(room):
            lines += _described(entry, self, here.path)
        return "\n\n".join(line for line in lines if line) + "\n"

    def _contents(self, room: str, here: "Resolver") -> Iterator[str]:
        yield "| | |\n|---|---|"
        notes = _notes(self.modules[room].__name__)
        for name, value in self.exported[room].items():
            if not _has_heading(value):
                told = [_constant(value), markdown(notes.get(("", name), ""), here)]
                yield _row(f"`{name}`", ". ".join(filter(None, told)))
                continue
            entry = self.entries[_key(value)]
            inner = Resolver.of(entry, self, here.path)
            summary = _doc(value).partition("\n\n")[0]
            yield _row(f"[`{name}`]({here.address(entry)})", markdown(summary, inner))


def _with_members(room: str, name: str, value: Any) -> Iterator[Entry]:
    yield Entry(room, name, value)
    if inspect.isclass(value):
        for key, member in vars(value).items():
            function = _function(member)
            described = inspect.isfunction(function) and function.__doc__
            if described and not key.startswith("_"):
                yield Entry(room, f"{name}.{key}", member)


def _row(*cells: str) -> str:
    texts = (" ".join(cell.split()).replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(texts)} |"


def _notes(module: str) -> dict[tuple[str, str], str]:
    """Return the docstrings below a module's and its classes' attributes."""
    found = ModuleAnalyzer.for_module(module).find_attr_docs()
    return {key: "\n".join(lines).strip() for key, lines in found.items()}


def _doc(value: Any) -> str:
    """Return its own docstring, a class's with those of its attributes."""
    if not inspect.isclass(value):
        return inspect.cleandoc(_function(value).__doc__)
    doc = vars(value).get("__doc__") or ""
    if doc.startswith(f"{value.__name__}("):  # a dataclass's without a docstring
        doc = ""
    notes = [
        f"{name} : {_annotation(inspect.get_annotations(value)[name])}\n    {text}"
        for (owner, name), text in _notes(value.__module__).items()
        if owner == value.__name__
    ]
    title = ["Attributes\n----------"] if notes else []
    parts = [_OBJECT.sub(r"\1", inspect.cleandoc(doc)), "\n".join([*title, *notes])]
    return "\n\n".join(parts).strip()


def _described(entry: Entry, reference: Reference, path: Path) -> list[str]:
    resolver = Resolver.of(entry, reference, path)
    lines = ["#" * entry.level + f" {entry.name}"]
    if signature := _signature(entry):
        lines.append(fence(signature, "python"))
    if bases := list(_bases(entry.value, resolver)):
        lines.append(f"Bases: {', '.join(bases)}")
    text = str(NumpyDocstring(_doc(entry.value), _NAPOLEON, what="class"))
    text = _TYPES.sub(lambda line: _DOTTED.sub(_short, line[0]), text)
    try:
        return [*lines, markdown(text, resolver).strip()]
    except Exception as error:
        raise RefusedError(f"{PACKAGE}.{entry.room}, {entry.name}: {error}") from error


def _bases(value: Any, resolver: "Resolver") -> Iterator[str]:
    for base in value.__bases__ if inspect.isclass(value) else ():
        if entry := resolver.reference.entries.get(_key(base)):
            yield f"[`{base.__name__}`]({resolver.address(entry)})"
        elif not base.__module__.startswith(PACKAGE) and base.__name__ not in _UNTOLD:
            yield code(_annotation(f"{base.__module__}.{base.__name__}"))


def _signature(entry: Entry) -> str:
    """Return how it is called, in Python, with its types."""
    value, last = entry.value, entry.name.rpartition(".")[2]
    function, is_class = _function(value), inspect.isclass(value)
    if isinstance(value, property | cached_property):
        return f"{last}: {_annotation(inspect.signature(function).return_annotation)}"
    if is_class and issubclass(value, Exception) and "__init__" not in vars(value):
        return ""
    abstract = inspect.isabstract(value) and "__init__" not in vars(value)
    if abstract or getattr(value, "_is_protocol", False):
        return f"class {last}"
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if "." in entry.name and not (is_class or isinstance(value, staticmethod)):
        parameters = parameters[1:]
    kind = signature.return_annotation
    returns = "" if is_class or kind is signature.empty else f" -> {_annotation(kind)}"
    marks = {classmethod: "@classmethod\n", staticmethod: "@staticmethod\n"}
    head = marks.get(type(value), "") + f"{'class' if is_class else 'def'} {last}"
    shown = list(_parameters(parameters))
    line = f"{head}({', '.join(shown)}){returns}"
    if len(line.rpartition("\n")[2]) <= _WIDTH:
        return line
    return "\n".join([f"{head}(", *(f"    {each}," for each in shown), f"){returns}"])


def _parameters(parameters: list[inspect.Parameter]) -> Iterator[str]:
    star = False
    for each, after in zip_longest(parameters, parameters[1:]):
        if each.name.startswith("_"):
            continue
        if each.kind is each.KEYWORD_ONLY and not star:
            yield "*"
        star = star or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        marks = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}
        text = marks.get(each.kind, "") + each.name
        if each.annotation is not each.empty:
            text += f": {_annotation(each.annotation)}"
        if each.default is not each.empty:
            text += f" = {_plain(each.default)}"
        yield text
        if each.kind is each.POSITIONAL_ONLY and (not after or after.kind != each.kind):
            yield "/"


def _annotation(value: Any) -> str:
    """Return a type as code, without the modules' names."""
    text = value if isinstance(value, str) else inspect.formatannotation(value)
    text = re.sub(r"(?:ForwardRef\()?'([\w.]+)'\)?", r"\1", text)
    return _DOTTED.sub(_short, text).replace("~", "").replace("NoneType", "None")


def _plain(value: Any) -> str:
    """Return a value as code; what has no such form is `...`."""
    if inspect.isfunction(value) or inspect.isclass(value):
        return value.__name__
    text = repr(value).replace("'", '"').replace("PosixPath", "Path")
    if " at 0x" in text or text == "<factory>":
        return "..."
    return text if isinstance(value, str | float) else _DOTTED.sub(_short, text)


def _short(found: re.Match[str]) -> str:
    """Return a name as code has it: `nn.Module`, `torch.dtype`, `Mapping`."""
    module, _, name = found[0].rpartition(".")
    if module.startswith("torch.nn"):
        return name if name == "Parameter" else f"nn.{name}"
    short = module in ("torch", "nn") and name != "Tensor"
    return found[0] if short else name


@dataclass(frozen=True)
class Resolver:
    """Finds what a docstring refers to, and its address from the page."""

    reference: Reference
    path: Path  # the page
    room: str
    module: str  # where the docstring stands
    owner: type | None

    @classmethod
    def of(cls, entry: Entry, reference: Reference, path: Path) -> "Resolver":
        """Return that of an entry's docstring."""
        owner: Any = entry.value
        if "." in entry.name:
            name = entry.name.partition(".")[0]
            owner = reference.exported[entry.room][name]
        module = entry.key[0]
        return cls(
            reference,
            path,
            entry.room,
            module,
            owner if inspect.isclass(owner) else None,
        )

    def __call__(
        self, role: str, target: str, title: str | None
    ) -> tuple[str, str | None]:
        """Return a title and an address for a reference."""
        if role == "doc":
            return self._page(target, title)
        short = target.startswith("~")
        target = target.removeprefix("~")
        shown = title or (target.rpartition(".")[2] if short else target)
        shown += "()" if role in ("func", "meth") and not title else ""
        if role == "mod":
            import_module(target)
            room = target.removeprefix(f"{PACKAGE}.")
            page = API / f"{room}.md"
            return shown, relpath(page, self.path.parent) if room in ROOMS else None
        value = self._value(target)
        entry = (
            self.reference.entries.get(_key(value))
            if callable(_function(value))
            else None
        )
        return shown, self.address(entry) if entry else None

    def address(self, entry: Entry) -> str:
        """Return an entry's address from the page."""
        anchor = f"#{self.reference.anchors[entry.key]}"
        page = API / f"{entry.room}.md"
        return anchor if page == self.path else relpath(page, self.path.parent) + anchor

    def _page(self, target: str, title: str | None) -> tuple[str, str]:
        """Return a page of docs/, by its name from there or beside this page."""
        base = DOCS if target.startswith("/") else self.path.parent
        page = made_from = base / f"{target.removeprefix('/')}.md"
        for folder, real in ELSEWHERE.items():
            if target.startswith(folder):
                page = made_from = real(target.removeprefix(folder))
        if page.parent == DOCS / "tutorials":  # which may not be made yet
            made_from = ROOT / "examples" / f"{page.stem}.py"
        if not made_from.exists():
            raise RefusedError(f"there is no page {target!r}: {made_from} is missing")
        heading = re.search(
            r'^(?:# |r?"""\n)(.+)$', made_from.read_text("utf-8"), re.MULTILINE
        )
        if not (title := title or (heading and heading[1])):
            raise RefusedError(f"{made_from} has no title")
        return title, relpath(page, self.path.parent)

    def _value(self, target: str) -> Any:
        """Return what a name means where the docstring stands."""
        first, *rest = target.split(".")
        spaces: list[Mapping[str, Any]] = []
        if self.owner is not None:
            members = {
                k: v for c in reversed(self.owner.__mro__) for k, v in vars(c).items()
            }
            spaces.append(members)
        spaces += [vars(sys.modules[self.module]), self.reference.exported[self.room]]
        spaces += [*self.reference.exported.values(), vars(builtins)]
        for space in spaces:
            if first in space:
                return _within(space[first], rest)
        names = target.split(".")
        for upto in range(len(names) - 1, 0, -1):
            try:
                module = import_module(".".join(names[:upto]))
            except ImportError:
                continue
            return _within(module, names[upto:])
        attributes = getattr(self.owner, "__annotations__", {})
        if target in attributes or target in (getattr(self.owner, "__doc__", "") or ""):
            return None
        raise RefusedError(f"{target!r} is not known in {self.module}")


# Pages that stand elsewhere in the repository, by their names on the site.
ELSEWHERE: Mapping[str, Callable[[str], Path]] = {
    "/more/federation": lambda _: ROOT / "federation" / "README.md",
    "/benchmarks/": lambda name: ROOT / "benchmarks" / "results" / f"{name}.md",
}


def _within(value: Any, names: list[str]) -> Any:
    for name in names:
        static = inspect.getattr_static(value, name, None)
        value = static if static is not None else getattr(value, name, None)
    return value


def pages() -> dict[Path, str]:
    """Return all pages, as they should be."""
    reference = Reference()
    made = {API / f"{room}.md": reference.page(room) for room in ROOMS}
    return made | {DOCS / "rooms.svg": rooms.drawing()}


def renew(made: Mapping[Path, str]) -> None:
    """Write the pages that differ."""
    for path, text in made.items():
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            print(f"renewed {path.relative_to(ROOT)}")


if __name__ == "__main__":
    renew(pages())
