"""The examples in the docstrings, run on the installed package.

``pytest --doctest-modules`` would load ``strategies/`` a second time, under a name that
it does not have when installed.
"""

import doctest
import importlib
import linecache
import pkgutil

import pytest

import flwr_fisher
import flwr_fisher.strategies

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules() -> list[str]:
    walked = pkgutil.walk_packages(flwr_fisher.__path__, "flwr_fisher.")
    # An editable install keeps strategies/ elsewhere, where the first walk misses it.
    elsewhere = flwr_fisher.strategies
    others = pkgutil.walk_packages(elsewhere.__path__, "flwr_fisher.strategies.")
    names = {info.name for info in (*walked, *others)}
    return sorted(names | {"flwr_fisher", "flwr_fisher.strategies"})


@pytest.mark.parametrize("name", modules())
def test_examples(name: str) -> None:
    linecache.clearcache()  # a debugger, which doctest makes, looks at each file in it
    result = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)
    assert result.failed == 0
