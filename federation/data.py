"""Data for a trial: three hospitals' very different data, and the server's test set."""

import sys
from pathlib import Path

import numpy as np

from flwr_fisher.tasks import Examples, load_task

NAMES = ("hospital-a", "hospital-b", "hospital-c")


def write(path: Path, images: Examples) -> None:
    """Write pixels and labels to a node's file."""
    np.savez(path, x=images.data.numpy(), y=images.targets.numpy())


def main(folder: Path) -> None:
    """Write an .npz file for each hospital, and the test set."""
    task = load_task(
        dataset="digits",
        model="mlp",
        partition="dirichlet-client",
        alpha=0.2,
        num_partitions=len(NAMES),
    )
    for i, name in enumerate(NAMES):
        (folder / name).mkdir(parents=True)
        write(folder / name / "data.npz", task.train_images(i))
    write(folder / "test.npz", task.data.test)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
