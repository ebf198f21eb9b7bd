"""What a client adds to a secure sum: its reply's numbers, and their weight."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import Message
from torch import Tensor

from flwr_fisher.errors import ClientError
from flwr_fisher.log_lines import logger
from flwr_fisher.params import Params, clipped
from flwr_fisher.secure.fixed_point import FixedPoint, Words, exponents_of
from flwr_fisher.secure.payload import Layout, is_description
from flwr_fisher.server.privacy import exponent_for, with_noise
from flwr_fisher.wire import arrays_to_tensors

NUM_EXAMPLES = "num-examples"  # the weight, among what is summed


@dataclass(frozen=True)
class Contribution:
    """A reply's tensors, of which all but descriptions are summed.

    Parameters
    ----------
    tensors : dict[str, Tensor]
        The reply's.
    weight : float, optional
        What they are multiplied by; it is summed, too. None: they are as they are.
    bound : int, optional
        An exponent that holds for any client's, and so tells nothing of this one.
    """

    tensors: dict[str, Tensor]
    weight: float | None = None
    bound: int | None = None

    @classmethod
    def of(cls, reply: Message, weighted_by: str, weighted: bool) -> "Contribution":
        """Take what a reply holds; its metrics go nowhere but into the log.

        Raises
        ------
        ClientError
            If it has not one ``ArrayRecord``, or an array that cannot be summed, or no
            weight where one is needed.
        """
        records = list(reply.content.array_records.values())
        if len(records) != 1:
            raise ClientError(f"a sum of replies of {len(records)} ArrayRecords")
        tensors = arrays_to_tensors(records[0])
        for name, value in tensors.items():
            if value.dtype == torch.uint8 and not is_description(name, value):
                raise ClientError(
                    f"'{name}' is packed, and packed uploads cannot be summed: the "
                    "strategy must ask for codec='lossless'"
                )
        metrics = {
            name: value
            for record in reply.content.metric_records.values()
            for name, value in record.items()
        }
        if hidden := sorted(metrics.keys() - {weighted_by, NUM_EXAMPLES}):
            logger.info("Not sent with a secure sum: %s", ", ".join(hidden))
        if not weighted:
            return cls(tensors)
        weight = metrics.get(weighted_by)
        if not isinstance(weight, int | float) or not weight > 0:
            raise ClientError(f"the reply's metrics have no positive '{weighted_by}'")
        return cls(tensors, float(weight))

    def bounded(self, sent: Params, norm: float, deviation: float) -> "Contribution":
        """Return what it adds to what was sent, clipped and with noise, of weight 1.

        Parameters
        ----------
        sent : Mapping[str, Tensor]
            Subtracted from the tensors that have these names. Integers stay as sent.
        norm : float
            The largest Euclidean norm that all of it together may have.
        deviation : float
            The noise's standard deviation.

        Raises
        ------
        ParamsError
            If it is not finite.
        """
        floats = {
            name: value.double() - sent[name].double() if name in sent else value
            for name, value in self.tensors.items()
            if value.is_floating_point()
        }
        noised = with_noise(clipped(floats, norm), deviation)
        tensors = {
            name: noised[name].to(value.dtype)
            if name in noised
            else (value if value.dtype == torch.uint8 else torch.zeros_like(value))
            for name, value in self.tensors.items()
        }
        return Contribution(tensors, 1.0, exponent_for(norm, deviation))

    def entries(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is summed: float64, weighted."""
        for name, value in self.tensors.items():
            if value.dtype != torch.uint8:
                yield (
                    name,
                    value.double() * (1.0 if self.weight is None else self.weight),
                )
        if self.weight is not None:
            yield NUM_EXAMPLES, torch.tensor(self.weight, dtype=torch.float64)

    def descriptions(self) -> dict[str, Tensor]:
        """Return what is sent as it is, and must be all clients' alike."""
        return {k: v for k, v in self.tensors.items() if v.dtype == torch.uint8}

    def layout(self) -> Layout:
        """Return keys, dtypes and shapes of the entries."""
        rows: Layout = [
            (name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
            for name, value in self.tensors.items()
            if value.dtype != torch.uint8
        ]
        return rows if self.weight is None else [*rows, (NUM_EXAMPLES, "float64", ())]

    def exponents(self) -> list[int]:
        """Return each entry's exponent."""
        return [
            exponents_of({name: value})[0]
            if self.bound is None or name == NUM_EXAMPLES
            else self.bound
            for name, value in self.entries()
        ]

    def words(self, fixed: FixedPoint, exponents: Sequence[int]) -> Words:
        """Return all entries as residues.

        Raises
        ------
        ClientError
            Naming an entry that is larger than the sum has room for.
        """
        parts: list[Words] = []
        for (name, value), exponent in zip(self.entries(), exponents, strict=True):
            if (own := exponents_of({name: value})[0]) > exponent:
                raise ClientError(
                    f"'{name}' is up to 2^{own} here, and the sum has room up to "
                    f"2^{exponent}: it would not stay within its residues"
                )
            parts.append(fixed.words(value, exponent))
        return np.concatenate(parts)
