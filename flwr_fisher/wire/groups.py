"""Vectors over a model's parameters, several of them, each under a name of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.errors import WireError
from flwr_fisher.params import Params
from flwr_fisher.wire.arrays import arrays_to_tensors, tensors_to_arrays

__all__ = ["SERVER", "VectorUpload", "server_vectors"]

SERVER = "server/"
_SLACK = 4096  # bytes of headers an array


@dataclass(frozen=True)
class VectorUpload:
    """What a client computed, as vectors over its trained parameters.

    Parameters
    ----------
    vectors : dict[str, dict[str, Tensor]]
        By name: ``gradient``, ``hvp``, a control variate's change, …; all over the same
        parameters. They travel under ``<name>/<parameter>``.
    params : dict[str, Tensor]
        The parameters and buffers, under their own keys, where the client trained.
    """

    vectors: dict[str, dict[str, Tensor]]
    params: dict[str, Tensor] = field(default_factory=dict)

    def layout(self) -> tuple[str, ...]:
        """Return what clients must have in common: the parameters of the vectors."""
        return tuple(f"{k}/{p}" for k, vector in self.vectors.items() for p in vector)

    def only(self, names: Params) -> "VectorUpload":
        """Return it without the parameters that are not among the names."""
        return replace(
            self, params={k: v for k, v in self.params.items() if k in names}
        )

    def to_arrays(self) -> ArrayRecord:
        """Return the one record that travels; it is lossless."""
        named = {
            f"{name}/{key}": value
            for name, vector in self.vectors.items()
            for key, value in vector.items()
        }
        return tensors_to_arrays({**self.params, **named})

    @classmethod
    def reader(cls, *names: str, params: bool = False) -> "partial[VectorUpload]":
        """Return what reads an upload of these vectors, with parameters or without."""
        return partial(cls.from_arrays, names=names, with_params=params)

    @classmethod
    def from_arrays(
        cls,
        record: ArrayRecord,
        like: Params,
        *,
        names: Sequence[str],
        with_params: bool,
    ) -> "VectorUpload":
        """Read and check a record.

        Parameters
        ----------
        record : ArrayRecord
            What arrived.
        like : Mapping[str, Tensor]
            The parameters that were sent out.
        names : Sequence[str]
            The vectors' names.
        with_params : bool
            Whether parameters and buffers are expected as well.

        Raises
        ------
        WireError
            Naming the key that is missing, unexpected, unreadable, of another shape or
            dtype, or not finite.
        """
        room = sum(v.nbytes + _SLACK for v in like.values())
        tensors = arrays_to_tensors(record, limit=(len(names) + with_params + 1) * room)
        vectors: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        params: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            group, _, parameter = key.partition("/")
            if with_params and key in like:
                _check(key, tensor, like[key])
                params[key] = tensor
            elif group in vectors and parameter in like:
                _check(key, tensor, like[parameter])
                if not tensor.is_floating_point():
                    raise WireError(f"dtype {tensor.dtype}", field=key)
                vectors[group][parameter] = tensor
            else:
                raise WireError("unexpected key", field=key)
        if with_params and (missing := like.keys() - params.keys()):
            raise WireError("missing", field=min(missing))
        return cls(_aligned(vectors, like), {k: params[k] for k in like if k in params})


def server_vectors(tensors: Params) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Part a request's tensors into parameters, and what is sent beside them."""
    beside = {k: v for k, v in tensors.items() if k.startswith(SERVER)}
    params = {k: v for k, v in tensors.items() if k not in beside}
    return params, {k.removeprefix(SERVER): v for k, v in beside.items()}


def _aligned(
    vectors: dict[str, dict[str, Tensor]], like: Params
) -> dict[str, dict[str, Tensor]]:
    """Return the vectors in the parameters' order; they must cover the same."""
    covered = {key for vector in vectors.values() for key in vector}
    if vectors and not covered:
        raise WireError("no vector arrived", field=next(iter(vectors)))
    for name, vector in vectors.items():
        if missing := covered - vector.keys():
            raise WireError("missing", field=f"{name}/{min(missing)}")
    order = [key for key in like if key in covered]
    return {name: {key: v[key] for key in order} for name, v in vectors.items()}


def _check(key: str, tensor: Tensor, wanted: Tensor) -> None:
    if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
        reason = f"{tensor.dtype} of shape {tuple(tensor.shape)}, expected "
        reason += f"{wanted.dtype} of shape {tuple(wanted.shape)}"
        raise WireError(reason, field=key)
