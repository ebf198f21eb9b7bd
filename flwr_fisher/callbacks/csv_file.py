"""A table of a run's metrics that grows with it."""

import csv
import io
from pathlib import Path

from flwr.app import ArrayRecord

from flwr_fisher.callbacks.base import History
from flwr_fisher.files import save_text


class CSVFile:
    """Writes all metrics after each round: a row a round, a column a metric.

    The file is written anew each time, whole or not at all, so it has each round once,
    whatever crashes; a metric that comes later has empty fields before. A list is
    written with semicolons.

    Parameters
    ----------
    path : str | Path
        The file; its folder is made.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

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
