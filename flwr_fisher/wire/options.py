"""The keys of a request, and a client's answer to a query.

A request has the server's options, and its tensors beside the parameters.

Among these tensors are the clients that took part, with the last step of each.

The server's options are in the ``ConfigRecord``. They begin with ``fisher.``, so that a
user's own ``seed``, ``task`` or ``structure`` stays the user's. ``server-round`` is
Flower's, and is not changed.

The tensor `name` of the group `group` has the key ``server/<group>/<name>``, or
``server/<name>`` if the group is ``""``.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from flwr_fisher.errors import WireError, printable, quoted
from flwr_fisher.params import Params
from flwr_fisher.wire.arrays import (
    arrays_to_tensors,
    bytes_of,
    numbers_to_tensor,
    tensor_to_numbers,
    tensors_to_arrays,
)

OPTION = "fisher."
SERVER = "server/"
LIBRARY = "flwr-fisher"  # the key of a client's version in its answer
NUM_EXAMPLES = "num-examples"  # Flower's metric, by which clients are weighted
# A server refuses replies with more metrics, longer names, or more numbers in lists.
MOST_METRICS, LONGEST_NAME, MOST_NUMBERS = 1000, 200, 100_000
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
    own = {k: v for k, v in config.items() if not k.startswith(OPTION)}
    return {k.removeprefix(OPTION): config[k] for k in config if k not in own}, own


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
    parts = tensors.get(_PARTS, torch.ones(len(pairs), dtype=torch.float64))
    if parts.shape != pairs.shape[:1] or not ((parts >= 0) & (parts <= 1)).all():
        reason = f"{tuple(parts.shape)}, expected {len(pairs)} numbers in [0, 1]"
        raise WireError(reason, field=_PARTS)
    numbers = tensor_to_numbers(pairs[:, 0])
    last_steps = dict(zip(numbers, pairs[:, 1].tolist(), strict=True))
    below_1 = {n: p for n, p in zip(numbers, parts.tolist(), strict=True) if p < 1}
    return last_steps, below_1


ANY_JOB = "any-job"  # the key by which a client says that it does every job
LIKELIHOOD = "likelihood"  # and by which it says what its labels are
CLASSES = "classes"  # and their names, by number
_LARGEST_ID = 2**63
_MOST_PARTITIONS = 2**32
_MOST_FROZEN = 2**23  # characters, of all names and digests
_LABELS = 2**16  # characters that classes are compared by
# The key of what all clients must have in common, beside an upload: a digest of all
# parameters that are frozen and not sent, and the likelihood's name.
# A secure sum sends it unmasked, because of the key's ending.
_NOT_SENT, _BYTES = "frozen/digest", 1000
_LORA_A = re.compile(r"\blora_(embedding_)?A\b")  # PEFT's first factors


@dataclass(frozen=True)
class Answer:
    """A reply to a query; an entry that is missing or of another type is None.

    Parameters
    ----------
    version : str | None
        The version of this library that the ClientApp runs.
    partition : int | None
        The client's partition.
    trained : frozenset[str] | None
        The names of the parameters that it trains.
    frozen : frozenset[str] | None
        The names of those that it does not train, each with a digest of its values.
    any_job : bool
        Whether it can do every job, not only a training.
    likelihood : str | None
        What its labels are, to the Fisher.
    classes : str | None
        The names of its classes, by number.
    """

    version: str | None
    partition: int | None
    trained: frozenset[str] | None
    frozen: frozenset[str] | None = None
    any_job: bool = False
    likelihood: str | None = None
    classes: str | None = None

    def frozen_beside(self, sent: Iterable[str]) -> frozenset[str] | None:
        """Return the frozen parameters that the server does not send to clients."""
        if self.frozen is None:
            return None
        names = set(sent)
        return frozenset(f for f in self.frozen if frozen_name(f) not in names)

    @classmethod
    def of(cls, message: Message) -> Self:
        """Return the answer in a reply, which may hold anything."""
        content = message.content if message.has_content() else RecordDict()
        metrics = content.metric_records.values()
        configs = content.config_records.values()
        numbers = (r["partition-id"] for r in metrics if "partition-id" in r)
        partition = next(numbers, None)
        if not (isinstance(partition, int) and 0 <= partition < _LARGEST_ID):
            partition = None
        frozen = _texts(configs, "frozen")
        if sum(map(len, frozen or ())) > _MOST_FROZEN:
            frozen = None
        ours = (printable(r[LIBRARY]) for r in configs if LIBRARY in r)
        any_job = any(record.get(ANY_JOB) is True for record in configs)
        trained = _texts(configs, "trained")
        said = [_texts(configs, key) or () for key in (LIKELIHOOD, CLASSES)]
        labels = [
            printable(next(iter(each)), _LABELS) if len(each) == 1 else None
            for each in said
        ]
        return cls(next(ours, None), partition, trained, frozen, any_job, *labels)


def client_name(number: int) -> str:
    """Return what a client's own texts call it, by its number: its partition, or node.

    Only the server knows names of nodes, and it puts them before these texts. Flower
    draws ids of nodes from 64 bits, and partitions are counted.

    Examples
    --------
    >>> client_name(3), client_name(6094201937443016153)
    ('partition-3', 'this node')
    """
    return f"partition-{number}" if number < _MOST_PARTITIONS else "this node"


def frozen_name(described: str) -> str:
    """Return the name in a frozen parameter's name with its digest."""
    return described.rpartition(" ")[0]


# a client's text beside its upload (`not_sent` in client/messages.py)


def with_not_sent(record: ArrayRecord, text: str) -> ArrayRecord:
    """Return an upload's arrays, and beside them a client's text (see above)."""
    beside = tensors_to_arrays({_NOT_SENT: bytes_of(text[: _BYTES // 4])})
    return ArrayRecord({**record, **beside})


def split_not_sent(record: ArrayRecord) -> tuple[ArrayRecord, str]:
    """Return an upload's arrays without the client's text, and this text or ``""``.

    Any bytes are a text: who sends another than most clients is left out.

    Raises
    ------
    WireError
        If they are too many.
    """
    if _NOT_SENT not in record:
        return record, ""
    only = ArrayRecord({_NOT_SENT: record[_NOT_SENT]})
    tensor = arrays_to_tensors(only, limit=_BYTES)[_NOT_SENT]
    text = tensor.numpy().tobytes().decode(errors="replace")
    return ArrayRecord({k: v for k, v in record.items() if k != _NOT_SENT}), text


# the trained parameters


def adapter_warning(sent: Iterable[str]) -> str:
    """Return a warning if both factors of adapters are sent to clients, or else "".

    Examples
    --------
    >>> adapter_warning(["q.lora_B.default.weight", "head.weight"])
    ''
    >>> adapter_warning(["q.lora_A.weight", "q.lora_B.weight"])
    "The model has both factors of adapters, 'q.lora_A.weight' and its lora_B. ..."
    """
    names = set(sent)
    both = {
        name
        for name in names
        if _LORA_A.search(name) and _LORA_A.sub(r"lora_\1B", name) in names
    }
    if not both:
        return ""
    return (
        f"The model has both factors of adapters, {quoted(both)} and its lora_B. If "
        "clients train both, the merge of each is not the merge of their product. "
        "Freeze each lora_A, the same on every client, and double the rank"
    )


def _texts(configs: Iterable[ConfigRecord], key: str) -> frozenset[str] | None:
    """Return the first list of texts of this name, or None."""
    lists = (record.get(key) for record in configs)
    texts = next((each for each in lists if isinstance(each, list)), None)
    return None if texts is None else frozenset(map(str, texts))
