"""Keys and masks from seeds, shares of seeds, and signatures under keys.

Everything secret is a seed of 120 bits, one block of Shamir's scheme. Key agreement
(ECDH on P-256), sealing (Fernet) and shares (Shamir's, over GF(2^128)) are Flower's.

Without signatures a server can hand out keys of its own. The keys that SuperNodes are
registered by will do: ECDSA, as ``ssh-keygen -t ecdsa`` makes them.

Long: all that is secret, or signed, is made and opened here.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from flwr_fisher.errors import ClientError, ConfigurationError, WireError
from flwr_fisher.flower_internals import (
    combine_shares,
    create_shares,
    decrypt,
    encrypt,
    generate_shared_key,
)
from flwr_fisher.secure.fixed_point import Words, word_type

SEED, PUBLIC, SHARE, DIGEST = 15, 33, 20, 32  # bytes
_CURVE = ec.SECP256R1()

Pair = tuple[bytes, bytes]
"""For one sum: what belongs to the key of its pairwise masks, and to its own mask."""


def new_seed() -> bytes:
    """Return a secret from the system's source of randomness."""
    return os.urandom(SEED)


def public_of(seed: bytes) -> bytes:
    """Return the public key, compressed, of the private key that a seed stands for."""
    return (
        _private(seed)
        .public_key()
        .public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
    )


def check_public(key: bytes) -> None:
    """Raise :class:`WireError` unless the bytes are a point of the curve."""
    try:
        ec.EllipticCurvePublicKey.from_encoded_point(_CURVE, key)
    except ValueError as error:
        raise WireError(f"no public key: {error}", field="keys") from error


def agreed(seed: bytes, public: bytes) -> bytes:
    """Return the key that two clients have in common: 32 bytes, in base64."""
    point = ec.EllipticCurvePublicKey.from_encoded_point(_CURVE, public)
    return generate_shared_key(_private(seed), point)


def _private(seed: bytes) -> ec.EllipticCurvePrivateKey:
    for attempt in range(256):  # one number in 2**32 is too large for the curve
        info = b"flwr-fisher private key %d" % attempt
        scalar = HKDF(hashes.SHA256(), 32, None, info).derive(seed)
        try:
            return ec.derive_private_key(int.from_bytes(scalar, "big"), _CURVE)
        except ValueError:
            continue
    raise AssertionError("no seed gives 256 numbers beyond the curve's order")


def seal(key: bytes, text: bytes) -> bytes:
    """Encrypt and authenticate what only the other holder of the key may read."""
    return encrypt(key, text)


def unseal(key: bytes, sealed: bytes) -> bytes:
    """Undo :func:`seal`.

    Raises
    ------
    WireError
        If it was sealed with another key, or has been changed.
    """
    try:
        return decrypt(key, sealed)
    except InvalidToken as error:
        raise WireError("sealed with another key, or changed", field="sealed") from (
            error
        )


def cut(seed: bytes, threshold: int, count: int) -> list[bytes]:
    """Return shares of a seed, any `threshold` of which tell it, and fewer nothing."""
    return create_shares(seed, threshold, count)


def combined(shares: Sequence[bytes]) -> bytes:
    """Return the seed that shares tell.

    Raises
    ------
    WireError
        If they are not shares of one seed, as far as can be told.
    """
    try:
        seed = combine_shares(list(shares))
    except ValueError as error:
        raise WireError(f"not of one seed: {error}", field="shares") from error
    if len(seed) != SEED:
        raise WireError("not of one seed", field="shares")
    return seed


def pieces(row: bytes, size: int) -> list[bytes]:
    """Return bytes in pieces of one size."""
    return [row[i : i + size] for i in range(0, len(row), size)]


def pairs_in(row: bytes, size: int) -> list[Pair]:
    """Return bytes in pairs of pieces of one size."""
    parts = pieces(row, size)
    return list(zip(parts[::2], parts[1::2], strict=True))


def from_hex(value: Any) -> Any:
    """Undo ``json.dumps(…, default=bytes.hex)``, of lists and of what is by number."""
    if isinstance(value, str):
        return bytes.fromhex(value)
    if isinstance(value, list):
        return [from_hex(part) for part in value]
    return by_number({n: from_hex(part) for n, part in value.items()})


