"""What a merge reads of an accelerator: together, so that it is waited for seldom."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Reads:
    """Tensors that are wanted on the CPU, and are copied there by the next wait.

    An accelerator works off what it was given in its own time; a copy of its results
    waits until it is done. What nobody needs yet goes along with what is next.

    Examples
    --------
    >>> reads = Reads()
    >>> later = reads.queue(torch.ones(2))
    >>> now = reads.queue(torch.zeros(1))
    >>> now.values(), later.values()
    ([tensor([0.])], [tensor([1., 1.])])
    """

    def __init__(self) -> None:
        self._queued: list[Read] = []

    def queue(self, *tensors: Tensor) -> "Read":
        """Return what will have these tensors on the CPU."""
        read = Read(self, tensors)
        self._queued.append(read)
        return read

    def copy(self) -> None:
        """Copy all that is queued to the CPU, in one wait for a device."""
        queued, self._queued = self._queued, []
        copies = iter(_on_cpu([tensor for read in queued for tensor in read.tensors]))
        for read in queued:
            read.tensors = [next(copies) for _ in read.tensors]
            read.copied = True


class Read:
    """Some tensors that are wanted on the CPU; of :meth:`Reads.queue`."""

    def __init__(self, reads: Reads, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.copied, self._reads = list(tensors), False, reads

    def values(self) -> list[Tensor]:
        """Return the tensors on the CPU; what else is queued is copied as well."""
        if not self.copied:
            self._reads.copy()
        return self.tensors


def _on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors on the CPU: those that are there, and copies of all others."""
    found = list(tensors)
    away = [i for i, tensor in enumerate(found) if tensor.device.type != "cpu"]
    if not away:
        return found
    own = [found[i].contiguous().reshape(-1).view(torch.uint8) for i in away]
    parts = torch.split(torch.cat(own).cpu(), [len(each) for each in own])
    for i, part in zip(away, parts, strict=True):
        # A view as wider numbers needs aligned bytes, which a clone has.
        like = found[i]
        found[i] = part.clone().view(like.dtype).view(like.shape)
    return found
