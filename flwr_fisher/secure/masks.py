"""Masks: streams of uniform words from keys."""

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from flwr_fisher.secure.fixed_point import Words, word_type

_AT_ONCE = 2**22  # bytes of a stream


class MaskedWords:
    """Words to which masks are added, and from which they are taken.

    Parameters
    ----------
    words : numpy.ndarray
        uint32 or uint64; they are copied.

    Examples
    --------
    >>> words = np.arange(3, dtype=np.uint32)
    >>> masked = MaskedWords(words)
    >>> masked.add(b"a secret")
    >>> bool((masked.words == words).any())
    False
    >>> masked.subtract(b"a secret")
    >>> masked.words
    array([0, 1, 2], dtype=uint32)
    """

    def __init__(self, words: Words) -> None:
        word_type(8 * words.itemsize)
        self.words: Words = words.copy()

    def add(self, key: bytes) -> None:
        """Add the mask of a key."""
        self._apply(np.add, key)

    def subtract(self, key: bytes) -> None:
        """Take the mask of a key away."""
        self._apply(np.subtract, key)

    def _apply(self, operation: np.ufunc, key: bytes) -> None:
        """Go through the stream of ChaCha20, which is uniform over all residues."""
        stream = _stream(key)
        step = _AT_ONCE // self.words.itemsize
        for start in range(0, len(self.words), step):
            part = self.words[start : start + step]
            mask = np.frombuffer(stream.update(bytes(part.nbytes)), part.dtype)
            operation(part, mask, out=part)  # modulo 2**bits


def noise(key: bytes, count: int) -> Words:
    """Return so many uniform words of 32 bits: the same for the same key."""
    return np.frombuffer(_stream(key).update(bytes(4 * count)), np.uint32)


def _stream(key: bytes) -> CipherContext:
    stream_key = HKDF(hashes.SHA256(), 32, None, b"flwr-fisher mask").derive(key)
    return Cipher(algorithms.ChaCha20(stream_key, bytes(16)), None).encryptor()
