"""reStructuredText as Markdown that GitHub shows: docstrings and tutorials' texts.

What a text refers to by a role, such as ``:class:`Policy```, becomes a link. An element
that has no rule here is an error: nothing is left out in silence.
"""

import re
import unicodedata
from collections.abc import Callable
from itertools import zip_longest

from docutils import nodes
from docutils.frontend import get_default_settings
from docutils.parsers.rst import Parser, roles
from docutils.utils import new_document
from sphinx.util.docutils import docutils_namespace

# For a role, a target and a title of the author's: the title, and an address or None.
Resolve = Callable[[str, str, str | None], tuple[str, str | None]]

_SETTINGS = get_default_settings(Parser)
_SETTINGS.report_level = _SETTINGS.halt_level = 2  # warnings are errors
_SETTINGS.warning_stream, _SETTINGS.syntax_highlight = False, "none"
_SETTINGS.file_insertion_enabled = False
ROLES = ("attr", "class", "data", "doc", "func", "meth", "mod")
_TITLED = re.compile(r"(.+?)\s*<([^<>]+)>$", re.DOTALL)
# In a line, GitHub takes a backslash before punctuation away before it draws equations.
_PUNCTUATION = {
    r"\,": r"\thinspace ",
    r"\;": r"\thickspace ",
    r"\!": r"\negthinspace ",
    r"\|": r"\Vert ",
    r"\{": r"\lbrace ",
    r"\}": r"\rbrace ",
    r"\_": r"\textunderscore ",
    "<": r"\lt ",
    "*": r"\ast ",
}
_OPERATOR = re.compile(r"(?:([\w})]) ?)?\\operatorname\{(\w+)\}( ?)")
_AS_MARKS = re.compile(r"[\\*`<$]|\](?=[(\[])|(?<![^\W_])_|_(?![^\W_])")
# What would begin a list, a heading or a quotation, in a line of a paragraph.
_LINE_START = re.compile(r"^(\d*)([-+#>.)])(?=\s)", re.MULTILINE)


class RefusedError(ValueError):
    """A text that has no form in Markdown here, or refers to what is not there."""


def markdown(text: str, resolve: Resolve, level: int = 1) -> str:
    """Return a text as Markdown.

    Parameters
    ----------
    text : str
        It is reStructuredText.
    resolve : Callable
        Returns a title and an address for a role, its target and the author's title.
        An address of None makes code of it, without a link.
    level : int
        The level of the first heading.
    """
    blocks = _blocks(parsed(text), resolve, level)
    return "\n\n".join(blocks) + "\n" if blocks else ""


def parsed(text: str) -> nodes.document:
    """Return a text's tree; what docutils does not understand is an error."""
    document = new_document("text", _SETTINGS)
    with docutils_namespace():
        for name in ROLES:
            roles.register_local_role(name, _role)
        Parser().parse(text, document)
    return document


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    kept = [
        c for c in heading.lower() if c in "-_ " or unicodedata.category(c)[0] in "LN"
    ]
    return "".join(kept).replace(" ", "-")


def code(text: str) -> str:
    """Return a text as code in a line."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def fence(text: str, language: str) -> str:
    """Return lines as a block of code."""
    marks = "````" if "```" in text else "```"
    return f"{marks}{language}\n{text.rstrip()}\n{marks}"


def indented(text: str, by: int = 2) -> str:
    """Return a list's item: all lines but the first, and not the empty ones."""
    return text.replace("\n", "\n" + " " * by).replace("\n" + " " * by + "\n", "\n\n")


