"""Data sets, partitions and the papers' small models; a :class:`Task` joins them.

Importing this room is quick: torchvision, scikit-learn and flwr-datasets are loaded
when a function first needs them.
"""

from flwr_fisher.tasks.datasets import DATASETS, load_dataset
from flwr_fisher.tasks.images import ImageData, Images
from flwr_fisher.tasks.load import load_task
from flwr_fisher.tasks.models import MODELS, make_model
from flwr_fisher.tasks.partitioners import PARTITIONS, make_partitioner
from flwr_fisher.tasks.partitions import label_histogram, partition_indices
from flwr_fisher.tasks.run_config import (
    cohort_from_run_config,
    task_from_run_config,
)
from flwr_fisher.tasks.task import Task
from flwr_fisher.tasks.texts import VOCABULARY, Sequences, TextData
from flwr_fisher.tasks.transformer import Transformer

__all__ = [
    "DATASETS",
    "MODELS",
    "PARTITIONS",
    "VOCABULARY",
    "ImageData",
    "Images",
    "Sequences",
    "Task",
    "TextData",
    "Transformer",
    "cohort_from_run_config",
    "label_histogram",
    "load_dataset",
    "load_task",
    "make_model",
    "make_partitioner",
    "partition_indices",
    "task_from_run_config",
]
