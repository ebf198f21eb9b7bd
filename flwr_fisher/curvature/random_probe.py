"""A fixed random direction, which the server and each client compute by themselves."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from flwr_fisher.randomness import random_stream


def random_probe(like: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return a Gaussian vector of length 1 that depends on names, shapes and `seed`.

    NumPy draws it on the CPU, each name from a stream of its own. So it does not depend
    on the device, the order of the names or the version of torch. Server and clients
    can draw it from `seed`, and need not send it.

    Returns
    -------
    dict[str, Tensor]
        The vector, in the order and dtypes and on the devices of `like`.

    Examples
    --------
    >>> like = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
    >>> probe = random_probe(like, seed=0)
    >>> round(float(sum(v.square().sum() for v in probe.values())), 5)
    1.0
    """
    drawn = {
        name: random_stream(seed, name).standard_normal(tensor.shape)
        for name, tensor in like.items()
    }
    squares = [float(np.square(drawn[name]).sum()) for name in sorted(drawn)]
    length = sum(squares) ** 0.5
    return {
        name: torch.from_numpy(np.asarray(values / length)).to(like[name])
        for name, values in drawn.items()
    }
