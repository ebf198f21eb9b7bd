"""Batches and loaders: what a model is called with, and how its data are read.

What a batch and a loader may be is said in ``docs/supported.md``. A loader is iterated,
and nothing else: it is never rebuilt, and never asked for its data set or its sampler.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from math import floor
from typing import Any

import torch
from torch import Tensor, nn

from flwr_fisher.errors import DataError, FlwrFisherError, StructureError
from flwr_fisher.log_lines import advance
from flwr_fisher.randomness import random_stream

BatchFn = Callable[[Any], tuple[Any, Any]]

LABELS = ("label", "labels")
"""The names that the labels of a mapping may have."""

IGNORED = -100
"""PyTorch's ``ignore_index``: an integer label with this value is no label."""

_WAY_OUT = (
    "pass batch_fn=... to FisherClient or fisher_arrays, or "
    "curvature.MappedLoader(loader, batch_fn), such as "
    "lambda batch: (batch['img'], batch['class'])"
)


@dataclass(frozen=True)
class Inputs:
    """A model's inputs for some examples: the arguments of one call.

    Parameters
    ----------
    args : tuple[Any, ...]
        Arguments by position. Every tensor has one row for each example; a number, a
        text or None is passed as it is.
    kwargs : Mapping[str, Any]
        Arguments by name.

    Raises
    ------
    DataError
        If there is no tensor, or tensors have different numbers of rows.

    Examples
    --------
    >>> x = Inputs((torch.zeros(3, 2),))
    >>> len(x), len(x[:2]), x(nn.Linear(2, 4)).shape
    (3, 2, torch.Size([3, 4]))
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = {n: v.shape[:1] for n, v in self._named() if isinstance(v, Tensor)}
        if not rows or len(set(rows.values())) > 1 or torch.Size() in rows.values():
            shapes = {name: tuple(shape) for name, shape in rows.items()}
            raise DataError(
                "a batch's inputs must be tensors with one row for each example, but "
                f"their first dimensions are {shapes or 'none: there is no tensor'}: "
                f"{_WAY_OUT}"
            )

    def _named(self) -> list[tuple[str, Any]]:
        named = [(str(i), value) for i, value in enumerate(self.args)]
        return [*named, *self.kwargs.items()]

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, rows: slice | Tensor) -> "Inputs":
        return self.mapped(lambda tensor: tensor[rows])

    def __call__(self, model: Callable[..., Any]) -> Tensor:
        """Call the model, and return its outputs as one tensor.

        The model gets copies, since its first operation may be one in place.
        """
        copies = self.mapped(torch.clone)
        outputs = logits_of(model(*copies.args, **copies.kwargs))
        if len(self) == 1 and outputs.shape[:1] != (1,):
            return outputs.unsqueeze(0)  # the model's squeeze() removed this dimension
        return outputs

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, in the order of :meth:`with_tensors`."""
        return [value for _, value in self._named() if isinstance(value, Tensor)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "Inputs":
        """Return the same call with other tensors."""
        rest = iter(tensors)
        return self.mapped(lambda _: next(rest))

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Inputs":
        """Return the same call with a function applied to every tensor."""

        def one(value: Any) -> Any:
            return function(value) if isinstance(value, Tensor) else value

        args = tuple(one(value) for value in self.args)
        kwargs = {name: one(value) for name, value in self.kwargs.items()}
        return replace(self, args=args, kwargs=kwargs)

    def to(self, device: torch.device) -> "Inputs":
        """Return the same on a device."""
        return self.mapped(lambda tensor: tensor.to(device, non_blocking=True))

    @property
    def is_padded(self) -> bool:
        """Whether a transformers model's mask says that some tokens are padding."""
        mask = self.kwargs.get("attention_mask")
        return isinstance(mask, Tensor) and bool((mask == 0).any())

    def split(self, size: int) -> "Iterator[Inputs]":
        """Yield parts of at most so many examples."""
        for start in range(0, len(self), size):
            yield self[start : start + size]

    @property
    def form(self) -> tuple[Any, ...]:
        """The form of the inputs; examples of one form can stand in one batch."""
        return tuple(
            (name, value.shape[1:], value.dtype)
            if isinstance(value, Tensor)
            else (name, repr(value))
            for name, value in self._named()
        )


def concatenated(parts: Sequence[Inputs]) -> Inputs:
    """Return several parts of one form as one batch."""
    columns = zip(*(part.tensors for part in parts), strict=True)
    return parts[0].with_tensors([torch.cat(column) for column in columns])


def logits_of(returned: Any) -> Tensor:
    """Return the tensor of outputs from what a model returned: itself, or its logits.

    Raises
    ------
    StructureError
        If a model returned neither a tensor nor something with ``logits``.

    Examples
    --------
    >>> logits_of({"logits": torch.zeros(2), "loss": torch.zeros(())})
    tensor([0., 0.])
    """
    if isinstance(returned, Mapping):
        returned = returned.get("logits", returned)
    outputs = getattr(returned, "logits", returned)
    if isinstance(outputs, Tensor):
        return outputs
    raise StructureError(
        f"the model must return a tensor, or an object with .logits, but it returned "
        f"{form_of(returned)}: wrap it in an nn.Module whose forward returns the logits"
    )


@dataclass(frozen=True)
class Batch:
    """A batch of examples: their inputs and their labels.

    Parameters
    ----------
    inputs : Inputs
        The arguments of the model's call.
    labels : Any
        A tensor with one row for each example, or what the loss takes; None if there
        are no labels.
    """

    inputs: Inputs
    labels: Any = None
    _num_labels: int | None = None  # counted on the CPU: a GPU is waited for

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: slice | Tensor) -> "Batch":
        labels = self.labels[rows] if isinstance(self.labels, Tensor) else self.labels
        return Batch(self.inputs[rows], labels)

    def to(self, device: torch.device) -> "Batch":
        """Return the same on a device."""
        labels = self.labels
        if hasattr(labels, "to"):
            labels = labels.to(device, non_blocking=True)
        return Batch(self.inputs.to(device), labels, self.num_labels)

    def tensor_labels(self, form: str = "") -> Tensor:
        """Return the labels; raise :class:`DataError` if they are no tensor.

        The error says what the batch is: its `form`, or the labels that it has.
        """
        if isinstance(self.labels, Tensor):
            return self.labels
        labels = "no labels" if self.labels is None else form_of(self.labels)
        raise DataError(
            "every batch must hold a tensor of labels, as in (inputs, labels) or under "
            f"the key 'label', but one {form or f'has {labels}'}: {_WAY_OUT}"
        )

    @property
    def num_labels(self) -> int:
        """The number of labels, over which a mean loss is taken."""
        if self._num_labels is not None:
            return self._num_labels
        return len(self) if self.labels is None else count_labels(self.labels)


