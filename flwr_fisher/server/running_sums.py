"""Sums that are taken while uploads come, so that no more than one is held."""

import numpy as np

from flwr_fisher.secure.fixed_point import Words
from flwr_fisher.wire.secure_upload import WORDS, SecureUpload


class WordSums:
    """The masked words of all uploads of one layout, modulo 2**bits.

    Uploads whose layout is another than most clients' are left out when all have come:
    each layout has a sum of its own.
    """

    def __init__(self) -> None:
        self._totals: dict[tuple[str, ...], Words] = {}

    def __call__(self, payload: SecureUpload, weight: float) -> SecureUpload:
        """Add an upload's words; return the rest."""
        words: Words = payload.part(WORDS).numpy()
        rest = payload.without_words()
        total = self._totals.get(rest.layout())
        if total is None:
            self._totals[rest.layout()] = words.copy()
        else:
            np.add(total, words, out=total)
        return rest

    def of(self, payload: SecureUpload) -> Words:
        """Return the sum over all uploads of one's layout."""
        return self._totals[payload.layout()]
