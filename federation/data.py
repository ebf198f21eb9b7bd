"""Data for a trial: three hospitals' very different data, and the server's test set."""

import sys
from pathlib import Path

import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import DirichletPartitioner
from sklearn.datasets import load_digits

NAMES = ("hospital-a", "hospital-b", "hospital-c")


def main(folder: Path) -> None:
    """Write an .npz file with images and labels for each hospital, and the test set."""
    digits = load_digits()
    images = digits.images[:, None].astype(np.float32) / 16
    columns = {"row": range(len(images)), "label": digits.target}
    rows = Dataset.from_dict(columns).train_test_split(test_size=0.2, seed=0)
    partitioner = DirichletPartitioner(len(NAMES), "label", alpha=0.2, seed=0)
    partitioner.dataset = rows["train"]
    parts = {f"{NAMES[i]}/data": partitioner.load_partition(i) for i in range(3)}
    for name, part in {**parts, "test": rows["test"]}.items():
        chosen = np.array(part[:]["row"])
        path = folder / f"{name}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, x=images[chosen], y=digits.target[chosen])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
