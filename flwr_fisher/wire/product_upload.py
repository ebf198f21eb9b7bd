"""FedFish's smallest upload: each parameter's step times its Fisher."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.errors import WireError
from flwr_fisher.params import Params
from flwr_fisher.wire.arrays import arrays_to_tensors, tensors_to_arrays
from flwr_fisher.wire.checks import check_layout
from flwr_fisher.wire.displacement import displacements, drawn_back, norm64
from flwr_fisher.wire.payload import Payload

_PREFIX, _PRODUCT = "product/", "product"


@dataclass(frozen=True)
class ProductUpload(Payload):
    r"""What a client uploads in place of its parameters and its Fisher.

    It is as large as FedAvg's upload (FedFish, section 5.3).

    Parameters
    ----------
    products : dict[str, Tensor]
        :math:`F_i (\theta_G - \theta_i)` of the trained parameters, elementwise.
    buffers : dict[str, Tensor]
        All other tensors, unchanged.
    """

    products: dict[str, Tensor]
    buffers: dict[str, Tensor]

    def layout(self) -> tuple[str, ...]:
        """Return the trained parameters' names, which clients must share."""
        return tuple(self.products)

    def step_norms(self, like: Params) -> dict[str, float]:
        """Return how far the buffers are from those that were sent out."""
        return displacements(self.buffers, like)

    def curvature_norms(self) -> dict[str, float]:
        """Return the norm of all products: of Fishers, which have no usual size."""
        return {_PRODUCT: norm64(self.products.values())}

    def scaled(self, factors: Mapping[str, float], like: Params) -> Self:
        """Return it with shorter products, and buffers drawn back."""
        factor = factors.get(_PRODUCT, 1.0)
        products = {name: value * factor for name, value in self.products.items()}
        buffers = dict(drawn_back(self.buffers, like, factors))
        return replace(self, products=products, buffers=buffers)

    def to_arrays(self) -> ArrayRecord:
        """Return the one record that travels: products under ``product/``."""
        products = {f"{_PREFIX}{key}": value for key, value in self.products.items()}
        return tensors_to_arrays(products | self.buffers)

    @classmethod
    def from_arrays(cls, record: ArrayRecord, like: Params) -> "ProductUpload":
        """Read and check a record.

        Raises
        ------
        WireError
            Naming the key that is missing, unexpected, unreadable, of another shape or
            dtype, or not finite.
        """
        limit = 2 * sum(v.nbytes for v in like.values()) + 4096 * (len(like) + 1)
        tensors = arrays_to_tensors(record, limit=limit, most=len(like))
        keys = {key.removeprefix(_PREFIX): key for key in tensors}  # by name
        for name in like.keys() - keys.keys():
            raise WireError("missing", field=f"{_PREFIX}{name}")
        for key, tensor in tensors.items():
            name = key.removeprefix(_PREFIX)
            if name not in like or keys[name] != key:
                raise WireError("unexpected key", field=key)
            check_layout(key, tensor, like[name].shape, like[name].dtype)
        products = {k: tensors[keys[k]] for k in like if keys[k] != k}
        buffers = {k: tensors[k] for k in like if k not in products}
        for key, value in products.items():
            if not value.is_floating_point():
                raise WireError(f"dtype {value.dtype}", field=f"{_PREFIX}{key}")
        if not products:
            raise WireError("no product arrived", field=_PREFIX)
        return cls(products, buffers)
