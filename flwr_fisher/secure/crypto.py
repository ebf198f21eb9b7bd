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
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from flwr_fisher.errors import ClientError, ConfigurationError
from flwr_fisher.flower_internals import generate_shared_key
from flwr_fisher.secure.fixed_point import Words

SEED, PUBLIC, SHARE, DIGEST = 15, 33, 20, 32  # bytes
_CURVE = ec.SECP256R1()
_BYTES = "bytes"  # the only key of a dict that stands for bytes


def public_of(seed: bytes) -> bytes:
    """Return the compressed public key for the private key of a seed."""
    key = _private(seed).public_key()
    return key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def public_key(public: bytes) -> ec.EllipticCurvePublicKey:
    """Return a public key; raise ``ValueError`` unless it is a point of the curve."""
    return ec.EllipticCurvePublicKey.from_encoded_point(_CURVE, public)


def agreed(seed: bytes, public: bytes) -> bytes:
    """Return the common key of two clients: 32 bytes, in base64."""
    return generate_shared_key(_private(seed), public_key(public))


def _private(seed: bytes) -> ec.EllipticCurvePrivateKey:
    # A number of 248 bits is below the curve's order, and no easier to guess than the
    # seed.
    number = HKDF(hashes.SHA256(), 31, None, b"flwr-fisher private key").derive(seed)
    return ec.derive_private_key(int.from_bytes(number, "big"), _CURVE)


def pieces(row: bytes, size: int) -> list[bytes]:
    """Return bytes in pieces of one size."""
    return [row[i : i + size] for i in range(0, len(row), size)]


def position(index: int, *, self_mask: bool) -> int:
    """Return which of a client's secrets, and of their shares, a sum opens.

    A sum has two: the key of the client's pairwise masks, and the client's own mask.
    """
    return 2 * index + self_mask


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
_NO_ECDSA = "not an ECDSA key, as ssh-keygen -t ecdsa makes it"


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
        text = Path(path).expanduser().read_bytes()
        key = serialization.load_ssh_private_key(text, None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(_NO_ECDSA)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(f"identity={str(path)!r}: {error}") from error
    signed = key.sign(_signed(number, public), _HOW)
    name = _digest(key.public_key())
    return name + len(signed).to_bytes(1, "big") + signed.ljust(_LENGTH, b"\0")


# Name and key of each client that a client trusts, by the key's digest.
TrustedKeys = Mapping[bytes, tuple[str, ec.EllipticCurvePublicKey]]


def trusted_keys(folder: Path | str) -> TrustedKeys:
    """Read a folder of public keys, ``*.pub``, in OpenSSH's format.

    Raises
    ------
    ConfigurationError
        If there is none, or if a file is not an ECDSA key. It names the file.
    """
    keys = {}
    for path in sorted(Path(folder).expanduser().glob("*.pub")):
        try:
            key = serialization.load_ssh_public_key(path.read_bytes())
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise ValueError(_NO_ECDSA)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise ConfigurationError(f"trusted: {path}: {error}") from error
        keys[_digest(key)] = path.stem, key
    if not keys:
        raise ConfigurationError(f"trusted: {folder} has no *.pub file")
    return keys


def check_signatures(
    trusted: TrustedKeys,
    public: Mapping[int, Sequence[bytes]],
    signatures: Mapping[int, bytes],
) -> None:
    """Check that each client's keys are signed, each by another trusted client.

    Raises
    ------
    ClientError
        It names the client whose keys are not.
    """
    signers: dict[bytes, int] = {}
    for number, keys in public.items():
        signed = signatures[number]
        digest, text = signed[:DIGEST], signed[DIGEST + 1 :]
        if digest not in trusted:
            raise ClientError(
                f"no client that this one trusts has signed the public keys of "
                f"client {number}"
            )
        name, key = trusted[digest]
        try:
            key.verify(text[: signed[DIGEST]], _signed(number, keys), _HOW)
        except InvalidSignature as error:
            raise ClientError(
                f"the public keys of client {number} differ from those that {name} "
                "has signed"
            ) from error
        if (other := signers.setdefault(digest, number)) != number:
            raise ClientError(
                f"{name} has signed for two clients, {other} and {number}"
            )


def _digest(key: ec.EllipticCurvePublicKey) -> bytes:
    form = PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(Encoding.DER, form)).digest()


def _signed(number: int, public: Sequence[bytes]) -> bytes:
    return b"flwr-fisher secure sum of client %d: " % number + b"".join(public)
