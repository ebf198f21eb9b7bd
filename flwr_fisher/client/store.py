"""What a client remembers from one round to the next: on its own disk, nowhere else.

Flower's ``Context.state`` ends with the app's run and crosses process boundaries on
every call; tensors of a model's size do not belong there.
"""

import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from filelock import FileLock
from flwr.app import Context
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from flwr_fisher.client.disk import SUFFIX, delete, files_in, sweep, to_drop, use
from flwr_fisher.errors import ClientError, check_whole
from flwr_fisher.files import ASIDE, load_record, load_texts, save_record
from flwr_fisher.log_lines import logger
from flwr_fisher.params import Params

DEFAULT_STATE_DIR = Path("~/.cache/flwr-fisher/state")
STATE_BYTES = 4 * 2**30
# What is called otherwise is not ours, and stays.
_RUN = re.compile(r"[0-9a-f]+")
_LOCK = "lock"
_FILE = re.compile(rf"{_LOCK}|[a-z-]+-\d{{6,}}\.(\d+{re.escape(ASIDE)}|{SUFFIX[1:]})")


def partition_of(context: Context) -> int:
    """Return what a client is known by in every run: its partition, or its node.

    Raises
    ------
    ClientError
        If its ``partition-id`` is no integer.
    """
    told = context.node_config.get("partition-id", context.node_id)
    try:
        if isinstance(told, float) and not told.is_integer():
            raise ValueError
        return int(told)
    except ValueError:
        raise ClientError(
            f"the node's partition-id is {told!r:.80}, and must be an integer: start "
            "it with --node-config 'partition-id=0', say, or without one"
        ) from None


class ClientStore:
    """One client's tensors of one run, by name and the step that they were made in.

    They lie under ``<root>/<run>/partition-<partition>/``. A step may be asked for
    twice, when a round failed or its server was stopped: so what is saved in a step
    leaves in place what that step began with. Nothing tells that a run has ended, and a
    server can name as many as it likes: where one client's runs take too much, those
    that were not used for longest go first, never that of the tensors just written.

    Parameters
    ----------
    root : Path | str
        Made if it does not exist.
    run : int
        The run's number, at least 0, from the server, whose checkpoints keep it.
    partition : int
        The client's.
    max_bytes : int, default 4 GiB
        What this client's tensors of all runs may take together.

    Raises
    ------
    ConfigurationError
        If `run` or `partition` is no integer, or `run` negative.

    Examples
    --------
    >>> import tempfile, torch
    >>> store = ClientStore(tempfile.mkdtemp(), run=7, partition=0)
    >>> store.save("control", 1, {"w": torch.ones(2)})
    >>> store.load("control", 1)
    {'w': tensor([1., 1.])}
    >>> store.load("control", 2) is None
    True
    """

    def __init__(
        self,
        root: Path | str,
        run: int,
        partition: int,
        *,
        max_bytes: int = STATE_BYTES,
    ) -> None:
        check_whole("run", run, 0)
        check_whole("partition", partition)
        self.root, self.max_bytes = Path(root).expanduser(), max_bytes
        self.path = self.root / f"{run:x}" / f"partition-{partition}"

    def check_room(self, num_bytes: int) -> None:
        """Refuse a run whose state would never fit, before anything is computed.

        Raises
        ------
        ClientError
            Saying how much it is, and what can be done.
        """
        if num_bytes > self.max_bytes:
            raise ClientError(
                f"the state of run {self.path.parent.name} takes {num_bytes} bytes on "
                f"this client's disk, and it keeps at most {self.max_bytes}: pass "
                f"FisherClient(state_bytes={num_bytes}) or more"
            )

    def load(self, name: str, step: int) -> dict[str, Tensor] | None:
        """Return what was saved; None if it is gone, or damaged, which is logged."""
        saved = self.load_noted(name, step)
        return None if saved is None else saved[0]

    def load_noted(self, name: str, step: int) -> tuple[dict[str, Tensor], str] | None:
        """Return what was saved, with its note, in the same way."""
        path = self._file(name, step)
        if not path.exists():
            return None
        use(path)
        try:
            if not load_texts(path):  # what earlier versions wrote has no digest
                return dict(load_file(path)), ""
            tensors, texts = load_record(path)
            return tensors, texts["note"]
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            logger.warning("%s is damaged, and treated as lost: %s", path, error)
            return None

    def lock(self) -> FileLock:
        """Return a lock on this client's tensors of this run, for a ``with``.

        A process that holds it may have been left over by another life of the server.

        Raises
        ------
        OSError
            If the disk refuses.
        """
        self._make_folder()
        return FileLock(self.path / _LOCK)

    def drop(self, name: str) -> None:
        """Delete all tensors of a name."""
        for path in self._named(name):
            delete(path)

    def save(
        self,
        name: str,
        step: int,
        tensors: Params,
        *,
        keep: Collection[int] = (),
        note: str = "",
        durable: bool = True,
    ) -> None:
        """Write tensors; of that name, drop all others but those of the steps `keep`.

        Where this client's runs then take too much, the oldest are deleted, too.

        Parameters
        ----------
        name : str
            What they are.
        step : int
            In which step they were made.
        tensors : Mapping[str, Tensor]
            The tensors.
        keep : Collection[int], default ()
            The steps whose tensors stay.
        note : str
            What is to be known beside them.
        durable : bool, default True
            Whether they must survive a loss of power.

        Raises
        ------
        ClientError
            If the disk refuses.
        """
        path = self._file(name, step)
        try:
            self._make_folder()
            sweep(self.path)
            save_record(path, tensors, {"note": note}, durable=durable)
        except (SafetensorError, OSError) as error:
            raise ClientError(
                f"cannot keep this client's state in {self.path}: {error}; pass "
                "FisherClient(state_dir=...) another place, or SecureSumsMod(state_dir="
                "...) where it is a sum's"
            ) from error
        use(path)
        kept = {path, *(self._file(name, step) for step in keep)}
        for other in self._named(name):
            if other not in kept:
                delete(other)
        self._make_room()

    def _named(self, name: str) -> list[Path]:
        own = re.compile(rf"{re.escape(name)}-\d{{6,}}{re.escape(SUFFIX)}")
        return [path for path in files_in(self.path) if own.fullmatch(path.name)]

    def _make_room(self) -> None:
        """Delete this client's state of old runs until the rest is within its bound."""
        runs = self._runs()
        for folder in to_drop(runs, self.path, self.max_bytes):
            for path in runs[folder]:
                delete(path)
            with suppress(OSError):  # others' files are in it, or others were faster
                folder.rmdir()
                folder.parent.rmdir()

    def _runs(self) -> dict[Path, list[Path]]:
        """Return this client's files of every run, by the folder they are in."""
        runs = {}
        for run in files_in(self.root):
            folder = run / self.path.name
            mine = [p for p in files_in(folder) if _FILE.fullmatch(p.name)]
            if mine and _RUN.fullmatch(run.name):
                runs[folder] = mine
        return runs

    def _make_folder(self) -> None:
        # Another client may just be deleting the run's folder, which is empty yet.
        for _ in range(3):
            with suppress(FileNotFoundError):
                self.path.mkdir(parents=True, exist_ok=True)

    def _file(self, name: str, step: int) -> Path:
        return self.path / f"{name}-{step:06d}{SUFFIX}"
