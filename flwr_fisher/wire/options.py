"""The keys of a request: the server's options, and its tensors beside the parameters.

Among these tensors are the clients that took part, with the last step of each.

The server's options are in the ``ConfigRecord``. They begin with ``fisher.``, so that a
user's own ``seed``, ``task`` or ``structure`` stays the user's. ``server-round`` is
Flower's, and is not changed.

The tensor `name` of the group `group` has the key ``server/<group>/<name>``, or
``server/<name>`` if the group is ``""``.
"""

from collections.abc import Mapping
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
_CLIENTS, _PARTS = "clients", "client-parts"

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


def members_to_tensors(
    last_steps: Mapping[int, int], parts: Mapping[int, float]
) -> dict[str, Tensor]:
    """Return the tensors by which clients with a state of their own go on with it.

    A client continues from the last step to which it contributed. It cannot know that
    step by itself, because its reply may have been lost, or left out by the server.

    Parameters
    ----------
    last_steps : Mapping[int, int]
        The last step to which each client contributed. A client's number is its
        partition, or its node's id.
    parts : Mapping[int, float]
        For each client of whose change the server used only a part in that step: this
        part.

    Examples
    --------
    >>> members_from_tensors(members_to_tensors({3: 1, 5: 2}, {5: 0.5}))
    ({3: 1, 5: 2}, {5: 0.5})
    """
    if not last_steps:
        return {}
    steps = torch.tensor(list(last_steps.values()))
    tensors = {_CLIENTS: torch.stack([numbers_to_tensor(last_steps), steps], 1)}
    if parts:
        of_all = [parts.get(number, 1.0) for number in last_steps]
        tensors[_PARTS] = torch.tensor(of_all, dtype=torch.float64)
    return tensors


def members_from_tensors(tensors: Params) -> tuple[dict[int, int], dict[int, float]]:
    """Return the clients' last steps, and the parts below 1, that a server sent.

    Raises
    ------
    WireError
        If clients are not pairs of integers (a client, and its step from 0 on), or if
        parts are not one number in [0, 1] for each pair.
    """
    if _CLIENTS not in tensors:
        return {}, {}
    pairs = tensors[_CLIENTS]
    if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.dtype != torch.int64:
        reason = f"{pairs.dtype} of shape {tuple(pairs.shape)}, expected int64 [n, 2]"
        raise WireError(reason, field=_CLIENTS)
    if (pairs[:, 1] < 0).any():
        raise WireError("a negative step", field=_CLIENTS)
    parts = tensors.get(_PARTS, torch.ones(len(pairs)))
    if parts.shape != pairs.shape[:1] or not ((parts >= 0) & (parts <= 1)).all():
        reason = f"{tuple(parts.shape)}, expected {len(pairs)} numbers in [0, 1]"
        raise WireError(reason, field=_PARTS)
    numbers = tensor_to_numbers(pairs[:, 0])
    last_steps = dict(zip(numbers, pairs[:, 1].tolist(), strict=True))
    below_1 = {n: p for n, p in zip(numbers, parts.tolist(), strict=True) if p < 1}
    return last_steps, below_1
