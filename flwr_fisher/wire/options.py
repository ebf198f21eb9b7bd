"""The keys of a request: the server's options, and its tensors beside the parameters.

Among these tensors is the roster of clients that took part, with the last step of each.

The server's options are in the ``ConfigRecord``. They begin with ``fisher.``, so that a
user's own ``seed``, ``task`` or ``structure`` stays the user's. ``server-round`` is
Flower's, and is not changed.

The tensor `name` of the group `group` has the key ``server/<group>/<name>``, or
``server/<name>`` if the group is ``""``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from flwr_fisher.errors import WireError
from flwr_fisher.params import Params
from flwr_fisher.wire.arrays import numbers_to_tensor, tensor_to_numbers

OPTION = "fisher."
SERVER = "server/"
LIBRARY = "flwr-fisher"  # the key of a client's version in its answer
NUM_EXAMPLES = "num-examples"  # Flower's metric, by which clients are weighted
# A server refuses replies with more metrics, longer names, or more numbers in lists.
MOST_METRICS, LONGEST_NAME, MOST_NUMBERS = 1000, 200, 100_000
REGRESSION = "regression"  # a metric of clients with a Gaussian likelihood
_CLIENTS, _WEIGHTS, _PARTS = "clients", "client-weights", "client-parts"

Value = TypeVar("Value")
# the values of a ConfigRecord, which flwr.app names since 1.31
_Scalar = int | float | str | bytes | bool
ConfigValue = _Scalar | list[int] | list[float] | list[str] | list[bytes] | list[bool]


def named_options(options: Mapping[str, Value]) -> dict[str, Value]:
    """Return a server's options under their keys in the config.

    Examples
    --------
    >>> named_options({"structure": "kfac"})
    {'fisher.structure': 'kfac'}
    """
    return {f"{OPTION}{name}": value for name, value in options.items()}


def split_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a config into the server's options and the user's own entries.

    Examples
    --------
    >>> split_config({"fisher.structure": "kfac", "structure": "mine", "lr": 0.1})
    ({'structure': 'kfac'}, {'structure': 'mine', 'lr': 0.1})
    """
    options = {
        key.removeprefix(OPTION): value
        for key, value in config.items()
        if key.startswith(OPTION)
    }
    return options, {k: v for k, v in config.items() if not k.startswith(OPTION)}


def join_groups(
    groups: Mapping[str, Params], prefix: str = SERVER
) -> dict[str, Tensor]:
    """Return all groups' tensors by their keys in a request.

    Parameters
    ----------
    groups : Mapping[str, Mapping[str, Tensor]]
        Tensors by group and name. No group's name has a ``/``, nor does a name in the
        group ``""``. An empty group has no key.
    prefix : str, default "server/"
        The beginning of all keys.

    Examples
    --------
    >>> import torch
    >>> run, weight = torch.tensor(7), torch.ones(2)
    >>> list(join_groups({"": {"run": run}, "probe": {"fc.weight": weight}}))
    ['server/run', 'server/probe/fc.weight']
    """
    return {
        f"{prefix}{group}/{name}" if group else f"{prefix}{name}": tensor
        for group, tensors in groups.items()
        for name, tensor in tensors.items()
    }


def split_groups(
    tensors: Params, prefix: str = SERVER
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Split a request's tensors into the parameters and the groups beside them.

    The groups are those that :func:`join_groups` joined, in the order in which they
    first appear. All keys without the prefix belong to parameters.
    """
    params: dict[str, Tensor] = {}
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if not key.startswith(prefix):
            params[key] = tensor
            continue
        group, slash, name = key.removeprefix(prefix).partition("/")
        if not slash:
            group, name = "", group
        groups.setdefault(group, {})[name] = tensor
    return params, groups


# --- who took part


@dataclass(frozen=True)
class Roster:
    """The clients with accepted uploads, by partition or node id.

    A client with a state of its own continues from the last step to which it
    contributed. It cannot know that step by itself, because its reply may have been
    lost, or left out by the server.

    Parameters
    ----------
    steps : Mapping[int, int]
        The last step to which each client contributed.
    weights : Mapping[int, float]
        Each client's weight in that step. Weights are not sent to clients.
    parts : Mapping[int, float]
        For each client of whose change the server used only a part in that step: this
        part. The policy cut the rest.

    Examples
    --------
    >>> roster = Roster().after(1, {3: 20.0, 5: 30.0})
    >>> Roster.from_tensors(roster.sent()).steps
    {3: 1, 5: 1}
    """

    steps: Mapping[int, int] = field(default_factory=dict)
    weights: Mapping[int, float] = field(default_factory=dict)
    parts: Mapping[int, float] = field(default_factory=dict)

    def after(
        self,
        step: int,
        weights: Mapping[int, float],
        parts: Mapping[int, float] | None = None,
    ) -> "Roster":
        """Return the roster after a step, given its clients' weights by number.

        A client's number is its partition, or its node's id. `parts` has only the parts
        below 1.
        """
        steps = {**self.steps, **dict.fromkeys(weights, step)}
        before = {n: p for n, p in self.parts.items() if n not in weights}
        return Roster(steps, {**self.weights, **weights}, before | dict(parts or {}))

    def sent(self) -> dict[str, Tensor]:
        """Return the tensors to send to clients: each one's last step, and parts."""
        if not self.steps:
            return {}
        steps = torch.tensor(list(self.steps.values()))
        sent = {_CLIENTS: torch.stack([numbers_to_tensor(self.steps), steps], 1)}
        if self.parts:
            parts = [self.parts.get(number, 1.0) for number in self.steps]
            sent[_PARTS] = torch.tensor(parts, dtype=torch.float64)
        return sent

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the whole roster as tensors, for a checkpoint."""
        if not self.steps:
            return {}
        weights = [self.weights[number] for number in self.steps]
        return self.sent() | {_WEIGHTS: torch.tensor(weights, dtype=torch.float64)}

    @classmethod
    def from_tensors(cls, tensors: Params) -> "Roster":
        """Return the roster of tensors from :meth:`sent` or :meth:`to_tensors`.

        Raises
        ------
        WireError
            If clients are not pairs of integers (a client, and its step from 0 on), if
            weights or parts are not one for each pair, or if a part is not in [0, 1].
        """
        if _CLIENTS not in tensors:
            return cls()
        _check(tensors)
        numbers, last = tensors[_CLIENTS].unbind(1)
        steps = dict(zip(tensor_to_numbers(numbers), last.tolist(), strict=True))
        weights = tensors[_WEIGHTS].tolist() if _WEIGHTS in tensors else []
        parts = tensors[_PARTS].tolist() if _PARTS in tensors else []
        cut = {n: part for n, part in zip(steps, parts, strict=False) if part < 1}
        return cls(steps, dict(zip(steps, weights, strict=False)), cut)


def _check(tensors: Params) -> None:
    pairs = tensors[_CLIENTS]
    if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.dtype != torch.int64:
        reason = f"{pairs.dtype} of shape {tuple(pairs.shape)}, expected int64 [n, 2]"
        raise WireError(reason, field=_CLIENTS)
    if (pairs[:, 1] < 0).any():
        raise WireError("a negative step", field=_CLIENTS)
    for name in {_WEIGHTS, _PARTS} & set(tensors):
        if tensors[name].shape != pairs.shape[:1]:
            reason = f"shape {tuple(tensors[name].shape)} for {len(pairs)} clients"
            raise WireError(reason, field=name)
    parts = tensors.get(_PARTS, torch.ones(0))
    if not ((parts >= 0) & (parts <= 1)).all():
        raise WireError("a part that is not in [0, 1]", field=_PARTS)
