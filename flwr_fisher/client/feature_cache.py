"""Features on a client's disk: computed once a run, read in every round after it."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flwr_fisher.client.disk import SUFFIX, delete, files_in, sweep, to_drop, use
from flwr_fisher.errors import ClientError
from flwr_fisher.files import save_tensors
from flwr_fisher.log_lines import logger

CACHE_BYTES = 4 * 2**30


def content_key(*parts: str | Mapping[str, Tensor]) -> str:
    """Return a name that depends on all parts: texts, and named tensors with values.

    Examples
    --------
    >>> one, other = {"w": torch.zeros(2)}, {"w": torch.zeros(2, 1)}
    >>> content_key("a", one) == content_key("a", {"w": torch.zeros(2)})
    True
    >>> content_key("a", one) == content_key("a", other)
    False
    """
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        named = {"": part} if isinstance(part, str) else part
        found.update(f"{type(part) is str}/{len(named)}/".encode())
        for name, value in named.items():
            if isinstance(value, str):
                found.update(f"{len(value)}/{value}".encode())
            else:
                shape = f"{len(name)}/{name}/{value.dtype}/{tuple(value.shape)}/"
                found.update(shape.encode() + _bytes(value).tobytes())
    return found.hexdigest()


class FeatureCache:
    """One client's features, and what is made of them, by a key of their content.

    An entry is several files, ``<key>.<name>.safetensors`` under
    ``<root>/features/partition-<partition>/``. They are written aside and renamed, so a
    crash leaves whole files; read, they are mapped into memory, not copied. A file
    whose checksum fails is named in the log, deleted, and as good as never written.

    Parameters
    ----------
    root : Path | str
        Made if it does not exist.
    partition : int
        The client's.
    max_bytes : int, default 4 GiB
        What this client's entries may take together. What was not used for longest
        goes first; the entry just written stays, and while it is written there is that
        much more.

    Examples
    --------
    >>> import tempfile
    >>> cache = FeatureCache(tempfile.mkdtemp(), partition=0)
    >>> cache.load("key", "features") is None
    True
    >>> cache.store("key", "features", {"z": torch.ones(2)})
    {'z': tensor([1., 1.])}
    >>> cache.load("key", "features")
    {'z': tensor([1., 1.])}
    """

    def __init__(
        self, root: Path | str, partition: int, *, max_bytes: int = CACHE_BYTES
    ) -> None:
        self.path = Path(root).expanduser() / "features" / f"partition-{partition}"
        self.max_bytes = max_bytes

    def check_room(self, num_bytes: int, what: str) -> None:
        """Refuse what would never fit, before it is computed.

        Raises
        ------
        ClientError
            Saying how much it is, and what can be done.
        """
        if num_bytes > self.max_bytes:
            raise ClientError(
                f"{what} take {num_bytes} bytes on this client's disk, and its cache "
                f"is bounded to {self.max_bytes}: ask for fewer features "
                "(num_features), for feature_dtype='float16', or pass "
                f"FisherClient(cache_bytes={num_bytes}) or more"
            )

    def load(self, key: str, name: str) -> dict[str, Tensor] | None:
        """Return what was stored, mapped read-only in effect; None if it is not there.

        A damaged file is named in the log, deleted, and None.
        """
        path = self._file(key, name)
        try:
            found = _read(path)
            use(path)
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            logger.warning("%s is damaged, and is made again: %s", path, error)
            delete(path)
            return None
        return found

    def store(
        self, key: str, name: str, tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Write a file of an entry, make room, and return it as :meth:`load` does.

        Raises
        ------
        ClientError
            If the disk refuses.
        """
        path = self._file(key, name)
        held = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            sweep(self.path)
            save_tensors(path, held, {"checksum": str(_checksum(held))})
            use(path)
            found = _read(path)
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise ClientError(
                f"cannot keep this client's features in {self.path}: {error}; pass "
                "FisherClient(state_dir=...) another place, or ask for fewer features"
            ) from error
        for old in to_drop(self._entries(), key, self.max_bytes):
            self.drop(old)
        return found

    def drop(self, key: str) -> None:
        """Delete an entry, if it is there."""
        for path in self._entries().get(key, []):
            delete(path)

    def _entries(self) -> dict[str, list[Path]]:
        found: dict[str, list[Path]] = {}
        for path in files_in(self.path):
            if path.name.endswith(SUFFIX):
                found.setdefault(path.name.split(".")[0], []).append(path)
        return found

    def _file(self, key: str, name: str) -> Path:
        return self.path / f"{key}.{name}{SUFFIX}"


def _read(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        checksum = (file.metadata() or {})["checksum"]
    if str(_checksum(found)) != checksum:
        raise ValueError("its checksum does not hold")
    return found


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    """Return a CRC of names, dtypes, shapes and entries, in the names' order."""
    found = 0
    for key in sorted(tensors):
        value = tensors[key]
        found = zlib.crc32(f"{key}/{value.dtype}/{tuple(value.shape)}".encode(), found)
        found = zlib.crc32(_bytes(value), found)
    return found


def _bytes(value: Tensor) -> memoryview:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
