"""Data sets, partitions and the papers' small models; a :class:`Task` joins them.

Importing this room is quick: torchvision, scikit-learn and flwr-datasets are loaded
when a function first needs them.
"""

from flwr_fisher.tasks.datasets import DATASETS, load_dataset
from flwr_fisher.tasks.images import ImageData, Images
from flwr_fisher.tasks.kinds import KINDS, Kind, kind_of
from flwr_fisher.tasks.load import load_task
from flwr_fisher.tasks.models import MODELS, make_model
from flwr_fisher.tasks.node import NodeTask, node_task, server_task
from flwr_fisher.tasks.own_data import load_own
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
    "KINDS",
    "MODELS",
    "PARTITIONS",
    "VOCABULARY",
    "ImageData",
    "Images",
    "Kind",
    "NodeTask",
    "Sequences",
    "Task",
    "TextData",
    "Transformer",
    "cohort_from_run_config",
    "kind_of",
    "label_histogram",
    "load_dataset",
    "load_own",
    "load_task",
    "make_model",
    "make_partitioner",
    "node_task",
    "partition_indices",
    "server_task",
    "task_from_run_config",
]
