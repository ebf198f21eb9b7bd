"""Who a public key is from: signed by keys that clients know of each other beforehand.

Without it a server can hand out keys of its own. The keys that SuperNodes are
registered by will do: ECDSA, as ``ssh-keygen -t ecdsa`` makes them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from flwr_fisher.errors import ClientError, ConfigurationError

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
