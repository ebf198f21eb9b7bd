"""Data sets, partitions and the papers' small models, joined by a :class:`Task`.

Importing this room is fast: it loads torchvision, scikit-learn and flwr-datasets only
when a function needs them.
"""

from tasks.datasets import DATASETS, load_dataset
from tasks.examples import VOCABULARY, Examples, Splits
from tasks.kinds import KINDS, Kind, kind_of
from tasks.models import MODELS, make_model
from tasks.partitions import (
    PARTITIONS,
    label_histogram,
    make_partitioner,
    partition_indices,
)
from tasks.task import Task, load_task
from tasks.transformer import Transformer

__all__ = [
    "DATASETS",
    "KINDS",
    "MODELS",
    "PARTITIONS",
    "VOCABULARY",
    "Examples",
    "Kind",
    "Splits",
    "Task",
    "Transformer",
    "kind_of",
    "label_histogram",
    "load_dataset",
    "load_task",
    "make_model",
    "make_partitioner",
    "partition_indices",
]
