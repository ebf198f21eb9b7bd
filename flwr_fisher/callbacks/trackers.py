"""Callbacks that write all metrics: to a table, or to a tracker that is installed."""

import csv
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord

from flwr_fisher.callbacks.base import History
from flwr_fisher.errors import ConfigurationError
from flwr_fisher.files import save_text

_ODD = re.compile(r"[^\w\-. /:]")  # clients choose the names of their metrics


class _Tracker:
    """Logs each round's numbers once, without lists."""

    def __init__(self) -> None:
        self._last = -1

    def on_round_end(
        self, server_round: int, arrays: ArrayRecord, history: History
    ) -> None:
        """Log the rounds that this object has not logged; a resumed run logs all."""
        for number, record in sorted(history.items()):
            if number > self._last:
                self.log(number, dict(_numbers(record)))
                self._last = number

    def log(self, server_round: int, numbers: dict[str, float]) -> None:
        """Log a round."""
        raise NotImplementedError


def _numbers(record: Any) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if not isinstance(value, list):
            yield name, float(value)


class TensorBoard(_Tracker):
    """Writes scalars for TensorBoard, through PyTorch's ``SummaryWriter``.

    Parameters
    ----------
    log_dir : str | Path
        The run's folder. A resumed run writes its rounds once more, in a new file.

    Raises
    ------
    ConfigurationError
        If tensorboard is not installed.
    """

    def __init__(self, log_dir: str | Path) -> None:
        super().__init__()
        with _installed("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        self._writer: Any = SummaryWriter(os.path.expanduser(log_dir))

    def log(self, server_round: int, numbers: dict[str, float]) -> None:
        """Add the scalars."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, server_round)
        self._writer.flush()


class MLflow(_Tracker):
    """Logs metrics to the active run of MLflow, or to a new one.

    Parameters
    ----------
    **params
        Parameters of the run, logged once.

    Raises
    ------
    ConfigurationError
        If mlflow is not installed.
    """

    def __init__(self, **params: Any) -> None:
        super().__init__()
        with _installed("mlflow"):
            import mlflow
        self._mlflow: Any = mlflow
        if params:
            mlflow.log_params(params)

    def log(self, server_round: int, numbers: dict[str, float]) -> None:
        """Log the metrics; characters that MLflow does not allow become underscores."""
        named = {_ODD.sub("_", name): value for name, value in numbers.items()}
        self._mlflow.log_metrics(named, step=server_round)


class WandB(_Tracker):
    """Logs metrics to Weights & Biases.

    Parameters
    ----------
    run : wandb.Run, optional
        The run to log to. Default: a new one, from ``wandb.init(**options)``.
    **options
        Options of ``wandb.init``: ``project``, ``name``, ``config``, ….

    Raises
    ------
    ConfigurationError
        If wandb is not installed.
    """

    def __init__(self, run: Any = None, **options: Any) -> None:
        super().__init__()
        if run is None:
            with _installed("wandb"):
                import wandb
            run = wandb.init(**options)
        self._run = run

    def log(self, server_round: int, numbers: dict[str, float]) -> None:
        """Log the metrics, with the round as their step."""
        self._run.log(numbers, step=server_round)


@contextmanager
def _installed(package: str) -> Iterator[None]:
    """Import a tracker within a ``with`` block, or say how to install it."""
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"'{package}' cannot be imported ({error}): pip install {package}"
        ) from error


class CSVFile:
    """Writes all metrics to a table: one row a round, one column a metric.

    The whole file is written again after each round, or not at all, so it has each
    round once, even after a crash. A metric that appears later has empty fields before.
    A list is written with semicolons.

    Parameters
    ----------
    path : str | Path
        The file. Its folder is made if it does not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()

    def on_round_end(
        self, server_round: int, arrays: ArrayRecord, history: History
    ) -> None:
        """Write the table."""
        names = sorted({name for record in history.values() for name in record})
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["round", *names])
        for number, record in sorted(history.items()):
            writer.writerow([number, *(_field(record.get(name)) for name in names)])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_text(self.path, text.getvalue())


def _field(value: object) -> object:
    return ";".join(map(str, value)) if isinstance(value, list) else value
