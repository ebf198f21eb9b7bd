"""Uploads of vectors over a model's parameters, each vector with a name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Self

from flwr.app import ArrayRecord
from torch import Tensor

from flwr_fisher.errors import WireError
from flwr_fisher.params import Params
from flwr_fisher.wire.arrays import arrays_to_tensors, tensors_to_arrays
from flwr_fisher.wire.checks import check_layout
from flwr_fisher.wire.displacement import displacements, drawn_back, norm64
from flwr_fisher.wire.payload import Payload

_SLACK = 4096  # bytes that one array's headers may take


@dataclass(frozen=True)
class VectorUpload(Payload):
    """What a client computed, as vectors over its trained parameters.

    Parameters
    ----------
    vectors : dict[str, dict[str, Tensor]]
        Vectors by name: ``gradient``, ``hvp``, a control variate's change, …; all over
        the same parameters. They travel under ``<name>/<parameter>``.
    params : dict[str, Tensor]
        If the client trained, its parameters and buffers, under their own keys.
    """

    disagreement: ClassVar[tuple[str, str]] = (
        "vectors",
        "covers other parameters than most clients' does",
    )

    vectors: dict[str, dict[str, Tensor]]
    params: dict[str, Tensor] = field(default_factory=dict)

    def layout(self) -> tuple[str, ...]:
        """Return the vectors' names and parameters, which clients must share."""
        return tuple(f"{k}/{p}" for k, vector in self.vectors.items() for p in vector)

    def step_norms(self, like: Params) -> dict[str, float]:
        """Return the vectors' norms, and the parameters' distance from those sent."""
        norms = {name: norm64(vector.values()) for name, vector in self.vectors.items()}
        return norms | displacements(self.params, like)

    def scaled(self, factors: Mapping[str, float], like: Params) -> Self:
        """Return it with shorter vectors, and parameters drawn back."""
        vectors = {
            name: {k: v * factors.get(name, 1.0) for k, v in vector.items()}
            for name, vector in self.vectors.items()
        }
        params = dict(drawn_back(self.params, like, factors))
        return replace(self, vectors=vectors, params=params)

    def to_arrays(self) -> ArrayRecord:
        """Return the one record that travels; it is lossless."""
        return tensors_to_arrays({**self.params, **self.named()})

    def named(self) -> dict[str, Tensor]:
        """Return the vectors' tensors, by the keys under which they travel."""
        return {
            f"{name}/{key}": value
            for name, vector in self.vectors.items()
            for key, value in vector.items()
        }

    @classmethod
    def reader(cls, *names: str, params: bool = False) -> "partial[VectorUpload]":
        """Return the function that reads an upload of these vectors.

        It expects parameters and buffers as well if `params` is True.
        """
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
        times = len(names) + with_params
        tensors = arrays_to_tensors(
            record, limit=(times + 1) * room, most=times * len(like)
        )
        vectors: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        params: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            name, _, parameter = key.partition("/")
            if with_params and key in like:
                check_layout(key, tensor, like[key].shape, like[key].dtype)
                params[key] = tensor
            elif name in vectors and parameter in like:
                expected = like[parameter]
                check_layout(key, tensor, expected.shape, expected.dtype)
                if not tensor.is_floating_point():
                    raise WireError(f"dtype {tensor.dtype}", field=key)
                vectors[name][parameter] = tensor
            else:
                raise WireError("unexpected key", field=key)
        if with_params and (missing := like.keys() - params.keys()):
            raise WireError("missing", field=min(missing))
        return cls(_aligned(vectors, like), {k: params[k] for k in like if k in params})


def _aligned(
    vectors: dict[str, dict[str, Tensor]], like: Params
) -> dict[str, dict[str, Tensor]]:
    """Return the vectors in the order of `like`; all must cover the same parameters."""
    covered = {key for vector in vectors.values() for key in vector}
    if vectors and not covered:
        raise WireError("no vector arrived", field=next(iter(vectors)))
    for name, vector in vectors.items():
        if missing := covered - vector.keys():
            raise WireError("missing", field=f"{name}/{min(missing)}")
    order = [key for key in like if key in covered]
    return {name: {key: v[key] for key in order} for name, v in vectors.items()}
