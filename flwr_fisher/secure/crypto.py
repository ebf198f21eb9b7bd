"""Keys and masks from seeds, shares of seeds, and signatures under keys.

Each secret is a seed of 120 bits, one block of Shamir's scheme. Key agreement (ECDH on
P-256), sealing (Fernet) and shares (Shamir's, over GF(2^128)) are Flower's.

Without signatures, a server could replace clients' keys by its own. The keys that
register SuperNodes can sign: ECDSA keys, as ``ssh-keygen -t ecdsa`` makes them.
"""

import hashlib
import json
from base64 import b64decode, b64encode
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
    decrypt,
    generate_shared_key,
)
from flwr_fisher.secure.fixed_point import Words

SEED, PUBLIC, SHARE, DIGEST = 15, 33, 20, 32  # bytes
_CURVE = ec.SECP256R1()
_BYTES = "bytes"  # the only key of a dict that stands for bytes


def public_of(seed: bytes) -> bytes:
    """Return the compressed public key for the private key of a seed."""
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
        raise WireError(f"not a public key: {error}", field="keys") from error


def agreed(seed: bytes, public: bytes) -> bytes:
    """Return the common key of two clients: 32 bytes, in base64."""
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


def unseal(key: bytes, sealed: bytes) -> bytes:
    """Return the decrypted bytes of a sealed message.

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


def combined(shares: Sequence[bytes]) -> bytes:
    """Return the seed that shares reconstruct.

    Raises
    ------
    WireError
        If it is evident that they are not shares of one seed.
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


def share_in(row: bytes, index: int, which: int, size: int = SHARE) -> bytes:
    """Return one of a row's shares or digests of `size` bytes; a sum has two.

    `which` is 0 for the key of a sum's pairwise masks, and 1 for a client's own mask.
    """
    start = (2 * index + which) * size
    return row[start : start + size]


def commitments(row: bytes) -> bytes:
    """Return the commitments to a client's shares for another, as a row."""
    return b"".join(map(commitment, pieces(row, SHARE)))


def commitment(share: bytes) -> bytes:
    """Return the commitment to a share: a digest that does not reveal it."""
    return hashlib.sha256(b"flwr-fisher share " + share).digest()


_AT_ONCE = 2**22  # bytes of the stream at a time


def mask(words: Words, key: bytes, operation: np.ufunc = np.add) -> None:
    """Add the mask of a key to words, or subtract it, in place.

    It is the stream of ChaCha20, which is uniform over all residues.

    Parameters
    ----------
    words : numpy.ndarray
        uint32 or uint64.
    key : bytes
        The key of the mask.
    operation : np.add | np.subtract, default np.add
        Whether to add or subtract the mask, modulo 2**bits.

    Examples
    --------
    >>> words = np.arange(3, dtype=np.uint32)
    >>> mask(words, b"a secret")
    >>> bool((words == np.arange(3)).any())
    False
    >>> mask(words, b"a secret", np.subtract)
    >>> words
    array([0, 1, 2], dtype=uint32)
    """
    stream = _stream(key)
    step = _AT_ONCE // words.itemsize
    for start in range(0, len(words), step):
        part = words[start : start + step]
        masks = np.frombuffer(stream.update(bytes(part.nbytes)), part.dtype)
        operation(part, masks, out=part)


def noise(key: bytes, count: int) -> Words:
    """Return `count` uniform words of 32 bits, a function of the key."""
    return np.frombuffer(_stream(key).update(bytes(4 * count)), np.uint32)


def _stream(key: bytes) -> CipherContext:
    stream_key = HKDF(hashes.SHA256(), 32, None, b"flwr-fisher mask").derive(key)
    return Cipher(algorithms.ChaCha20(stream_key, bytes(16)), None).encryptor()


# --- records on disk, of clients and of the server


def to_json(value: object) -> str:
    """Return a value of dicts, lists, numbers, texts, bytes and dataclasses."""
    return json.dumps(value, default=_encoded)


def from_json(text: str | bytes) -> Any:
    """Return the value of :func:`to_json`, with dataclasses as dicts."""
    return json.loads(text, object_hook=_decoded)


def _encoded(value: object) -> dict[str, Any]:
    if isinstance(value, bytes):
        return {_BYTES: b64encode(value).decode()}
    return vars(value)


def _decoded(record: dict[str, Any]) -> Any:
    if record.keys() == {_BYTES}:
        return b64decode(record[_BYTES])
    return {int(k) if k.isdecimal() else k: value for k, value in record.items()}


# --- signatures

_LENGTH = 144  # bytes of the longest signature, after the signer's digest
SIGNATURE = DIGEST + 1 + _LENGTH
UNSIGNED = bytes(SIGNATURE)
_HOW = ec.ECDSA(hashes.SHA384())


def signature(path: Path | str, number: int, public: Sequence[bytes]) -> bytes:
    """Return a client's signature under its public keys for a secure sum.

    Parameters
    ----------
    path : Path | str
        The client's private key, in OpenSSH's format, without a password.
    number : int
        The client's number.
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
            f"identity={str(path)!r} is not an ECDSA key: make one with ssh-keygen -t "
            "ecdsa"
        )
    signed = key.sign(_signed(number, public), _HOW)
    name = _digest(key.public_key())
    return name + len(signed).to_bytes(1, "big") + signed.ljust(_LENGTH, b"\0")


@dataclass(frozen=True)
class Trusted:
    """The public keys of all clients that this client trusts.

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
            If there is none, or if a file is not an ECDSA key. It names the file.
        """
        keys = {}
        for path in sorted(Path(folder).expanduser().glob("*.pub")):
            try:
                key = load_ssh_public_key(path.read_bytes())
            except (ValueError, UnsupportedAlgorithm) as error:
                raise ConfigurationError(f"trusted: {path}: {error}") from error
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise ConfigurationError(f"trusted: {path} is not an ECDSA key")
            keys[_digest(key)] = path.stem, key
        if not keys:
            raise ConfigurationError(f"trusted: {folder} has no *.pub file")
        return cls(keys)

    def check(
        self, public: Mapping[int, Sequence[bytes]], signatures: Mapping[int, bytes]
    ) -> None:
        """Check that each client's keys are signed, each by another client.

        Raises
        ------
        ClientError
            It names the client whose keys are not.
        """
        signers: dict[bytes, int] = {}
        for number, keys in public.items():
            signed = signatures[number]
            name, text = signed[:DIGEST], signed[DIGEST + 1 :]
            if name not in self.keys:
                raise ClientError(
                    f"no client that this one trusts has signed the public keys of "
                    f"client {number}"
                )
            known, key = self.keys[name]
            try:
                key.verify(text[: signed[DIGEST]], _signed(number, keys), _HOW)
            except InvalidSignature as error:
                raise ClientError(
                    f"the public keys of client {number} differ from those that "
                    f"{known} has signed"
                ) from error
            if (other := signers.setdefault(name, number)) != number:
                raise ClientError(
                    f"{known} has signed for two clients, {other} and {number}"
                )


def _digest(key: ec.EllipticCurvePublicKey) -> bytes:
    form = PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(Encoding.DER, form)).digest()


def _signed(number: int, public: Sequence[bytes]) -> bytes:
    return b"flwr-fisher secure sum of client %d: " % number + b"".join(public)