# Labels


def count_labels(labels: Any) -> int:
    """Return the number of labels: all entries except integers of -100.

    Examples
    --------
    >>> count_labels(torch.tensor([[3, 1], [2, -100]]))
    3
    """
    if not isinstance(labels, Tensor):
        return len(labels) if hasattr(labels, "__len__") else 1
    return int((labels != IGNORED).sum()) if is_whole(labels) else labels.numel()


def is_whole(labels: Tensor) -> bool:
    """Return whether labels are integers, among which -100 is none."""
    other = labels.is_floating_point() or labels.is_complex()
    return not other and labels.dtype != torch.bool


def is_correct(outputs: Tensor, labels: Any) -> Tensor | None:
    """Return for each label whether the model finds it the most likely class.

    None if there are no classes: one logit has none, and labels must be integers.
    """
    guess = outputs.argmax(-1)
    fits = isinstance(labels, Tensor) and guess.shape == labels.shape
    classes = fits and is_whole(labels) and outputs.shape[-1] > 1
    return guess == labels if classes else None


def check_classes(labels: Tensor, classes: int) -> None:
    """Raise :class:`DataError` if a label is no class, and not -100 either."""
    wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= classes))]
    if len(wrong):
        raise DataError(
            f"label {int(wrong[0])} is outside [0, {classes}): labels must be class "
            f"indices, or {IGNORED} (PyTorch's ignore_index) for no label. Change "
            "them in the data, or by FisherClient(batch_fn=...)"
        )


def are_probabilities(labels: Tensor) -> bool:
    """Return whether labels are probabilities, whose sum in the last dimension is 1."""
    if not labels.is_floating_point():
        return False
    total = labels.sum(-1, dtype=torch.float32)
    return bool((labels >= 0).all() and ((total - 1).abs() < 1e-2).all())


# From a loader's batch to a Batch


