"""A client's upload of trained parameters and second moments of its layers' inputs.

Keys and shapes are those of K-FAC (:mod:`flwr_fisher.wire.layout`), but only
``curvature/kfac/<weight>/A``, without ``…/G``. The server solves with each client's own
matrices, so a sum is not enough. Each must have its layer's shape, and be symmetric and
positive semi-definite; :class:`~flwr_fisher.wire.Additive` has no such checks.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.curvature import InputCovariance
from flwr_fisher.errors import WireError
from flwr_fisher.params import Params, bias_of
from flwr_fisher.wire.arrays import (
    check_count,
    check_layout,
    check_same_keys,
    check_second_moment,
    read_with_model,
    tensors_to_arrays,
)
from flwr_fisher.wire.layout import PREFIX, Part, check_shape, parse_key
from flwr_fisher.wire.schema import Payload, displacements, drawn_back

_START, _END = f"{PREFIX}kfac/", "/A"


@dataclass(frozen=True)
class CovarianceUpload(Payload):
    """A client's trained parameters and the second moments of its layers' inputs.

    Parameters
    ----------
    params : dict[str, Tensor]
        Parameters and buffers, under their own keys.
    covariances : dict[str, InputCovariance]
        Second moments by the weights' names; those of a 16-bit layer are in float32.
    """

    params: dict[str, Tensor]
    covariances: dict[str, InputCovariance]

    def layout(self) -> tuple[str, ...]:
        """Return the layers and their inputs' shapes, equal for all clients."""
        return tuple(
            f"{_START}{name}{_END} {tuple(layer.A.shape)}"
            for name, layer in self.covariances.items()
        )

    def step_norms(self, like: Params) -> dict[str, float]:
        """Return the distance of the parameters from those sent out."""
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
        """Return it with a smaller step, and second moments scaled down."""
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
            The received record.
        like : Mapping[str, Tensor]
            The parameters that the server sent. Keys, shapes and dtypes must be the
            same.

        Raises
        ------
        WireError
            It names the key that is missing, unexpected or unreadable, has another
            shape or dtype, is not finite, is not symmetric, or is negative on the
            diagonal.
        """
        check_count(record, 2 * len(like))
        check_same_keys([k for k in record if not k.startswith(PREFIX)], like)
        params, factors = read_with_model(record, like, partial(_check, like))
        if not factors:
            raise WireError("has no second moment of inputs", field=PREFIX)
        for key, matrix in factors.items():
            weight = like[key.removeprefix(_START).removesuffix(_END)]
            dtype = torch.promote_types(weight.dtype, torch.float32)
            check_layout(key, matrix, matrix.shape, dtype)
            check_second_moment(key, matrix)
        return cls(params, dict(_covariances(factors, like)))


def _check(like: Params, key: str, shape: torch.Size) -> None:
    """Check a key beside the model's, and the shape that its array announces."""
    if parse_key(key, like)[0] != Part.FACTOR or not key.endswith(_END):
        reason = "the server requested only the inputs' factors of K-FAC"
        raise WireError(reason, field=key)
    # all of its entries arrive, for any number of rows
    check_shape(key, shape, like, most=math.inf)


def _covariances(
    tensors: Params, like: Params
) -> Iterator[tuple[str, InputCovariance]]:
    """Yield the layers by their weights' names, in the order of `like`."""
    for name, weight in like.items():
        if (A := tensors.get(f"{_START}{name}{_END}")) is not None:
            with_bias = A.shape[-1] > weight.shape[1:].numel()
            bias = bias_of(name, like) if with_bias else None
            yield name, InputCovariance(name, bias, A)
