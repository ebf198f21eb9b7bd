"""``Request``, a server's message to a job, and ``Reply``, the job's answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message
from torch import Tensor

from flwr_fisher.client.limits import whole_number
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.errors import ClientError, ParamsError
from flwr_fisher.params import Params, check_same_layout
from flwr_fisher.randomness import derive_seed
from flwr_fisher.wire import NUM_EXAMPLES, arrays_to_tensors, split_config, split_groups


@dataclass(frozen=True)
class Request:
    """A server's message, read and checked.

    Parameters
    ----------
    params : dict[str, Tensor]
        The parameters and buffers, on the model's device.
    groups : dict[str, dict[str, Tensor]]
        Other tensors that the server sent, by the name of their group.
    options : Mapping[str, Any]
        The server's options; the prefix ``fisher.`` is removed from their keys.
    config : Mapping[str, Any]
        The other entries of the message's ``ConfigRecord``: the user's, for the
        training loop.
    seed : int
        The seed of all random numbers, a function of the run's seed, the round and the
        client.
    client : int
        The client's number: its partition, which is the same in every run, or its
        node's id.
    server_round : int
        The round.
    num_examples : int
        The number of the client's training examples, if the request is to train; 0 if
        they are counted after it.
    """

    params: dict[str, Tensor]
    groups: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    client: int = 0
    server_round: int = 0
    num_examples: int = 0

    @classmethod
    def of(
        cls,
        message: Message,
        context: Context,
        device: torch.device,
        *,
        most_arrays: int | None = None,
    ) -> "Request":
        """Return the request in a message.

        Raises
        ------
        ClientError
            If it has not exactly one ``ArrayRecord``, or if that has more than
            `most_arrays` arrays. It is raised before any array is read.
        ConfigurationError
            If its seed or round is no integer.
        """
        (options, config), client = config_of(message), partition_of(context)
        record = arrays_of(message)
        if most_arrays is not None and len(record) > most_arrays:
            raise ClientError(
                f"the server sent {len(record)} arrays, but at most {most_arrays} are "
                "possible for this client's model: build the same model on both sides"
            )
        tensors = arrays_to_tensors(record)
        params, groups = split_groups({k: v.to(device) for k, v in tensors.items()})
        server_round = whole_number(config, "server-round", 0)
        seed = derive_seed(whole_number(options, "seed", 0), server_round, client)
        return cls(params, groups, options, config, seed, client, server_round)

    @property
    def from_library(self) -> bool:
        """Whether this library's server sent it, and not Flower's FedAvg."""
        return bool(self.options.keys() & {"structure", "job"})

    def weight(self, metrics: Mapping[str, Any], problem: LocalProblem) -> float:
        """Return the client's weight: its loop's, or its number of examples.

        Raises
        ------
        ClientError
            If the loop's number is not positive.
        """
        weight = metrics.get(NUM_EXAMPLES)
        if weight is None:
            weight = self.num_examples or problem.count_examples(self.client)
        if isinstance(weight, int | float) and 0 < weight < float("inf"):
            return weight
        raise ClientError(
            f"train_fn returned {NUM_EXAMPLES!r}: {weight!r:.80}, but a client's "
            "weight must be a positive number"
        )

    @property
    def facts(self) -> dict[str, Tensor]:
        """The tensors of group ``""``, such as a run's number or a learning rate."""
        return self.groups.get("", {})

    def fact(self, name: str, shape: tuple[int, ...] = ()) -> Tensor:
        """Return real numbers of group ``""``.

        Raises
        ------
        ClientError
            If they are missing, have another shape, or are integers.
        """
        fact = self.facts.get(name)
        if fact is None or fact.shape != shape or not fact.is_floating_point():
            raise _not_as_expected(name, fact, f"real numbers of shape {shape}")
        return fact

    def count(self, name: str) -> int:
        """Return an integer >= 0 of group ``""``.

        Raises
        ------
        ClientError
            If it is missing, or not such an integer.
        """
        fact = self.facts.get(name)
        if fact is None or fact.dim() or fact.is_floating_point() or fact < 0:
            raise _not_as_expected(name, fact, "an integer >= 0")
        return int(fact)

    def vector(self, name: str, like: Params) -> dict[str, Tensor]:
        """Return a vector of the server over the trained parameters.

        Parameters
        ----------
        name : str
            The name of the vector's group.
        like : Mapping[str, Tensor]
            The trained parameters; the result has their order and dtypes.

        Raises
        ------
        ClientError
            If it is missing, or does not fit.
        """
        sent = self.groups.get(name)
        if not sent:
            raise ClientError(
                f"the server sent no '{name}', which this job needs: install the same "
                "flwr-fisher on both sides"
            )
        try:
            check_same_layout(like, sent, f"the '{name}' that the server sent")
        except ParamsError as error:
            raise ClientError(
                f"{error}: train the same parameters on every client, in every round"
            ) from error
        return {k: sent[k].to(p.dtype) for k, p in like.items()}


def _not_as_expected(name: str, fact: Tensor | None, expected: str) -> ClientError:
    sent = "nothing" if fact is None else f"{fact.dtype} of shape {tuple(fact.shape)}"
    if fact is not None and not fact.dim():
        sent = f"{fact.item()}"
    return ClientError(
        f"the server sent {sent} for '{name}', expected {expected}: install the same "
        "flwr-fisher on both sides, or, in a method of your own, give the Exchange a "
        "`send` that returns Membership.sent() in group ''"
    )


@dataclass(frozen=True)
class Reply:
    """A job's answer.

    Parameters
    ----------
    metrics : Mapping[str, float]
        Numbers by name; ``num-examples`` is added.
    arrays : ArrayRecord, optional
        The one record that is uploaded: a payload's ``to_arrays()``.
    """

    metrics: Mapping[str, float]
    arrays: ArrayRecord | None = None


def config_of(message: Message) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a message's ``ConfigRecord`` into the server's options and all else."""
    records = message.content.config_records.values()
    return split_config({k: v for record in records for k, v in record.items()})


def arrays_of(message: Message) -> ArrayRecord:
    """Return a request's one ``ArrayRecord``, or raise :class:`ClientError`."""
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise ClientError(
            f"the server must send one ArrayRecord, but it sent {len(records)}"
        )
    return records[0]


def partition_of(context: Context) -> int:
    """Return a client's identity in all runs: its partition, or its node.

    Raises
    ------
    ClientError
        If its ``partition-id`` is no integer.
    """
    number = context.node_config.get("partition-id", context.node_id)
    try:
        if isinstance(number, float) and not number.is_integer():
            raise ValueError
        if (partition := int(number)) < 0:
            raise ValueError
    except ValueError:
        raise ClientError(
            f"the node's partition-id must be an integer, 0 or more, got "
            f"{number!r:.80}: start the node with --node-config 'partition-id=0', for "
            "example, or without one"
        ) from None
    return partition
