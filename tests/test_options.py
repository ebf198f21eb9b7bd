"""Declared options: checks, wire form, hints and docstrings follow from the fields."""

import math
from dataclasses import replace

import numpy as np
import pytest

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.options import Options, option


class Example(Options):
    """An example.

    Raises
    ------
    ConfigurationError
        Sometimes.
    """

    kind: str = option("a", "Which kind.", choices=("a", "b"), kw_only=False)
    rate: float = option(0.1, "How fast.", above=0)
    share: float = option(1.0, "How much.", low=0, high=1)
    count: int | str | None = option("auto", "How many.", low=1, choices=("auto",))
    head: bool | str = option(True, "What head.", choices=("auto",))
    quiet: bool = option(False, "Whether it is quiet.")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("kind", "c", "unknown kind 'c'; known: a, b"),
        ("rate", 0, "rate must be > 0, got 0"),
        ("rate", "0.1", "rate must be a number"),
        ("rate", math.nan, "rate must be > 0, got nan"),
        ("rate", True, "rate must be a number"),
        ("share", 1.5, r"share must be in \[0, 1\], got 1.5"),
        ("count", 0, "count must be >= 1"),
        ("count", 1.5, "count must be an integer"),
        ("count", "all", "unknown count 'all'; known: auto"),
        ("head", "all", "unknown head 'all'; known: auto, True, False"),
        ("quiet", 1, "quiet must be True or False, got 1"),
    ],
)
def test_a_value_that_was_not_declared_is_refused(name, value, message):
    with pytest.raises(ConfigurationError, match=message):
        Example(**{name: value})
    with pytest.raises(ConfigurationError, match=message):
        replace(Example(), **{name: value})


def test_a_text_is_no_number():
    class Named(Options):
        title: str = option("a", "Any text.")

    assert Named(title="b").title == "b"
    with pytest.raises(ConfigurationError, match="title must be a text, got 3"):
        Named(title=3)


def test_a_misspelt_name_is_refused_with_the_one_that_is_meant():
    with pytest.raises(TypeError, match="did you mean share for shrae"):
        Example(shrae=1.0)


def test_numbers_of_numpy_become_pythons():
    made = Example("b", rate=np.float32(0.5), count=np.int64(3))
    assert (type(made.rate), type(made.count)) == (float, int)


def test_what_is_sent_is_read_back():
    made = Example("b", count=None, share=0.25)
    sent = made.to_options()
    assert sent == {
        "kind": "b",
        "rate": 0.1,
        "share": 0.25,
        "head": True,
        "quiet": False,
    }
    assert Example.from_options({**sent, "job": "train"}) == made


def test_the_docstring_lists_the_options():
    text = Example.__doc__
    listed = "count : int | str | None, default 'auto'\n    How many. It must be >= 1."
    assert listed in text
    assert text.index("rate : float, default 0.1") < text.index("Raises")


def test_an_argument_of_another_class_is_refused():
    assert Example.of("example", None) == Example()
    with pytest.raises(ConfigurationError, match=r"example must be Example\(...\)"):
        Example.of("example", {"rate": 1})
