"""The parts of every report: a folder, the sizes of replies, a table."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import RecordDict
from flwr.serverapp.strategy import Result

from flwr_fisher import log_lines
from flwr_fisher.errors import ConfigurationError, extra, plain
from flwr_fisher.files import save_tensors
from flwr_fisher.log_lines import logger
from flwr_fisher.params import Params
from flwr_fisher.strategies import CurvatureResult
from flwr_fisher.wire import serialized_bytes, tensors_to_arrays

with extra("report"):
    from rich.console import Console
    from rich.table import Table


def resolve_output_dir(output_dir: str, run_id: int) -> Path:
    """Return the output directory, and make it if it does not exist.

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
        If the path is relative. Flower copies an app and runs it elsewhere, so the path
        would be relative to an unknown folder.
    """
    path = Path(output_dir or f"~/flwr-fisher/outputs/{run_id}").expanduser()
    if not path.is_absolute():
        raise ConfigurationError(
            f"output-dir must be an absolute path, got '{output_dir}': pass "
            f"--run-config \"output-dir='$PWD/{output_dir}'\""
        )
    path.mkdir(parents=True, exist_ok=True)
    return path


def save_report(
    path: str | Path,
    params: Params,
    *,
    config: Mapping[str, Any],
    **measured: Any,
) -> None:
    """Write ``metrics.json`` and ``model.safetensors`` to a directory.

    Parameters
    ----------
    path : str | Path
        The directory. It is made if it does not exist.
    params : Mapping[str, Tensor]
        The model's parameters.
    config : Mapping[str, Any]
        The run's config. Its ``seed`` is also written on its own.
    **measured
        ``accuracy`` by method, ``bytes``, ``seconds``, …, as JSON values. Tensors and
        numbers of NumPy are written as plain numbers. What JSON does not have is left
        out, and a warning names it.
    """
    path = Path(path).expanduser()
    save_model(path, params)
    content = {"seed": config.get("seed"), "config": dict(config), **measured}
    text = json.dumps(_as_json(content), indent=2, sort_keys=True) + "\n"
    (path / "metrics.json").write_text(text)


def save_model(path: str | Path, params: Params) -> None:
    """Write ``model.safetensors`` to a directory, which is made if necessary."""
    path = Path(path).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    save_tensors(path / "model.safetensors", params)


def _as_json(values: Mapping[Any, Any], where: str = "") -> dict[str | int, Any]:
    """Return what JSON has of these values, with plain numbers."""
    kept: dict[str | int, Any] = {}
    for key, value in values.items():
        name = key if isinstance(key, int) else str(key)
        if isinstance(value, Mapping):
            kept[name] = _as_json(value, f"{where}{name}.")
            continue
        try:
            kept[name] = json.loads(json.dumps(plain(value), default=float))
        except (TypeError, ValueError) as error:
            text = "metrics.json is written without %s%s: %s"
            logger.warning(text, where, name, error)
    return kept


def reply_sizes(result: Result, params: Params) -> dict[str, float]:
    """Return a client's mean upload in a round, and the same with FedAvg.

    Parameters
    ----------
    result : Result
        The result of a strategy. Without uploads, as in the result of Flower's
        strategies, there is no size.
    params : Mapping[str, Tensor]
        Any parameters of the model; they have the same size as each client's.
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
    """Log a table, the size of an upload, and the folder of the results."""
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
