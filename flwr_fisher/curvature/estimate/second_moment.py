"""Sums of outer products, of which half is computed."""

from torch import Tensor

_BLOCK = 128  # rows; below, a product of matrices is no faster for being half of one
_MOST = 16  # blocks of rows


class SecondMoment:
    r"""Symmetric matrices :math:`\sum_k w_k x_k x_k^\top`, one a group.

    What is right of a block of rows' own diagonal block is computed, and what is left
    of it is copied in the end: for large matrices, little more than half the work.

    Parameters
    ----------
    groups, size : int
        Of the matrices ``[groups, size, size]``.
    like : Tensor
        Gives dtype and device.
    """

    def __init__(self, groups: int, size: int, like: Tensor) -> None:
        self.total = like.new_zeros(groups, size, size)
        self.block = max(_BLOCK, -(-size // _MOST))

    def add(self, columns: Tensor, weight: float = 1.0) -> None:
        """Add each column of ``[groups, size, count]``, times itself and a weight."""
        for start in range(0, columns.shape[1], self.block):
            rows = columns[:, start : start + self.block]
            part = self.total[:, start : start + self.block, start:]
            # In place, so that autocast leaves its dtype alone.
            part.baddbmm_(rows, columns[:, start:].mT, alpha=weight)

    def add_products(self, products: Tensor, weight: float = 1.0) -> None:
        """Add a sum of such matrices, times a weight."""
        self.total.add_(products, alpha=weight)

    def mean(self, count: float) -> Tensor:
        """Return the matrices over a count; they are not copied."""
        self.total.div_(count)
        for end in range(self.block, self.total.shape[1], self.block):
            rows = slice(end - self.block, end)
            self.total[:, end:, rows] = self.total[:, rows, end:].mT
        return self.total
