"""The directory that a run writes its results to, in one form for every app."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from flwr_fisher.errors import ConfigurationError


def resolve_output_dir(output_dir: str, run_id: int) -> Path:
    """Return the directory to write to, made if it does not exist.

    Parameters
    ----------
    output_dir : str
        An absolute path, or one under ``~``; empty for
        ``~/flwr-fisher/outputs/<run id>``.
    run_id : int
        The run's id.

    Raises
    ------
    ConfigurationError
        If the path is relative: Flower copies an app and runs it elsewhere, so there is
        nothing that it could be relative to.
    """
    path = Path(output_dir or f"~/flwr-fisher/outputs/{run_id}").expanduser()
    if not path.is_absolute():
        raise ConfigurationError(
            f"output-dir must be an absolute path, got '{output_dir}': try "
            f"--run-config \"output-dir='$PWD/{output_dir}'\""
        )
    path.mkdir(parents=True, exist_ok=True)
    return path


class ReportDir:
    """Writes a run's files.

    Parameters
    ----------
    path : Path
        A directory; made if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def metrics(
        self,
        *,
        accuracy: Mapping[str, float],
        bytes: Mapping[str, float],
        seconds: Mapping[str, float],
        config: Mapping[str, Any],
        rounds: Mapping[int, Mapping[str, Any]] | None = None,
        influence: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Write ``metrics.json``: ``accuracy.<method>``, ``bytes.*``, and so on.

        `rounds`, from :func:`flwr_fisher.report.rounds_of`, becomes ``rounds.<round>``;
        `influence`, a row a client, is left out where there is none.
        """
        content: dict[str, Any] = {
            "accuracy": accuracy,
            "bytes": bytes,
            "seconds": seconds,
            "seed": config.get("seed"),
            "config": dict(config),
        }
        if rounds is not None:
            content["rounds"] = rounds
        if influence:
            content["influence"] = list(influence)
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        (self.path / "metrics.json").write_text(text)

    def model(self, params: Mapping[str, Tensor]) -> None:
        """Write ``model.safetensors``."""
        tensors = {k: v.detach().cpu().contiguous() for k, v in params.items()}
        save_file(tensors, self.path / "model.safetensors")