def by_number(found: Mapping[str, Any]) -> dict[int, Any]:
    """Return what JSON has by texts by the numbers that they stand for."""
    return {int(number): value for number, value in found.items()}


def commitments_of(shares: Sequence[Pair]) -> list[Pair]:
    """Return the commitments to a client's shares for another, sum by sum."""
    return [(commitment(a), commitment(b)) for a, b in shares]


def commitment(share: bytes) -> bytes:
    """Return what tells a share from any other, and nothing of what it is."""
    return hashlib.sha256(b"flwr-fisher share " + share).digest()


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


_DIGEST, _LENGTH = 32, 144  # bytes: of who has signed, and of the longest signature
SIGNATURE = _DIGEST + 1 + _LENGTH
UNSIGNED = bytes(SIGNATURE)
_HOW = ec.ECDSA(hashes.SHA384())


def signature(path: Path | str, number: int, public: Sequence[bytes]) -> bytes:
    """Return a client's signature under its public keys for a secure sum.

    Parameters
    ----------
    path : Path | str
        Its private key, in OpenSSH's format, without a password.
    number : int
        What it is known by.
    public : Sequence[bytes]
        The keys.

    Raises
    ------
    ConfigurationError
        If there is no such key.
    """
    try:
        key = load_ssh_private_key(Path(path).expanduser().read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(f"identity={str(path)!r}: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigurationError(
            f"identity={str(path)!r} is no ECDSA key: make one with ssh-keygen -t ecdsa"
        )
    own = key.sign(_signed(number, public), _HOW)
    name = _digest(key.public_key())
    return name + len(own).to_bytes(1, "big") + own.ljust(_LENGTH, b"\0")


@dataclass(frozen=True)
class Trusted:
    """The public keys of all clients whose sums this one joins.

    Parameters
    ----------
    keys : Mapping[bytes, tuple[str, EllipticCurvePublicKey]]
        Name and key, by their digest.
    """

    keys: Mapping[bytes, tuple[str, ec.EllipticCurvePublicKey]]

    @classmethod
    def of(cls, folder: Path | str) -> "Trusted":
        """Read a folder of public keys, ``*.pub``, in OpenSSH's format.

        Raises
        ------
        ConfigurationError
            If there is none, or naming a file that is no ECDSA key.
        """
        keys = {}
        for path in sorted(Path(folder).expanduser().glob("*.pub")):
            try:
                key = load_ssh_public_key(path.read_bytes())
            except (ValueError, UnsupportedAlgorithm) as error:
                raise ConfigurationError(f"trusted: {path}: {error}") from error
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise ConfigurationError(f"trusted: {path} is no ECDSA key")
            keys[_digest(key)] = path.stem, key
        if not keys:
            raise ConfigurationError(f"trusted: no *.pub in {folder}")
        return cls(keys)

    def check(
        self, public: Mapping[int, Sequence[bytes]], signatures: Mapping[int, bytes]
    ) -> None:
        """See that each client's keys are signed by a client of its own.

        Raises
        ------
        ClientError
            Naming the one whose are not.
        """
        signers: dict[bytes, int] = {}
        for number, keys in public.items():
            signed = signatures[number]
            name, own = signed[:_DIGEST], signed[_DIGEST + 1 :]
            if name not in self.keys:
                raise ClientError(
                    f"the public keys of client {number} are signed by nobody whose "
                    "key this client trusts"
                )
            known, key = self.keys[name]
            try:
                key.verify(own[: signed[_DIGEST]], _signed(number, keys), _HOW)
            except InvalidSignature as error:
                raise ClientError(
                    f"the public keys of client {number} are not those that {known} "
                    "has signed"
                ) from error
            if (other := signers.setdefault(name, number)) != number:
                raise ClientError(
                    f"{known} has signed for clients {other} and {number}"
                )


def _digest(key: ec.EllipticCurvePublicKey) -> bytes:
    form = PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(Encoding.DER, form)).digest()


def _signed(number: int, public: Sequence[bytes]) -> bytes:
    return b"flwr-fisher secure sum of client %d: " % number + b"".join(public)
