"""Keys from seeds, what two of them agree on, and seeds cut into shares.

Everything secret is a seed of 120 bits, one block of Shamir's scheme. Key agreement
(ECDH on P-256), sealing (Fernet) and shares (Shamir's, over GF(2^128)) are Flower's.
"""

import hashlib
import os
from collections.abc import Sequence

from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from flwr_fisher.errors import WireError
from flwr_fisher.flower_internals import (
    combine_shares,
    create_shares,
    decrypt,
    encrypt,
    generate_shared_key,
)

SEED, PUBLIC, SHARE, DIGEST = 15, 33, 20, 32  # bytes
_CURVE = ec.SECP256R1()

__all__ = [
    "DIGEST",
    "PUBLIC",
    "SEED",
    "SHARE",
    "agreed",
    "check_public",
    "combined",
    "commitment",
    "cut",
    "new_seed",
    "public_of",
    "seal",
    "unseal",
]


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


def commitment(share: bytes) -> bytes:
    """Return what tells a share from any other, and nothing of what it is."""
    return hashlib.sha256(b"flwr-fisher share " + share).digest()
