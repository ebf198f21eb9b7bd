"""What a client remembers from one round to the next: on its own disk, nowhere else.

Flower's ``Context.state`` ends with the app's run and crosses process boundaries on
every call; tensors of a model's size do not belong there.
"""

import logging
import re
from pathlib import Path

from flwr.app import Context
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from flwr_fisher.errors import ClientError
from flwr_fisher.files import save_tensors
from flwr_fisher.params import Params

logger = logging.getLogger("flwr")

DEFAULT_STATE_DIR = Path("~/.cache/flwr-fisher/state")


def partition_of(context: Context) -> int:
    """Return what a client is known by in every run: its partition, or its node."""
    return int(context.node_config.get("partition-id", context.node_id))


class ClientStore:
    """One client's tensors of one run, by name and the step that they were made in.

    They lie under ``<root>/<run>/partition-<partition>/``. A step may be asked for
    twice, when a round failed or its server was stopped: so what is saved in a step
    leaves in place what that step began with. Nothing deletes the folder of a run that
    has ended.

    Parameters
    ----------
    root : Path | str
        Made if it does not exist.
    run : int
        The run's number, from the server, whose checkpoints keep it.
    partition : int
        The client's.

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

    def __init__(self, root: Path | str, run: int, partition: int) -> None:
        self.path = Path(root).expanduser() / f"{run:x}" / f"partition-{partition}"

    def load(self, name: str, step: int) -> dict[str, Tensor] | None:
        """Return what was saved; None if it is gone, or damaged, which is logged."""
        path = self._file(name, step)
        if not path.exists():
            return None
        try:
            return dict(load_file(path))
        except (SafetensorError, OSError, ValueError) as error:
            logger.warning("%s is damaged, and treated as lost: %s", path, error)
            return None

    def save(
        self, name: str, step: int, tensors: Params, *, keep: int | None = None
    ) -> None:
        """Write tensors; of that name, drop all others but step `keep`'s.

        Raises
        ------
        ClientError
            If the disk refuses.
        """
        path = self._file(name, step)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            save_tensors(path, tensors)
            kept = {path, *([] if keep is None else [self._file(name, keep)])}
            for other in self.path.iterdir():
                mine = re.fullmatch(rf"{re.escape(name)}-\d+\.safetensors", other.name)
                if mine and other not in kept:
                    other.unlink()
        except (SafetensorError, OSError) as error:
            raise ClientError(
                f"cannot keep this client's state in {self.path}: {error}; pass "
                "FisherClient(state_dir=...) another place"
            ) from error

    def _file(self, name: str, step: int) -> Path:
        return self.path / f"{name}-{step:06d}.safetensors"