def read(batch: Any, model: Callable[..., Any]) -> Batch:
    """Return a loader's batch in the form that the model takes.

    - A tensor is the model's one input, without labels.
    - In a tuple or list, the last part is the labels, and the parts before it are the
      inputs, by position.
    - In a mapping, the labels are the entry ``label`` or ``labels``. Its other tensors
      are the arguments of the model's ``forward`` with these names; a tensor that it
      does not take is left out. A single tensor is the first argument, whatever its
      name.

    Integer labels become int64. For a causal language model of transformers, which
    shifts labels itself, they are shifted by one.

    Raises
    ------
    DataError
        If it is not clear which entries are inputs and which are labels, or they differ
        in their numbers of rows. It names the entries.
    """
    if isinstance(batch, Batch):  # read before
        return batch
    if isinstance(batch, Mapping):
        inputs, labels = _of_mapping(batch, model)
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        *first, labels = batch
        inputs = _inputs(first[0] if len(first) == 1 else tuple(first))
    else:
        inputs, labels = _inputs(batch), None
    # A subclass, such as MONAI's MetaTensor, does more than compute.
    inputs = inputs.mapped(lambda tensor: tensor.as_subclass(Tensor))
    if isinstance(labels, Tensor):
        labels = labels.as_subclass(Tensor)
        if labels.shape[:1] != (len(inputs),):
            raise DataError(
                f"a batch has {len(inputs)} rows of inputs, and labels of shape "
                f"{tuple(labels.shape)}: give each example a row of labels, or "
                f"{_WAY_OUT}"
            )
        if is_whole(labels):
            labels = labels.long()  # in uint8, 156 is -100; losses refuse int32
    return Batch(inputs, labels)


def _inputs(value: Any) -> Inputs:
    """Return the inputs that a part of a batch is: one, several, or several by name."""
    if isinstance(value, Inputs):
        return value
    if isinstance(value, Mapping):
        return Inputs((), value)
    return Inputs(tuple(value) if isinstance(value, (tuple, list)) else (value,))


def _of_mapping(
    batch: Mapping[str, Any], model: Callable[..., Any]
) -> tuple[Inputs, Any]:
    """Return the inputs and labels of a mapping."""
    tensors = {
        name: value
        for name, value in batch.items()
        if isinstance(value, Tensor) and name not in LABELS
    }
    names = [name for name in LABELS if name in batch]
    if len(names) > 1 or not tensors:
        raise DataError(
            f"a batch is {form_of(batch)}, with "
            f"{'two entries of labels' if tensors else 'no tensor of inputs'}: "
            f"{_WAY_OUT}"
        )
    labels = batch[names[0]] if names else None
    inner = getattr(model, "called_like", model)
    arguments = signature(getattr(inner, "forward", inner)).parameters.values()
    takes_all = any(each.kind is Parameter.VAR_KEYWORD for each in arguments)
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    known = {each.name for each in arguments if each.kind in kinds}
    chosen = {k: v for k, v in tensors.items() if takes_all or k in known}
    if len(tensors) == 1 and not chosen.keys() & known:
        return _inputs(next(iter(tensors.values()))), labels
    if not chosen:
        raise DataError(
            f"a batch is {form_of(batch)}, and besides labels, 'label' or 'labels', "
            f"none of these is an argument of the model's forward "
            f"({', '.join(sorted(known))}): {_WAY_OUT}"
        )
    if isinstance(labels, Tensor):
        labels, chosen = _of_transformers(inner, labels, chosen)
    return Inputs((), chosen), labels


