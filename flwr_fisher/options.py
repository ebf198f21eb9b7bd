"""Options that are declared once, as fields with a default, a range and a sentence.

A class of options derives from :class:`Options` and declares each option with
:func:`option`. Everything else follows from the declaration: the check of a value, the
error for a misspelt name, the docstring's list of parameters, the form in which a
server sends the options, and the settings in the log and in a run's journal.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from inspect import cleandoc
from math import inf
from textwrap import fill
from types import UnionType
from typing import Any, Self, dataclass_transform, get_args, get_type_hints

from flwr_fisher.errors import (
    ConfigurationError,
    UnknownNameError,
    check_number,
    check_range,
    check_whole,
    plain,
    range_text,
)

_PLAIN = (bool, int, float, str, type(None))
_ANY = (-inf, inf, -inf)  # the range of an option without limits


def option(
    default: Any,
    says: str = "",
    *,
    low: float = -inf,
    high: float = inf,
    above: float = -inf,
    choices: Collection[str] = (),
    kw_only: bool = True,
) -> Any:
    """Declare an option as a field of an :class:`Options` class.

    Parameters
    ----------
    default : Any
        The value of an option that is not given. None is allowed for every type: it
        stands for a value that the class fills in later.
    says : str
        What the option does: the sentences of the class's docstring.
    low, high : float
        The least and the greatest number that is allowed.
    above : float
        The number must be greater than this.
    choices : Collection[str], default ()
        The texts that are allowed; with none, any text.
    kw_only : bool, default True
        Whether the option must be given by its name.
    """
    facts = {"says": says, "range": (low, high, above), "choices": tuple(choices)}
    return field(default=default, kw_only=kw_only, metadata=facts)


# Without `option` as a field specifier: its default is positional, which type checkers
# would not see.
@dataclass_transform(frozen_default=True)
class Options:
    """Base of all classes of options: frozen, and checked when they are made.

    Raises
    ------
    TypeError
        If a name is not known. It tells the name that may be meant.
    ConfigurationError
        If a value has another type than the option, or is out of its range.

    Examples
    --------
    >>> class Ridge(Options):
    ...     damping: float = option(0.1, "Is added to the diagonal.", low=0)
    ...     steps: int | None = option(None, "How many; None: until it is solved.")
    >>> Ridge(damping=0.5).to_options(), Ridge.from_options({"steps": 3})
    ({'damping': 0.5}, Ridge(damping=0.1, steps=3))
    >>> Ridge(damping=-1)
    Traceback (most recent call last):
    flwr_fisher.errors.ConfigurationError: damping must be >= 0, got -1
    >>> Ridge(dampning=1)
    Traceback (most recent call last):
    TypeError: Ridge() got unexpected keyword arguments ['dampning']; did you mean \
damping for dampning?
    """

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        cls.__doc__ = _with_parameters(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse unknown names, with the ones that may be meant."""
        check_names(f"{cls.__name__}()", kwargs, cls.names())
        return super().__new__(cls)

    def __post_init__(self) -> None:
        kinds = _kinds(type(self))  # type: ignore[arg-type]
        for each in fields(self):  # type: ignore[arg-type]
            value = plain(getattr(self, each.name))
            _check(each, value, kinds[each.name])
            object.__setattr__(self, each.name, value)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the options' names."""
        return tuple(each.name for each in fields(cls))  # type: ignore[arg-type]

    @classmethod
    def of(cls, name: str, value: Self | None) -> Self:
        """Return the value of an argument, or the defaults for None.

        Raises
        ------
        ConfigurationError
            If it is no object of this class. It tells the argument's name.
        """
        if isinstance(value, cls | None):
            return cls() if value is None else value
        raise ConfigurationError(
            f"{name} must be {cls.__name__}(...), got {value!r:.80}"
        )

    def settings(self) -> dict[str, Any]:
        """Return all options by name, for the log and for a run's journal."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def to_options(self) -> dict[str, str | int | float]:
        """Return the options as a server sends them: hyphenated names, no None."""
        return {
            each.name.replace("_", "-"): value
            for each in fields(self)  # type: ignore[arg-type]
            if (value := getattr(self, each.name)) is not None
        }

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Return the options that :meth:`to_options` wrote; other entries are ignored.

        A missing option is None if it may be None, and otherwise its default.

        Raises
        ------
        ConfigurationError
            If a value is out of range, or has another type.
        """
        values, kinds = {}, _kinds(cls)  # type: ignore[arg-type]
        for each in fields(cls):  # type: ignore[arg-type]
            key = each.name.replace("_", "-")
            if key in options:
                values[each.name] = options[key]
            elif type(None) in kinds[each.name]:
                values[each.name] = None
        return cls(**values)


