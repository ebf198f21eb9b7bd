"""Packages that not everybody needs: where one is missing, its extra is named."""

from collections.abc import Iterator
from contextlib import contextmanager

from flwr_fisher.errors import MissingExtraError


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import in a ``with`` what the bare library does not bring.

    Parameters
    ----------
    name : str
        Of the extra in ``pip install "flwr-fisher[…]"``.

    Raises
    ------
    MissingExtraError
        Naming the package that is not there, and the extra.

    Examples
    --------
    >>> with extra("tasks"):
    ...     import math
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name).partition(".")[0], name) from error