def _of_transformers(
    model: Any, labels: Tensor, inputs: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return labels and inputs as a transformers model makes them from a batch.

    A causal language model shifts its labels by one when it computes its loss. An
    encoder-decoder makes its decoder's inputs from the labels.
    """
    loss = getattr(getattr(model, "loss_function", None), "__name__", "")
    kind = getattr(model, "loss_type", None)
    copied = any(
        tensor.shape == labels.shape and bool((tensor == labels)[labels >= 0].all())
        for tensor in inputs.values()
    )
    if kind == "ForCausalLM" or (loss == "ForCausalLMLoss" and copied):
        labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)
    decoder = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if decoder is not None and "decoder_input_ids" not in inputs:
        inputs = {**inputs, "decoder_input_ids": decoder(labels)}
    return labels, inputs


def form_of(batch: Any) -> str:
    """Return in words what a batch holds."""
    if isinstance(batch, Tensor):
        return f"a tensor of shape {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return f"a mapping with the keys {sorted(map(str, batch))}"
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"a {type(batch).__name__}"


# Loaders


class MappedLoader(Iterable[Any]):
    """A loader whose batches a function changes, such as to ``(inputs, labels)``.

    Parameters
    ----------
    loader : Iterable
        Batches of any form.
    batch_fn : Callable
        Returns ``(inputs, labels)`` for a batch. The inputs are a tensor; a tuple of
        tensors, which the model gets by position; or a mapping, which it gets by name.

    Raises
    ------
    DataError
        While it is read, if `batch_fn` fails or returns something else.

    Examples
    --------
    >>> from flwr_fisher.curvature import fisher
    >>> batch = {"left": torch.ones(2, 3), "right": torch.ones(2, 3), "class": None}
    >>> loader = MappedLoader([batch], lambda b: (b["left"] - b["right"], b["class"]))
    >>> fisher(nn.Linear(3, 2, bias=False), loader, "diagonal").trace()
    0.0
    """

    def __init__(self, loader: Iterable[Any], batch_fn: BatchFn) -> None:
        self.loader, self.function = loader, batch_fn

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return map(self._mapped, self.loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def _mapped(self, batch: Any) -> tuple[Any, Any]:
        try:
            pair = self.function(batch)
        except FlwrFisherError:
            raise
        except Exception as error:
            raise DataError(
                f"batch_fn fails on a batch, {form_of(batch)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise DataError(
                f"batch_fn must return a tuple (inputs, labels), not {form_of(pair)}"
            )
        inputs, labels = pair
        return _inputs(inputs), labels


def batches_of(
    loader: Iterable[Any],
    model: nn.Module,
    device: torch.device | None,
    *,
    labelled: bool = False,
    report: bool = True,
) -> Iterator[Batch]:
    """Yield a loader's batches on a device, without those that are empty.

    Parameters
    ----------
    loader : Iterable
        Batches as :func:`read` takes them.
    model : nn.Module
        The model that will be called.
    device : torch.device | None
        Where tensors are moved to; with None they stay where they are.
    labelled : bool, default False
        Whether a batch without labels is an error.
    report : bool, default True
        Whether the examples that are read count as progress of the work in the log.

    Raises
    ------
    DataError
        If the loader is one batch, a batch's form is not clear, or a batch lacks
        labels.
    """
    if isinstance(loader, (Tensor, Mapping)):
        raise DataError(
            f"the loader is one batch, {form_of(loader)}: pass a DataLoader, or a list "
            "of batches"
        )
    for batch in loader:
        made = read(batch, model)
        if labelled and not hasattr(made.labels, "to"):
            made.tensor_labels(f"is {form_of(batch)}")  # which raises an error
        if len(made):
            yield made if device is None else made.to(device)
            if report:
                advance(len(made))


def some_of(
    batches: Iterable[Batch], examples: int, total: int | None, seed: int
) -> Iterator[Batch]:
    """Yield some examples, in batches as large as the first that is read.

    Of every batch the same share is taken, at random, so that the order of the data
    does not matter: each example is taken with the probability ``examples / total``.

    Parameters
    ----------
    batches : Iterable[Batch]
        From :func:`batches_of`, read once.
    examples : int
        How many to take.
    total : int | None
        How many examples the batches have. If that is not known, the first examples are
        taken, and no more are read.
    seed : int
        The seed of the choice.

    Examples
    --------
    >>> batches = [Batch(Inputs((torch.zeros(4, 2),))) for _ in range(2)]
    >>> sum(map(len, some_of(batches, 3, total=8, seed=0)))
    3
    """
    if total is None:
        for batch in batches:
            yield batch[:examples]
            if (examples := examples - len(batch)) <= 0:
                return
        return
    share, stream = min(1.0, examples / total), random_stream(seed, "examples")
    offset, seen, taken, size = stream.random(), 0, 0, 0
    # Batches of one form are joined: a few rows cost as much as a whole batch.
    waiting: dict[tuple[Any, ...], list[Batch]] = {}
    for batch in batches:
        size, seen = size or len(batch), seen + len(batch)
        # The running total is rounded, so that all batches together give the share
        # exactly.
        count = min(floor(share * seen + offset) - taken, len(batch))
        taken += count
        rows = stream.choice(len(batch), count, replace=False, shuffle=False)
        form = batch.inputs.form
        parts = waiting.setdefault(form, [])
        parts.append(batch[torch.from_numpy(rows).sort().values])
        if sum(map(len, parts)) >= size:
            yield _joined(waiting.pop(form))
    for parts in waiting.values():
        if len(rest := _joined(parts)):
            yield rest


def _joined(parts: Sequence[Batch]) -> Batch:
    """Return several batches of one form as one, with their labels if these fit."""
    labels = [part.labels for part in parts]
    shapes = {part.shape[1:] for part in labels if isinstance(part, Tensor)}
    fit = len(shapes) == 1 and all(isinstance(each, Tensor) for each in labels)
    inputs = concatenated([part.inputs for part in parts])
    return Batch(inputs, torch.cat(labels) if fit else None)


def check_can_be_read_again(loader: Iterable[Any], why: str) -> None:
    """Raise :class:`DataError` for an iterator, which gives its batches once."""
    if isinstance(loader, Iterator):
        raise DataError(
            f"the loader is a {type(loader).__name__}, which gives its batches once, "
            f"but {why}: pass a DataLoader, or a list of batches"
        )
