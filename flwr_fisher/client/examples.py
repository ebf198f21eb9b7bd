"""A client's training data as a whole, in an order that hangs on no loader."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_fisher.client.training import Loader
from flwr_fisher.curvature.pairs import labelled_pairs
from flwr_fisher.errors import DataError
from flwr_fisher.randomness import derive_seed, seeded


@dataclass(frozen=True)
class Examples:
    """All examples of a client, sorted by their digests.

    Parameters
    ----------
    inputs : Tensor
        ``[n, ...]`` on the CPU.
    labels : Tensor
        As the loader gave them.
    digest : str
        Of the examples, as a set with repetitions.
    """

    inputs: Tensor
    labels: Tensor
    digest: str

    def check_classes(self, num_classes: int) -> None:
        """Refuse labels that are no classes.

        Raises
        ------
        DataError
            Unless there is one integer an example, from 0 to `num_classes` - 1.
        """
        y = self.labels
        whole = y.dim() == 1 and not y.is_floating_point() and not y.is_complex()
        if not whole or int(y.min()) < 0 or int(y.max()) >= num_classes:
            raise DataError(
                "labels must be one class an example, integers [n] from 0 to "
                f"{num_classes - 1}; got {y.dtype} of shape {tuple(y.shape)}"
                + (f" from {int(y.min())} to {int(y.max())}" if whole else "")
            )


def read_examples(loader: Loader, partition: int) -> Examples:
    """Read the loader to its end, each time with the same randomness.

    So a loader that shuffles, or augments images, gives the same examples whenever it
    is asked.

    Raises
    ------
    DataError
        If there are none.
    """
    with seeded(derive_seed("training data", partition)):
        batches = [(x.cpu(), y.cpu()) for x, y in labelled_pairs(loader)]
    if not sum(len(y) for _, y in batches):
        raise DataError(f"the training loader of partition {partition} gives no batch")
    inputs, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    rows = zip(_rows(inputs), _rows(labels), strict=True)
    found = [hashlib.blake2b(x + y, digest_size=16).digest() for x, y in rows]
    order = sorted(range(len(found)), key=found.__getitem__)
    whole = hashlib.blake2b(b"".join(found[i] for i in order), digest_size=16)
    whole.update(f"{inputs.dtype}{tuple(inputs.shape)}{labels.dtype}".encode())
    return Examples(inputs[order], labels[order], whole.hexdigest())


def _rows(tensor: Tensor) -> list[bytes]:
    """Return each row's bytes."""
    rows = tensor.reshape(len(tensor), -1).contiguous().view(torch.uint8).numpy()
    return [row.tobytes() for row in rows]
