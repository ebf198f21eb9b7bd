"""The upload of a client that trained: its parameters and what its layers are fed.

Keys and shapes are those of K-FAC (:mod:`flwr_fisher.wire.layout`), of which this is
half: ``curvature/kfac/<weight>/A``, and no ``…/G``. No sum will do for them, each
client's being solved with; and each must be of its layer's shape, symmetric and
positive semi-definite, which :class:`~flwr_fisher.wire.Additive` asks of nothing.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from flwr_fisher.curvature import InputCovariance
from flwr_fisher.errors import WireError
from flwr_fisher.params import Params
from flwr_fisher.wire.arrays import (
    announced_shape,
    arrays_to_tensors,
    check_count,
    tensors_to_arrays,
)
from flwr_fisher.wire.checks import check_layout, check_second_moment
from flwr_fisher.wire.displacement import displacements, drawn_back
from flwr_fisher.wire.layout import PREFIX, Part, bias_of, check_shape, parse_key
from flwr_fisher.wire.payload import Payload

_START, _END = f"{PREFIX}kfac/", "/A"


@dataclass(frozen=True)
class CovarianceUpload(Payload):
    """A client's trained parameters, and the second moments of its layers' inputs.

    Parameters
    ----------
    params : dict[str, Tensor]
        Parameters and buffers, under their own keys.
    covariances : dict[str, InputCovariance]
        By the weights' names; those of a 16-bit layer are in float32.
    """

    params: dict[str, Tensor]
    covariances: dict[str, InputCovariance]

    def layout(self) -> tuple[str, ...]:
        """Return the layers and their inputs' shapes, which clients must share."""
        return tuple(
            f"{_START}{name}{_END} {tuple(layer.A.shape)}"
            for name, layer in self.covariances.items()
        )

    def step_norms(self, like: Params) -> dict[str, float]:
        """Return how far the parameters are from those that were sent out."""
        return displacements(self.params, like)

    def curvature_norms(self) -> dict[str, float]:
        """Return the second moments' traces, layer by layer."""
        return {
            f"inputs of {name}": float(
                layer.A.diagonal(dim1=-2, dim2=-1).double().sum()
            )
            for name, layer in self.covariances.items()
        }

    def scaled(self, factors: Mapping[str, float], like: Params) -> Self:
        """Return it with parameters drawn back, and second moments scaled down."""
        covariances = {
            name: replace(layer, A=layer.A * factors.get(f"inputs of {name}", 1.0))
            for name, layer in self.covariances.items()
        }
        params = dict(drawn_back(self.params, like, factors))
        return replace(self, params=params, covariances=covariances)

    def to_arrays(self) -> ArrayRecord:
        """Return the one record that travels; it is lossless."""
        matrices = {f"{_START}{k}{_END}": v.A for k, v in self.covariances.items()}
        return tensors_to_arrays({**self.params, **matrices})

    @classmethod
    def from_arrays(cls, record: ArrayRecord, like: Params) -> "CovarianceUpload":
        """Read and check a record, none of which is trusted.

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
            dtype, not finite, not symmetric or negative on the diagonal.
        """
        check_count(record, 2 * len(like))
        for key, array in record.items():  # before anything is allocated
            _check_announced(key, array, like)
        if missing := like.keys() - record.keys():
            raise WireError("missing", field=min(missing))
        tensors = arrays_to_tensors(record)  # of no other shapes than announced
        for key, tensor in tensors.items():
            _check_values(key, tensor, like)
        found = dict(_covariances(tensors, like))
        if not found:
            raise WireError("no inputs' second moment arrived", field=PREFIX)
        return cls({key: tensors[key] for key in like}, found)


def _check_announced(key: str, array: Array, like: Params) -> None:
    """Check a key, and the shape that its array is said to have."""
    shape = announced_shape(key, array)
    if key in like:
        if shape != like[key].shape:
            reason = f"shape {tuple(shape)}, expected {tuple(like[key].shape)}"
            raise WireError(reason, field=key)
    elif not key.startswith(PREFIX):
        raise WireError("unexpected key", field=key)
    elif parse_key(key, like)[0] != Part.FACTOR or not key.endswith(_END):
        raise WireError("only the inputs' factors of K-FAC were asked for", field=key)
    else:
        # All of its entries arrive, however many rows it has.
        check_shape(key, shape, like, most=math.inf)


def _check_values(key: str, tensor: Tensor, like: Params) -> None:
    if key in like:
        check_layout(key, tensor, like[key].shape, like[key].dtype)
        return
    weight = like[key.removeprefix(_START).removesuffix(_END)]
    dtype = torch.promote_types(weight.dtype, torch.float32)
    check_layout(key, tensor, tensor.shape, dtype)
    check_second_moment(key, tensor)


def _covariances(
    tensors: Params, like: Params
) -> Iterator[tuple[str, InputCovariance]]:
    """Yield the layers by their weights' names, in the order of `like`."""
    for name, weight in like.items():
        if (A := tensors.get(f"{_START}{name}{_END}")) is not None:
            with_bias = A.shape[-1] > weight.shape[1:].numel()
            bias = bias_of(name, like) if with_bias else None
            yield name, InputCovariance(name, bias, A)