def check_names(
    who: str,
    names: Iterable[str],
    known: Collection[str],
    elsewhere: Mapping[str, str] | None = None,
) -> None:
    """Raise an error for keyword arguments that `who` does not have.

    Parameters
    ----------
    who : str
        The class or function, such as ``FAGH()``.
    names : Iterable[str]
        The keywords that were given.
    known : Collection[str]
        The keywords that it has.
    elsewhere : Mapping[str, str], optional
        For keywords that belong elsewhere: how to write them there.

    Raises
    ------
    TypeError
        If one is not known. It tells the keywords that may be meant.
    """
    if not (unknown := sorted(set(names) - set(known))):
        return
    elsewhere = elsewhere or {}
    close = {
        name: elsewhere.get(name) or next(iter(get_close_matches(name, known)), None)
        for name in unknown
    }
    meant = [f"{other} for {name}" for name, other in close.items() if other]
    hint = f"; did you mean {', '.join(meant)}?" if meant else ""
    raise TypeError(f"{who} got unexpected keyword arguments {unknown}{hint}")


@cache  # what annotations say takes longer to read than the options to check
def _kinds(cls: type) -> dict[str, tuple[Any, ...]]:
    """Return each option's types, those of a union one by one."""
    return {
        name: get_args(hint) if isinstance(hint, UnionType) else (hint,)
        for name, hint in get_type_hints(cls).items()
    }


def _check(declared: "Field[Any]", value: Any, kinds: tuple[Any, ...]) -> None:
    """Raise :class:`ConfigurationError` unless a value is one that was declared."""
    name, facts = declared.name, declared.metadata
    if not all(kind in _PLAIN for kind in kinds):
        return  # a function or an object, which its class checks itself
    if value is None and (type(None) in kinds or declared.default is None):
        return
    if bool in kinds and isinstance(value, bool):
        return
    if str in kinds and (isinstance(value, str) or not {int, float} & set(kinds)):
        if (choices := facts.get("choices")) and value not in choices:
            switches = ("True", "False") if bool in kinds else ()
            raise UnknownNameError(name, value, [*choices, *switches])
        elif not isinstance(value, str):
            raise ConfigurationError(f"{name} must be a text, got {value!r:.80}")
        return
    if kinds[0] is bool:
        raise ConfigurationError(f"{name} must be True or False, got {value!r:.80}")
    (check_number if float in kinds else check_whole)(name, value)
    check_range(name, value, *facts.get("range", _ANY))


def _with_parameters(cls: type) -> str:
    """Return the docstring of a class with the list of its options.

    It stands behind the docstring's first paragraphs, before its other sections.
    """
    text = cleandoc(cls.__doc__ or "")
    lines = ["Parameters", "----------"]
    for each in fields(cls):
        default = "" if each.default is MISSING else f", default {each.default!r}"
        says = each.metadata.get("says", "")
        if (span := each.metadata.get("range", _ANY)) != _ANY:
            says = f"{says} It must be {range_text(*span)}."
        elif each.metadata.get("choices"):
            says = f"{says} One of: {', '.join(each.metadata['choices'])}."
        kind = getattr(each.type, "__name__", each.type)
        lines.append(f"{each.name} : {kind}{default}")
        lines.append(fill(says, 84, initial_indent="    ", subsequent_indent="    "))
    head, mark, tail = text.partition("\n\nRaises\n")
    if not mark:
        head, mark, tail = text.partition("\n\nExamples\n")
    return "\n".join([head, "", *lines]) + mark + tail