def _role(
    name: str, rawtext: str, text: str, lineno: int, inliner: object, *rest: object
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """Note a reference, for whoever reads the tree."""
    titled = _TITLED.match(text)
    title, target = titled.groups() if titled else (None, text)
    return [nodes.inline(rawtext, text, role=name, target=target, title=title)], []


def _blocks(parent: nodes.Element, resolve: Resolve, level: int) -> list[str]:
    found: list[str] = []
    for node in parent.children:
        found += _block(node, resolve, level)
    return found


def _block(node: nodes.Node, resolve: Resolve, level: int) -> list[str]:
    match node:
        case nodes.paragraph():
            return [_LINE_START.sub(r"\1\\\2", _inline(node, resolve))]
        case nodes.section():
            return _blocks(node, resolve, level + 1)
        case nodes.title():
            return ["#" * (level - 1) + " " + _inline(node, resolve)]
        case nodes.rubric():
            return [f"**{_inline(node, resolve)}**"]
        case nodes.math_block():
            return [fence(_lines(node.astext()), "math")]
        case nodes.doctest_block():
            return [fence(node.astext(), "pycon")]
        case nodes.literal_block():
            known = [name for name in node["classes"] if name != "code"]
            return [fence(node.astext(), known[0] if known else "python")]
        case nodes.bullet_list() | nodes.enumerated_list():
            mark = "-" if isinstance(node, nodes.bullet_list) else "1."
            items = [
                f"{mark} " + indented(item, len(mark) + 1)
                for each in node.children
                if (item := "\n\n".join(_blocks(each, resolve, level)))
            ]
            return ["\n".join(items)]
        case nodes.definition_list():
            return ["\n".join(_definition(each, resolve) for each in node.children)]
        case nodes.block_quote():
            inner = "\n\n".join(_blocks(node, resolve, level))
            return ["> " + inner.replace("\n", "\n> ").replace("> \n", ">\n")]
        case nodes.table():
            return [_table(node, resolve)]
        case nodes.field_list():
            return _fields(node, resolve)
        case nodes.comment() | nodes.target() | nodes.system_message():
            return []
    raise RefusedError(
        f"no Markdown is known for {node.tagname}: {node.astext()[:200]}"
    )


def _definition(node: nodes.Element, resolve: Resolve) -> str:
    term = " ".join(_inline(each, resolve) for each in node.children[:-1])
    body = "\n\n".join(_blocks(node.children[-1], resolve, 1))
    return "- " + indented(f"{term}: {body}")


def _table(node: nodes.Element, resolve: Resolve) -> str:
    rows = []
    for row in node.findall(nodes.row):
        cells = (
            " ".join(_blocks(entry, resolve, 1)).replace("\n", " ").replace("|", r"\|")
            for entry in row.children
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join([rows[0], re.sub(r"[^|]+", "---", rows[0]), *rows[1:]])


# What napoleon makes of a NumPy docstring's sections, by how the fields begin.
_SECTIONS = {
    "param": "Parameters",
    "ivar": "Attributes",
    "returns": "Returns",
    "Yields": "Yields",
    "raises": "Raises",
}
_TYPES = {"type": "param", "vartype": "ivar", "rtype": "returns"}


def _fields(node: nodes.Element, resolve: Resolve) -> list[str]:
    """Return the sections of a NumPy docstring: a list each, one item a parameter."""
    sections: dict[str, dict[str, tuple[str, str]]] = {}
    kinds: dict[tuple[str, str], str] = {}
    for name, body in (each.children for each in node.children):
        kind, _, argument = name.astext().partition(" ")
        if kind in _TYPES:
            kinds[_TYPES[kind], argument] = " ".join(body.astext().split())
        elif kind not in _SECTIONS:
            raise RefusedError(f"no section of docstrings is known for {kind!r}")
        else:
            text = "\n\n".join(_blocks(body, resolve, 1))
            own = sections.setdefault(_SECTIONS[kind], {})
            own[argument] = kind, text
    if ("returns", "") in kinds:  # of which nothing but the type may be told
        sections.setdefault("Returns", {}).setdefault("", ("returns", ""))
    found = []
    for title, entries in sections.items():
        items: list[str] = []
        names: list[str] = []
        for (argument, (kind, text)), after in zip_longest(
            entries.items(), list(entries.items())[1:]
        ):
            names.append(argument)
            type_ = kinds.get((kind, argument), "")
            same = after and (kinds.get((kind, after[0]), ""), after[1][1])
            if text and same == (type_, text):
                continue  # `low, high : float`
            items.append(_entry(title, names, type_, text, resolve))
            names = []
        between = "\n\n" if title in ("Returns", "Yields") else "\n"
        found.append(f"**{title}**\n\n" + between.join(items))
    return found


def _entry(
    title: str, names: list[str], type_: str, text: str, resolve: Resolve
) -> str:
    if title in ("Returns", "Yields"):
        return ": ".join(each for each in (type_ and code(type_), text) if each)
    if title == "Raises":
        names = names[0].split(", ")
        head = ", ".join(_link("class", each, None, resolve) for each in names)
    else:
        head = ", ".join(map(code, names)) + (f" ({code(type_)})" if type_ else "")
    return "- " + indented(f"{head}: {text}" if text else head)


def _inline(parent: nodes.Element, resolve: Resolve) -> str:
    return "".join(_word(node, resolve) for node in parent.children)


def _word(node: nodes.Node, resolve: Resolve) -> str:
    match node:
        case nodes.Text():
            return _AS_MARKS.sub(lambda found: "\\" + found[0], node.astext())
        case nodes.emphasis():
            return f"*{_inline(node, resolve)}*"
        case nodes.strong():
            return f"**{_inline(node, resolve)}**"
        case nodes.literal() | nodes.title_reference():
            return code(" ".join(node.astext().split()))
        case nodes.math():
            return f"${in_a_line(node.astext())}$"
        case nodes.reference():
            return f"[{_inline(node, resolve)}]({node['refuri']})"
        case nodes.target():
            return ""
        case nodes.inline() if "role" in node:
            own = node["title"] and " ".join(node["title"].split())
            return _link(node["role"], " ".join(node["target"].split()), own, resolve)
    raise RefusedError(
        f"no Markdown is known for {node.tagname}: {node.astext()[:200]}"
    )


def _link(role: str, target: str, own: str | None, resolve: Resolve) -> str:
    title, address = resolve(role, target, own)
    title = title if own or role == "doc" else code(title)
    return f"[{title}]({address})" if address else title


def in_a_line(equation: str) -> str:
    """Return an equation as GitHub draws it within a line."""
    equation = _operators(" ".join(equation.split()))
    for mark, name in _PUNCTUATION.items():
        equation = equation.replace(mark, name)
    # After a bracket, `_` would begin an emphasis.
    equation = re.sub(r"(?<=[^\w\s])_", " _ ", equation)
    return re.sub(r" (?=[ )}\]^]|$)", "", equation)


def _operators(equation: str) -> str:
    """Return an equation without the macro `operatorname`, which GitHub refuses."""

    def upright(found: re.Match[str]) -> str:
        before, name, after = found.groups()
        gaps = (r" \thinspace " if gap else "" for gap in (before, after))
        return (before or "") + rf"\mathrm{{{name}}}".join(gaps)

    return _OPERATOR.sub(upright, equation)


def _lines(equation: str) -> str:
    """Return an equation with its lines aligned, where it has several."""
    equation = _operators(equation)
    if r"\\" not in equation or r"\begin" in equation:
        return equation
    equation = equation if "&" in equation else "&" + equation.replace(r"\\", r"\\ &")
    return f"\\begin{{aligned}}\n{equation}\n\\end{{aligned}}"
