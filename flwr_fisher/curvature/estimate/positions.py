"""The choice of a layer's positions from which K-FAC's factors are computed."""

import math
from collections.abc import Sequence

from flwr_fisher.randomness import random_stream

Grid = tuple[slice, ...]  # along each axis of positions


class Positions:
    """Draws positions of a layer, each with the same probability.

    They lie on a grid with a random origin, so that no two are next to each other: the
    inputs of a convolution's neighbouring positions are nearly the same.

    Parameters
    ----------
    most : int, optional
        About how many positions of an example count in the inputs' factor; by default
        all. In the gradients' factor it is twice as many, because gradients vary more
        from one position to the next.
    seed : int
        The seed of the origins.
    """

    def __init__(self, most: int | None, seed: int) -> None:
        self.most, self._draw = most, random_stream(seed, "positions")

    def of_inputs(self, sizes: Sequence[int]) -> tuple[Grid, int]:
        """Return a grid of positions, and how many positions each point stands for.

        `sizes` are the numbers of positions along each axis.
        """
        return self._grid(sizes, self.most)

    def of_gradients(self, sizes: Sequence[int]) -> tuple[Grid, int]:
        """Return the same for the gradients of the outputs."""
        return self._grid(sizes, None if self.most is None else 2 * self.most)

    def _grid(self, sizes: Sequence[int], most: int | None) -> tuple[Grid, int]:
        if most is None:
            return (slice(None),) * len(sizes), 1
        steps = _steps(sizes, most)
        origins = [int(self._draw.integers(step)) for step in steps]
        slices = (slice(o, None, step) for o, step in zip(origins, steps, strict=True))
        return tuple(slices), math.prod(steps)


def _steps(sizes: Sequence[int], most: int) -> list[int]:
    """Return the smallest steps that leave at most `most` points, about square."""
    steps = [1] * len(sizes)

    def left(axis: int) -> int:
        return -(-sizes[axis] // steps[axis])

    while math.prod(map(left, range(len(sizes)))) > most:
        widest = max(range(len(sizes)), key=left)
        steps[widest] += 1
    return steps
