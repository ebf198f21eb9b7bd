"""Files that say what they are and of which run, so that none passes for another."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from flwr_fisher.errors import CheckpointError
from flwr_fisher.files import (
    digest_of,
    load_record,
    load_texts,
    save_record,
    save_text,
)

FORMAT = "5"


class OtherFormatError(CheckpointError):
    """The file is of another version of this library."""


def write(
    path: Path,
    name: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    record: object,
) -> None:
    """Write tensors and a record under a name."""
    with writing(path):
        save_record(path, tensors, {**name, "record": json.dumps(record)})


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file where a disk refuses it.

    Raises
    ------
    CheckpointError
        If it does.
    """
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"cannot write {path}: {error}; see to its disk, then go on with "
            "resume=True: what was written before is whole"
        ) from error


def read(
    path: Path, name: Mapping[str, str], way_out: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and record of the file of that name; `way_out` ends an error.

    Raises
    ------
    CheckpointError
        If it is damaged, of another format, or another file.
    """
    try:
        _check_format(path, load_texts(path).get("format"))
        tensors, texts = load_record(path)
        record = json.loads(texts["record"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise _damaged(path, error, way_out) from error
    check_name(path, texts, name, way_out)
    return tensors, record


def write_json(path: Path, name: Mapping[str, str], record: object) -> None:
    """Write a record alone, as a text that can be read."""
    content = {**name, "record": record}
    text = json.dumps({**content, "digest": digest_of(content)}, indent=1)
    with writing(path):
        save_text(path, f"{text}\n")


def read_json(path: Path, way_out: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return name and record of such a text.

    Raises
    ------
    CheckpointError
        If it is damaged, or of another format.
    """
    try:
        content = json.loads(path.read_text())
        _check_format(path, content.get("format"))
        digest = content.pop("digest")
        if digest != digest_of(content):
            raise ValueError("its content has changed since it was written")
        return content, content.pop("record")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise _damaged(path, error, way_out) from error


def _check_format(path: Path, written: object) -> None:
    if written is None:
        raise ValueError("it is no file of flwr-fisher's, or has lost its format")
    if written != FORMAT:
        raise OtherFormatError(
            f"{path} has format {written!r}, and this version reads {FORMAT!r}: go on "
            "with the version of flwr-fisher that began the run, or begin anew in "
            "another checkpoint_dir"
        )


def check_name(
    path: Path, own: Mapping[str, str], name: Mapping[str, str], way_out: str
) -> None:
    """Refuse a file that was written as another one."""
    for key, value in name.items():
        if own.get(key) != value:
            is_ = "of another run" if key == "run" else f"a copy of {own.get(key)}"
            raise CheckpointError(_with_way_out(f"{path} is {is_}", way_out))


def _damaged(path: Path, error: Exception, way_out: str) -> CheckpointError:
    return CheckpointError(_with_way_out(f"{path} is damaged: {error}", way_out))


def _with_way_out(text: str, way_out: str) -> str:
    return f"{text}; {way_out}" if way_out else text
