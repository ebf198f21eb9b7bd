r"""Real numbers as residues: a uniform mask hides them, and sums are exact.

A tensor with entries below :math:`2^e` becomes :math:`\operatorname{round}(x\, 2^s)
\bmod 2^b`, with :math:`b` bits in a word and
:math:`s = b - 1 - \lceil \log_2 (M + 1) \rceil - e`, so that sums over M clients do not
overflow. Each client's rounding error is half a unit. The sum's is at most
:math:`\tfrac M2\,2^{-s}`, which for 5 clients and 32 bits is :math:`10^{-8}\,2^e`.

All clients must use the same :math:`e`, the highest of all, without revealing whose it
is: see :func:`unary`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flwr_fisher.errors import ConfigurationError, ParamsError

Words = npt.NDArray[np.unsignedinteger]

LOWEST, LEVELS = -192, 384  # exponents: all of float32's, and some of float64's


@dataclass(frozen=True)
class FixedPoint:
    """The fixed-point format: the bits of a word, and the number of clients in a sum.

    Parameters
    ----------
    bits : 32 | 64
        The bits of a word.
    clients : int
        The largest number of clients in a sum.

    Raises
    ------
    ConfigurationError
        If there are no such words.

    Examples
    --------
    >>> fixed = FixedPoint(32, clients=3)
    >>> values = torch.tensor([0.3, -2.0])
    >>> e = exponent_of("w", values)
    >>> total = sum(fixed.words(values, e) for _ in range(3))
    >>> error = (fixed.values(total, e) - 3 * values).abs().max()
    >>> bool(error <= 3 / 2 * 2 ** -fixed.shift(e))
    True
    """

    bits: int
    clients: int

    def __post_init__(self) -> None:
        if self.bits not in (32, 64):
            raise ConfigurationError(f"bits must be 32 or 64, got {self.bits!r}")

    def shift(self, exponent: int) -> int:
        """Return s, where one unit is ``2**-s``."""
        return self.bits - 1 - self.clients.bit_length() - exponent

    def words(self, values: Tensor, exponent: int) -> Words:
        """Return a tensor's residues, flat, rounded half to even.

        Raises
        ------
        ParamsError
            If an entry is not finite, or reaches ``2**exponent``.
        """
        flat = values.detach().cpu().double().reshape(-1).numpy()
        # Not `>=`, which NaN would pass.
        if not np.abs(flat).max(initial=0) < math.ldexp(1.0, exponent):
            raise ParamsError(f"an entry is not finite, or not below 2^{exponent}")
        units = np.rint(np.ldexp(flat, self.shift(exponent)))
        words: Words = units.astype(f"int{self.bits}").view(f"uint{self.bits}")
        return words

    def values(self, words: Words, exponent: int) -> Tensor:
        """Return the real numbers of a sum's residues, flat in float64."""
        signed = words.view(f"int{self.bits}").astype(np.float64)
        return torch.from_numpy(np.ldexp(signed, -self.shift(exponent)))


def exponent_of(name: str, value: Tensor) -> int:
    """Return the smallest e such that a tensor's entries are below ``2**e``.

    Raises
    ------
    ParamsError
        If the tensor is not finite, or too large for any exponent. It names the tensor.

    Examples
    --------
    >>> exponent_of("a", torch.tensor([0.0, -3.0])), exponent_of("b", torch.zeros(2))
    (2, -192)
    """
    largest = float(value.detach().abs().max()) if value.numel() else 0.0
    if not math.isfinite(largest):
        raise ParamsError(f"'{name}' holds NaN or infinity, so it cannot be summed")
    exponent = math.frexp(largest)[1] if largest else LOWEST
    if exponent >= LOWEST + LEVELS:
        raise ParamsError(f"'{name}' is {largest:.3g}, too large for a secure sum")
    return max(exponent, LOWEST)


def unary(exponents: Sequence[int], noise: Words) -> Words:
    """Return words whose sum over clients reveals only the highest exponent.

    For each tensor there is a word for each level: zero above the client's exponent,
    random up to it. If at least one client adds a random word, the sum is random. It
    does not reveal how many clients did so, or which. A sum of several random words is
    zero by chance once in 2**32. Then the exponent is too low, and the client whose
    values do not fit raises an error.

    Parameters
    ----------
    exponents : Sequence[int]
        The client's own.
    noise : numpy.ndarray
        ``len(exponents) * LEVELS`` uniform words, which no one else may ever learn.
    """
    words = np.maximum(noise.reshape(len(exponents), LEVELS), np.uint32(1))
    levels = np.arange(LOWEST, LOWEST + LEVELS)
    highest = np.asarray(exponents).reshape(-1, 1)
    masked: Words = np.where(levels <= highest, words, np.uint32(0)).reshape(-1)
    return masked


def highest(words: Words) -> list[int]:
    """Return each tensor's highest exponent, from the sum of the clients' words."""
    levels = np.where(words.reshape(-1, LEVELS) != 0, np.arange(LEVELS), 0)
    return [LOWEST + int(level) for level in levels.max(axis=1)]
