"""What clients upload, as frozen dataclasses that turn into one ``ArrayRecord``."""

from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from flwr_fisher.curvature import Curvature
from flwr_fisher.errors import WireError
from flwr_fisher.params import Params
from flwr_fisher.wire.layout import PREFIX, curvature_to_tensors, tensors_to_curvature

__all__ = ["FisherUpload", "arrays_to_tensors", "tensors_to_arrays"]


@dataclass(frozen=True)
class FisherUpload:
    """A client's trained parameters and its Fisher there.

    Parameters keep the keys they arrived with, so that to a strategy which knows
    nothing of curvature the extras are just more keys, under ``curvature/``.

    Parameters
    ----------
    params : dict[str, Tensor]
        Parameters and buffers.
    curvature : Curvature
        Over the trained parameters.
    """

    params: dict[str, Tensor]
    curvature: Curvature

    def to_arrays(self) -> ArrayRecord:
        """Return the one record that travels, in the tensors' dtypes."""
        return tensors_to_arrays(self.params | curvature_to_tensors(self.curvature))

    @classmethod
    def from_arrays(cls, record: ArrayRecord, like: Params) -> "FisherUpload":
        """Read and check a record.

        Parameters
        ----------
        record : ArrayRecord
            What arrived.
        like : Mapping[str, Tensor]
            The parameters that were sent out: keys, shapes and dtypes must be theirs.

        Raises
        ------
        WireError
            Naming the key that is missing, unexpected, unreadable, of another shape or
            dtype, or not finite.
        """
        tensors = arrays_to_tensors(record)
        extras = {k: v for k, v in tensors.items() if k.startswith(PREFIX)}
        params = {k: v for k, v in tensors.items() if k not in extras}
        _check_params(params, like)
        for key, tensor in extras.items():
            if not tensor.is_floating_point():
                raise WireError(f"dtype {tensor.dtype}, expected a float", field=key)
        if not extras:
            raise WireError("no curvature arrived", field=PREFIX)
        curvature = tensors_to_curvature(extras, params)
        return cls({key: params[key] for key in like}, curvature)


def _check_params(params: Params, like: Params) -> None:
    for key in like.keys() - params.keys():
        raise WireError("missing", field=key)
    for key, tensor in params.items():
        if key not in like:
            raise WireError("unexpected key", field=key)
        if tensor.shape != like[key].shape:
            reason = f"shape {tuple(tensor.shape)}, expected {tuple(like[key].shape)}"
            raise WireError(reason, field=key)
        if tensor.dtype != like[key].dtype:
            reason = f"dtype {tensor.dtype}, expected {like[key].dtype}"
            raise WireError(reason, field=key)


def tensors_to_arrays(tensors: Params) -> ArrayRecord:
    """Return an ``ArrayRecord`` of the tensors, moved to the CPU.

    Raises
    ------
    WireError
        Naming the key of a tensor whose dtype NumPy lacks, such as bfloat16.
    """
    arrays = {}
    for key, tensor in tensors.items():
        try:
            # `np.save` writes non-contiguous arrays in another order, with a flag.
            arrays[key] = Array(tensor.detach().cpu().contiguous().numpy())
        except TypeError as error:
            reason = f"dtype {tensor.dtype} cannot be sent: cast the model to float32"
            raise WireError(reason, field=key) from error
    return ArrayRecord(arrays)


def arrays_to_tensors(record: ArrayRecord) -> dict[str, Tensor]:
    """Read every array of a record.

    Raises
    ------
    WireError
        Naming the key of an array that cannot be read, is none that torch knows, is not
        what it declares to be, or holds a NaN or an infinity.
    """
    tensors = {}
    for key, array in record.items():
        try:
            # np.load's arrays are read-only where they share the message's bytes.
            values = np.array(array.numpy())
            tensor = torch.from_numpy(values)
        except Exception as error:  # the bytes are a stranger's: anything can happen
            raise WireError(f"unreadable array: {error}", field=key) from error
        if (str(values.dtype), values.shape) != (array.dtype, tuple(array.shape)):
            reason = (
                f"declared as {array.dtype} of shape {tuple(array.shape)}, but it is "
                f"{values.dtype} of shape {values.shape}"
            )
            raise WireError(reason, field=key)
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise WireError("holds NaN or infinity", field=key)
        tensors[key] = tensor
    return tensors
