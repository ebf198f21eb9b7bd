"""``Parameters``, as older Flower servers hold them: arrays in the form of ``.npy``."""

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np

from flwr_fisher.errors import ParamsError
from flwr_fisher.legacy.lists import NDArray


def arrays_of(parameters: Any) -> list[NDArray]:
    """Return Flower's older ``Parameters``, or a list of arrays, as a list of arrays.

    Raises
    ------
    ParamsError
        If it is neither.
    """
    tensors = getattr(parameters, "tensors", None)
    if isinstance(tensors, list):
        if (kind := getattr(parameters, "tensor_type", "")) != "numpy.ndarray":
            raise ParamsError(f"initial_parameters are {kind!r}, not 'numpy.ndarray'")
        return [np.load(BytesIO(data), allow_pickle=False) for data in tensors]
    if isinstance(parameters, Sequence):
        return [np.asarray(array) for array in parameters]
    raise ParamsError(
        "initial_parameters must be Parameters or a list of arrays, got "
        f"{type(parameters).__name__}"
    )
