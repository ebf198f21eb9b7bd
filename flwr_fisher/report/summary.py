"""What every report ends with: sizes of replies, a table, and where the files are."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from flwr.app import RecordDict
from flwr.serverapp.strategy import Result

from flwr_fisher import log_lines
from flwr_fisher.errors import extra
from flwr_fisher.log_lines import logger
from flwr_fisher.params import Params
from flwr_fisher.strategies import CurvatureResult
from flwr_fisher.wire import serialized_bytes, tensors_to_arrays

with extra("report"):
    from rich.console import Console
    from rich.table import Table


def reply_sizes(result: Result, params: Params) -> dict[str, float]:
    """Return what a client uploads in a round, and what with FedAvg, on average.

    Parameters
    ----------
    result : Result
        A strategy's; of one of Flower's, and of no uploads, there is no size.
    params : Mapping[str, Tensor]
        Any parameters of the model, which weigh what each client's do.
    """
    if not isinstance(result, CurvatureResult) or not result.uploads:
        return {}
    uploads = result.uploads
    arrays = tensors_to_arrays(params)
    plain = [
        serialized_bytes(RecordDict({"arrays": arrays, "metrics": upload.metrics}))
        for upload in uploads
    ]
    return {
        "upload_per_client": result.upload_bytes,
        "fedavg_per_client": sum(plain) / len(plain),
    }


def log_summary(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    sizes: Mapping[str, float],
    path: Path,
) -> None:
    """Log a table, what an upload weighs, and where the results are."""
    log_table(title, columns, rows)
    if sizes:
        upload, plain = sizes["upload_per_client"], sizes["fedavg_per_client"]
        kilobytes = upload / 1e3, plain / 1e3
        logger.info("Upload: %.0f kB a client (FedAvg: %.0f kB)", *kilobytes)
    logger.info("Results are in %s", path)


def log_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    """Log a table."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    console = Console(width=log_lines.width())
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        logger.info(line)
