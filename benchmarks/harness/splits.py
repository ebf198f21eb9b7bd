"""Evaluate splits of a data set in several processes, each one's numbers kept."""

import multiprocessing
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from harness.jobs import kept, quiet
from harness.page import CACHE
from harness.uploads import Setting

Evaluate = Callable[[Setting, Path], Any]  # a split's numbers, from the data's folder


def on_splits(
    name: str,
    evaluate: Evaluate,
    settings: Iterable[Setting],
    options: Namespace,
    known: Mapping[str, Any] | None = None,
    keep: Callable[[dict[str, Any]], object] = lambda found: None,
) -> dict[Setting, Any]:
    """Return each split's numbers; those found before are in the cache's `name`.

    `known` are a page's own, by the names of their splits: they are not found again.
    `keep` is told of them and of what was found since, as soon as it is.
    """
    splits, found = list(dict.fromkeys(settings)), dict(known or {})
    new = [split for split in splits if split.folder.name not in found]
    run = partial(_kept, CACHE / name, evaluate, options.data_dir)
    with multiprocessing.get_context("fork").Pool(options.workers, quiet) as pool:
        for split, numbers in pool.imap_unordered(run, new):
            found[split.folder.name] = numbers
            keep(found)
    return {split: found[split.folder.name] for split in splits}


def _kept(
    folder: Path, evaluate: Evaluate, data_dir: Path, setting: Setting
) -> tuple[Setting, Any]:
    path = folder / f"{setting.folder.name}.json"
    return setting, kept(path, lambda: evaluate(setting, data_dir))
