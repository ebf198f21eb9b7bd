"""Named groups of tensors that a server sends beside the parameters.

The tensor `name` of the group `group` has the key ``server/<group>/<name>``, or
``server/<name>`` if the group is ``""``.
"""

from collections.abc import Mapping

from torch import Tensor

from flwr_fisher.params import Params

SERVER = "server/"


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
