"""A client's own disk, where it keeps tensors from one request to the next.

Flower's ``Context.state`` ends with the app's run, and is sent to another process on
every call, so it is no place for tensors of a model's size. Other processes of the same
client write and delete files in the same folder. So a file may vanish at any time, and
that is no error.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock
from safetensors import SafetensorError
from torch import Tensor

from flwr_fisher.errors import ClientError, ConfigurationError
from flwr_fisher.files import load_record, save_record, sweep
from flwr_fisher.log_lines import logger
from flwr_fisher.params import Params

DEFAULT_STATE_DIR = Path("~/.cache/flwr-fisher/state")
STATE_BYTES = 4 * 2**30
_LOCK, _SUFFIX = "lock", ".safetensors"
_NAME, _KEY = re.compile(r"[a-z]+(-[a-z]+)*"), re.compile(r"[0-9a-f]{1,32}")
# Files with other names are not ours; they are never deleted.
_FILE = re.compile(
    rf"({_LOCK}|{_NAME.pattern}-\d{{6,}})\.(?P<key>{_KEY.pattern})(\.safetensors)?"
)
_STALE = 3600  # seconds after which no process still writes a partial file
_BLOCK = 4096  # bytes that the smallest file takes on a disk
_MOST = 1000  # entries; each write looks at all of them


class Kept(NamedTuple):
    """The saved tensors, with a note."""

    tensors: dict[str, Tensor]
    note: str


@dataclass(frozen=True)
class ClientDisk:
    """One entry on a client's disk: tensors by name and step.

    Its files are ``<root>/<namespace>/partition-<client>/<name>-<step>.<key>.…``. Only
    this user can read them. A crash leaves whole files. If a file's digest is wrong,
    the log names the file, and it counts as missing. A file that is read is mapped into
    memory, not copied.

    A client does not learn that a run has ended, and a server can name any number of
    runs. So if the entries of a namespace take more than `limit` bytes together, or are
    more than 1000, those that were not used for the longest time are deleted. An entry
    that was just written is never deleted, nor one whose lock is held.

    Parameters
    ----------
    root : Path
        Made if it does not exist.
    namespace : str
        The kind of entry, in small letters and hyphens.
    client : int
        The client's partition.
    key : str
        The run or the digest to which the entry belongs, as 1 to 32 hexadecimal digits.
    limit : int, default 4 GiB
        How many bytes this client's entries of this namespace may take.

    Raises
    ------
    ConfigurationError
        If the namespace or the key has another form.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> disk = ClientDisk(Path(tempfile.mkdtemp()), "state", client=0, key="7")
    >>> disk.save("control", {"w": torch.ones(2)}, step=1)
    >>> disk.load("control", step=1).tensors
    {'w': tensor([1., 1.])}
    >>> disk.load("control", step=2) is None
    True
    """

    root: Path
    namespace: str
    client: int
    key: str
    limit: int = STATE_BYTES

    def __post_init__(self) -> None:
        _check_name(self.namespace)
        if not _KEY.fullmatch(self.key):
            raise ConfigurationError(
                "the key of a client's entry must be 1 to 32 of the digits 0 to 9 and "
                f"a to f, got {self.key!r:.80}"
            )

    @property
    def path(self) -> Path:
        """The folder of this client's entries of this namespace."""
        root = Path(self.root).expanduser()
        return root / self.namespace / f"partition-{self.client}"

    def check_room(self, num_bytes: int, what: str, instead: str = "") -> None:
        """Raise an error for tensors that would never fit, before they are computed.

        Parameters
        ----------
        num_bytes : int
            How much space they take.
        what : str
            What the tensors are, for the error.
        instead : str
            Other ways out than a higher limit.

        Raises
        ------
        ClientError
            It says how much space they take, and what to do.
        """
        if num_bytes > self.limit:
            raise ClientError(
                f"{what}: it takes {num_bytes} bytes, but this client may keep at "
                f"most {self.limit} on its disk: {instead}pass "
                f"state_bytes={num_bytes} or more"
            )

    def load(self, name: str, step: int = 0) -> Kept | None:
        """Return what was saved, or None if it is gone; log it if it is damaged.

        Parameters
        ----------
        name : str
            The tensors' common name.
        step : int
            The step in which it was made.
        """
        path = self._file(name, step)
        try:
            saved, texts = load_record(path)
            kept = Kept(saved, texts["note"])
        except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
            # PyTorch's error is a RuntimeError. A folder may be another user's.
            if os.path.exists(path):
                logger.warning("Ignoring %s, which cannot be read: %s", path, error)
            return None
        _use(path)
        return kept

    def save(
        self,
        name: str,
        tensors: Params,
        *,
        step: int = 0,
        keep: Collection[int] = (),
        note: str = "",
    ) -> None:
        """Write tensors, and delete those of other steps with the same name.

        The server may request a step twice, when a round failed or the server was
        stopped. So the tensors with which the step began must stay: name their step in
        `keep`.

        Parameters
        ----------
        name : str
            The tensors' common name.
        tensors : Mapping[str, Tensor]
            The tensors, on any device.
        step : int
            The step in which they were made.
        keep : Collection[int]
            The steps whose tensors stay, too.
        note : str
            A text that is saved with them.

        Raises
        ------
        ClientError
            If they do not fit, or the disk refuses.
        """
        path = self._file(name, step)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.check_room(num_bytes, f"the {name} of run {self.key}")
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            sweep(self.path, older_than=_STALE)
            save_record(path, tensors, {"note": note})
        except (SafetensorError, OSError) as error:
            raise ClientError(
                f"cannot write this client's {self.namespace} in {self.path} "
                f"({error}): pass another state_dir=..."
            ) from error
        _use(path)
        self.drop(name, keep={step, *keep})
        self._make_room()

    def made_once(
        self, name: str, make: Callable[[], Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Return what was saved; if it is missing, compute it first.

        Raises
        ------
        ClientError
            If the disk refuses.
        """
        if (kept := self.load(name)) is not None:
            return kept.tensors
        made = dict(make())
        self.save(name, made)
        # Another process of this client may need the room.
        return made if (kept := self.load(name)) is None else kept.tensors

    def drop(self, name: str = "*", keep: Collection[int] = ()) -> None:
        """Delete the tensors of a name, or of all names, except for some steps."""
        kept = {self._file(name, step) for step in keep}
        for path in self.path.glob(f"{name}-[0-9]*.{self.key}{_SUFFIX}"):
            if path not in kept:
                _delete(path)

    def lock(self) -> FileLock:
        """Return a lock on the entry, for a ``with``.

        The process that holds it may be left over from before a restart.

        Raises
        ------
        OSError
            If the disk refuses.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return FileLock(self.path / f"{_LOCK}.{self.key}")

    def _file(self, name: str, step: int) -> Path:
        _check_name(name)
        return self.path / f"{name}-{step:06d}.{self.key}{_SUFFIX}"

    def _make_room(self) -> None:
        """Delete the oldest entries until the others are within the limits."""
        entries: dict[str, list[Path]] = {}
        sizes, used = Counter[str](), dict[str, int]()
        for path in self.path.iterdir():  # without those that are still written
            if file := _FILE.fullmatch(path.name):
                with suppress(OSError):  # another process has just deleted it
                    status, key = path.stat(), file["key"]
                    entries.setdefault(key, []).append(path)
                    sizes[key] += max(_BLOCK, status.st_size)
                    used[key] = max(used.get(key, 0), status.st_atime_ns)
        total, count = sizes.total(), len(sizes)
        for key in sorted(sizes.keys() - {self.key}, key=used.__getitem__):
            if total <= self.limit and count <= _MOST:
                break
            if _deleted(entries[key]):
                total, count = total - sizes[key], count - 1


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            "the name of what a client keeps must consist of small letters and "
            f"hyphens, got {name!r:.80}"
        )


def _use(path: Path) -> None:
    """Set a file's time of access, by which the oldest entries are found."""
    with suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _delete(path: Path) -> None:
    """Delete a file; ignore one that is gone or may not be deleted."""
    with suppress(OSError):
        path.unlink()


def _deleted(paths: Collection[Path]) -> bool:
    """Delete an entry's files, unless another process holds its lock."""
    locks = [FileLock(path) for path in paths if path.stem == _LOCK]
    try:
        with locks[0].acquire(timeout=0) if locks else nullcontext():
            for path in paths:
                _delete(path)
    except OSError:  # it is locked, or this user may not lock it
        return False
    return True
