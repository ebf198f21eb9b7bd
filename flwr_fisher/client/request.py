"""``Request``, a server's message to a job; ``Reply``, the answer; ``ClientLimits``."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message
from torch import Tensor

from flwr_fisher.errors import ClientError, check_range, check_whole
from flwr_fisher.options import Options, option
from flwr_fisher.params import Params, check_same_layout
from flwr_fisher.randomness import derive_seed
from flwr_fisher.wire import arrays_to_tensors, split_groups
from flwr_fisher.wire.options import OPTION, split_config

_SAME_VERSION = "install the same flwr-fisher on server and clients"


class ClientLimits(Options):
    """The limits on a client's work for one request.

    All other work is limited by the client's data and by the epochs of its own
    `train_fn`.

    Examples
    --------
    >>> ClientLimits(max_steps=100).steps({"local-steps": 5000}, "local-steps", 500)
    Traceback (most recent call last):
    flwr_fisher.errors.ClientError: the server requests fisher.local-steps=5000, but ...
    """

    max_examples: int | None = option(
        None,
        "From how many examples a client computes a Fisher. Default: as many as the "
        "server requests.",
        low=1,
    )
    max_steps: int = option(
        1000,
        "Steps of TCT (500 in its paper), or products with a Hessian, each of which "
        "takes a pass over the client's data.",
        low=1,
    )

    def examples(self, requested: int | None) -> int | None:
        """Return the number of examples of a Fisher, or None for all."""
        both = (requested, self.max_examples)
        return min((most for most in both if most is not None), default=None)

    def steps(self, options: Mapping[str, Any], name: str, default: int) -> int:
        """Return an option that is a number of steps.

        Raises
        ------
        ClientError
            If there are more than `max_steps`.
        ConfigurationError
            If it is no integer, or below 1.
        """
        value = whole_number(options, name, default)
        check_range(name, value, 1)
        if value > self.max_steps:
            raise ClientError(
                f"the server requests {OPTION}{name}={value}, but this client's limit "
                f"is {self.max_steps}: FisherClient(limits=ClientLimits(max_steps="
                f"{value}))"
            )
        return value


def whole_number(options: Mapping[str, Any], name: str, default: int) -> int:
    """Return an option of the server, after a check that it is an integer."""
    value = options.get(name, default)
    check_whole(name, value)
    return int(value)


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
    """

    params: dict[str, Tensor]
    groups: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    client: int = 0
    server_round: int = 0

    @classmethod
    def of(cls, message: Message, context: Context, device: torch.device) -> "Request":
        """Return the request in a message.

        Raises
        ------
        ClientError
            If it has not exactly one ``ArrayRecord``.
        ConfigurationError
            If its seed or round is no integer.
        """
        (options, config), client = config_of(message), partition_of(context)
        tensors = arrays_to_tensors(arrays_of(message))
        params, groups = split_groups({k: v.to(device) for k, v in tensors.items()})
        server_round = whole_number(config, "server-round", 0)
        seed = derive_seed(whole_number(options, "seed", 0), server_round, client)
        return cls(params, groups, options, config, seed, client, server_round)

    @property
    def from_library(self) -> bool:
        """Whether this library's server sent it, and not Flower's FedAvg."""
        return bool(self.options.keys() & {"structure", "job"})

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
            raise _unlike(name, fact, f"real numbers of shape {shape}")
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
            raise _unlike(name, fact, "an integer >= 0")
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
            If it is missing.
        ParamsError
            If it is over other parameters.
        """
        if not (sent := self.groups.get(name)):
            raise ClientError(f"the server sent no '{name}': {_SAME_VERSION}")
        check_same_layout(like, sent, f"the '{name}' that the server sent")
        return {k: sent[k].to(p.dtype) for k, p in like.items()}


def _unlike(name: str, fact: Tensor | None, expected: str) -> ClientError:
    sent = "nothing" if fact is None else f"{fact!r:.80}"
    return ClientError(
        f"the server sent {sent} for '{name}', expected {expected}: {_SAME_VERSION}; "
        "an Exchange of your own must `send` what Membership.sent() returns"
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
            f"a message must have one ArrayRecord, but this one has {len(records)}"
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
    with suppress(ValueError, OverflowError):
        whole = int(number)
        if whole >= 0 and (whole == number or not isinstance(number, float)):
            return whole
    raise ClientError(
        f"the node's partition-id must be an integer, 0 or more, got {number!r:.80}: "
        "start it with --node-config 'partition-id=0', for example"
    )
