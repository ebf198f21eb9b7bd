"""Names that have moved stay importable from their old room for one version."""

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def moved_names(old: str, new: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` that finds names in their new place.

    Parameters
    ----------
    old : str
        The module that they were in.
    new : Mapping[str, str]
        By old name, module and name where each is now.

    Examples
    --------
    >>> find = moved_names("flwr_fisher.old", {"zeros": "torch.zeros"})
    >>> find("ones")
    Traceback (most recent call last):
    AttributeError: module 'flwr_fisher.old' has no attribute 'ones'
    """

    def find(name: str) -> Any:
        if name not in new:
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        module, _, attribute = new[name].rpartition(".")
        warnings.warn(
            f"{old}.{name} is now {new[name]}; the old name goes with the next version",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(module), attribute)

    return find
