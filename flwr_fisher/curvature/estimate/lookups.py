"""A guard that stops a model before it looks anything up by integers."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LookupRefusedError(Exception):
    """An operation was about to index a tensor by integers."""


class NoLookups(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that refuses every operation with integers and floats as inputs.

    All operations that look something up have such inputs. If they are out of range on
    a GPU, they end the process.

    Examples
    --------
    >>> with NoLookups():
    ...     torch.ones(3)[torch.tensor([4])]
    Traceback (most recent call last):
        ...
    flwr_fisher.curvature.estimate.lookups.LookupRefusedError: aten.index.Tensor
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, or raise the error."""
        leaves = tree_leaves((args, kwargs or {}))
        dtypes = {x.dtype for x in leaves if isinstance(x, Tensor)} - {torch.bool}
        others = {x for x in dtypes if x.is_floating_point or x.is_complex}
        if others and dtypes - others:
            raise LookupRefusedError(str(func))
        return func(*args, **(kwargs or {}))
