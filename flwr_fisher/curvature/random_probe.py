"""A fixed random direction, which server and clients make for themselves."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

__all__ = ["random_probe"]


def random_probe(like: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return a Gaussian vector of length 1, a function of names, shapes and `seed`.

    NumPy draws it on the CPU, a stream a name, so that it depends on no device, on no
    order of the names and on no version of torch: whoever knows `seed` has it, and it
    need not travel.

    Parameters
    ----------
    like : Mapping[str, Tensor]
        What it goes with: names, shapes, dtypes and devices.
    seed : int
        Any integer.

    Returns
    -------
    dict[str, Tensor]
        In the order, dtypes and places of `like`.

    Examples
    --------
    >>> like = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
    >>> probe = random_probe(like, seed=0)
    >>> round(float(sum(v.square().sum() for v in probe.values())), 5)
    1.0
    """
    drawn = {
        name: _stream(seed, name).standard_normal(like[name].shape) for name in like
    }
    squares = [float(np.square(drawn[name]).sum()) for name in sorted(drawn)]
    length = sum(squares) ** 0.5
    return {
        name: torch.from_numpy(np.asarray(values / length)).to(like[name])
        for name, values in drawn.items()
    }


def _stream(seed: int, name: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(list(f"{seed}/{name}".encode())))
