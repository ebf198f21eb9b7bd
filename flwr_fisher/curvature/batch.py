"""A batch: a model's inputs, by position or by name, and their labels.

Long: this file alone reads every form that a batch and a model's output may have.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter, Signature, signature
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from flwr_fisher.errors import DataError, FlwrFisherError, StructureError

BatchFn = Callable[[Any], tuple[Any, Any]]
OutputFn = Callable[[Any], Tensor]

TARGETS = ("label", "labels", "label_ids", "y", "target", "targets", "fine_label")
"""Names that a batch's labels may have."""

IGNORED = -100
"""PyTorch's ``ignore_index``: where an integer label is this, there is none."""

_WHOLE = {torch.uint8, torch.uint16, torch.uint32, torch.uint64}
_WHOLE |= {torch.int8, torch.int16, torch.int32}

_WAY_OUT = (
    "pass batch_fn=... to FisherClient or fisher_arrays, or "
    "curvature.Pairs(loader, batch_fn), such as "
    "lambda batch: (batch['img'], batch['label'])"
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
    output_fn : Callable[[Any], Tensor], optional
        Returns the tensor of outputs from what the model returns; by default
        :func:`logits_of`.

    Raises
    ------
    DataError
        If there is no tensor, tensors have different numbers of rows, or one of the
        inputs is a tuple, a list or a mapping.

    Examples
    --------
    >>> x = Inputs((torch.zeros(3, 2),))
    >>> len(x), len(x[:2]), x(nn.Linear(2, 4)).shape
    (3, 2, torch.Size([3, 4]))
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    output_fn: OutputFn | None = None
    _is_padded: bool | None = None  # computed on the CPU, since a GPU is waited for

    def __post_init__(self) -> None:
        for name, value in self._named():
            if isinstance(value, (tuple, list, Mapping)):
                raise DataError(
                    f"input {name!r:.40} is a {type(value).__name__}, but each input "
                    f"must be a tensor with one row for each example: {_WAY_OUT}"
                )
            if isinstance(value, Tensor) and (
                value.layout != torch.strided or value.is_nested
            ):
                layout = "nested" if value.is_nested else str(value.layout)
                dense = "to_padded_tensor(0.0)" if value.is_nested else "to_dense()"
                raise DataError(
                    f"input {name!r:.40} is of layout {layout}, whose examples cannot "
                    f"be taken one by one: make it dense, by input.{dense} in the "
                    "loader's collate_fn or in FisherClient(batch_fn=...)"
                )
        rows = {n: v.shape[:1] for n, v in self._named() if isinstance(v, Tensor)}
        if not rows or len(set(rows.values())) > 1 or torch.Size() in rows.values():
            each = {name: tuple(shape) for name, shape in rows.items()}
            raise DataError(
                "a batch's inputs must be tensors with one row for each example, but "
                f"their first dimensions are {each or 'none: there is no tensor'}: "
                f"{_WAY_OUT}"
            )

    def _named(self) -> list[tuple[str, Any]]:
        named = [(str(i), value) for i, value in enumerate(self.args)]
        return [*named, *self.kwargs.items()]

    def __len__(self) -> int:
        return len(next(t for _, t in self._named() if isinstance(t, Tensor)))

    def __getitem__(self, rows: slice | Tensor) -> "Inputs":
        return self.mapped(lambda tensor: tensor[rows])

    def __call__(self, model: Callable[..., Any]) -> Tensor:
        """Call the model, and return its outputs as one tensor.

        The model gets copies, since its first operation may be one in place.
        """
        given = self.mapped(torch.clone)
        returned = model(*given.args, **given.kwargs)
        outputs = (self.output_fn or logits_of)(returned)
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
        padded = self.is_padded if device.type != "cpu" else None
        moved = self.mapped(lambda tensor: _moved(tensor, device))
        return replace(moved, _is_padded=padded)

    @property
    def is_padded(self) -> bool:
        """Whether a transformers model's mask says that some tokens are padding."""
        if self._is_padded is not None:
            return self._is_padded
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
    # Computed on the CPU, since a GPU is waited for.
    _num_labels: int | None = None
    _extremes: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: slice | Tensor) -> "Batch":
        labels = self.labels
        own = isinstance(labels, Tensor) and labels.shape[:1] == (len(self),)
        kept = labels[rows] if own else labels
        return Batch(self.inputs[rows], kept, _extremes=self._extremes)

    def to(self, device: torch.device) -> "Batch":
        """Return the same on a device."""
        labels, count, extremes = self.labels, self._num_labels, self.extremes
        if isinstance(labels, Tensor) and labels.device.type == "cpu":
            count = self.num_labels
        if isinstance(labels, Tensor):
            labels = _moved(labels, device)
        elif hasattr(labels, "to"):
            labels = labels.to(device, non_blocking=True)
        return Batch(self.inputs.to(device), labels, count, extremes)

    @property
    def extremes(self) -> tuple[int, ...]:
        """The least and the largest label, of integers that came from the CPU."""
        labels = self.labels
        if self._extremes or not isinstance(labels, Tensor):
            return self._extremes
        if labels.dtype != torch.int64 or labels.device.type != "cpu":
            return ()
        given = labels[labels != IGNORED]
        return (int(given.min()), int(given.max())) if given.numel() else ()

    def tensor_labels(self, form: str = "") -> Tensor:
        """Return the labels; raise :class:`DataError` if they are no tensor.

        The error says what the batch is, its `form` or the labels that it has.
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


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, which autograd can use, too."""
    with torch.inference_mode(False):
        there = tensor.to(device, non_blocking=True)
        return there.clone() if there.is_inference() else there


def num_correct(outputs: Tensor, labels: Any) -> float:
    """Return how many labels are the most likely class; -100 is no label.

    NaN if the outputs have no classes: one logit has none.

    Raises
    ------
    DataError
        If a label is no class, such as -1 or 255 for a loss with that `ignore_index`.
    """
    guess = outputs.argmax(-1)
    fits = isinstance(labels, Tensor) and guess.shape == labels.shape
    if not fits or outputs.shape[-1] < 2:
        return float("nan")
    given, classes = labels != IGNORED, outputs.shape[-1]
    wrong, right = _no_classes(labels, classes), (guess == labels) & given
    num_right, num_wrong = torch.stack([right.sum(), wrong.sum()]).tolist()
    if num_wrong:  # only now, because a GPU is waited for
        check_classes([int(labels[wrong][0])], classes)
    return float(num_right)


def check_classes(labels: Iterable[int], classes: int) -> None:
    """Raise :class:`DataError` if a label is no class; -100, no label, is left out."""
    for label in labels:
        if not 0 <= label < classes:
            raise DataError(
                f"label {label} is outside [0, {classes}): labels must be class "
                f"indices, or {IGNORED} (PyTorch's ignore_index) for no label. Change "
                "them in the data, or by FisherClient(batch_fn=...)"
            )


def check_all_classes(labels: Tensor, classes: int) -> None:
    """Raise :class:`DataError` if a label is no class, and not -100 either."""
    wrong = labels[_no_classes(labels, classes)]
    check_classes(map(int, wrong[:1]), classes)


def _no_classes(labels: Tensor, classes: int) -> Tensor:
    """Return, for each label, whether it is no class, and not -100 either."""
    return (labels != IGNORED) & ((labels < 0) | (labels >= classes))


def are_probabilities(labels: Tensor) -> bool:
    """Return whether labels are probabilities, whose sum in the last dimension is 1."""
    total = labels.sum(-1, dtype=torch.float32)
    return bool((labels >= 0).all() and ((total - 1).abs() < 1e-2).all())


def check_from_0_to_1(labels: Tensor) -> None:
    """Raise :class:`DataError` if a label of sigmoids is below 0, above 1, or NaN."""
    if len(wrong := labels[~((labels >= 0) & (labels <= 1))]):
        raise DataError(
            f"label {float(wrong[0]):g} is outside [0, 1], where labels of sigmoids "
            "are: there is none for a missing label, and -1 and 1 are not 0 and 1. "
            "Change them in the data, or by FisherClient(batch_fn=...)"
        )


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


def read(
    batch: Any,
    model: Callable[..., Any],
    batch_fn: BatchFn | None = None,
    output_fn: OutputFn | None = None,
) -> Batch:
    """Return a loader's batch in the form that the model takes.

    For the forms, see :class:`~flwr_fisher.curvature.Pairs`.

    Raises
    ------
    DataError
        If it is not clear which entries are inputs and which are labels. It names the
        entries.
    """
    if isinstance(batch, Batch):
        return batch
    if hasattr(model, "called_like"):
        output_fn = None  # it is for the outputs of the model inside this wrapper
    if batch_fn is not None:
        try:
            pair = batch_fn(batch)
        except FlwrFisherError:
            raise
        except Exception as error:
            raise DataError(
                f"batch_fn fails on a batch, {form_of(batch)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise DataError(
                "batch_fn must return a tuple (inputs, labels), but it returned "
                f"{form_of(pair)}"
            )
        inputs, labels = _inputs(pair[0], output_fn), pair[1]
    elif isinstance(batch, Mapping) or _names_labels(batch):
        named = batch if isinstance(batch, Mapping) else batch._asdict()
        inputs, labels = _of_mapping(named, model, output_fn)
    elif isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence):
        if not batch:
            raise DataError(f"a batch is an empty {type(batch).__name__}: {_WAY_OUT}")
        *first, labels = batch if len(batch) > 1 else (*batch, None)
        inputs = _inputs(first[0] if len(first) == 1 else tuple(first), output_fn)
    else:
        inputs, labels = _inputs(batch, output_fn), None
    _check_call(inputs, model, batch)
    if isinstance(labels, Tensor) and labels.dim() == 0 and len(inputs) > 1:
        raise DataError(
            f"a batch has {len(inputs)} rows of inputs and one number as its labels, "
            "as a single example has: pass DataLoader(..., batch_size=32) for example, "
            f"or {_WAY_OUT}"
        )
    if isinstance(labels, Tensor) and labels.dtype in _WHOLE:
        labels = labels.long()  # 156 is -100 in uint8, and losses refuse int32
    return Batch(inputs, labels)


def _names_labels(batch: Any) -> bool:
    """Return whether a named tuple has its labels in another place than the last."""
    *others, last = getattr(batch, "_fields", None) or [""]
    return last not in TARGETS and any(name in TARGETS for name in others)


def _inputs(value: Any, output_fn: OutputFn | None) -> Inputs:
    if isinstance(value, Inputs):
        return value
    if isinstance(value, Tensor):
        return Inputs((value,), {}, output_fn)
    if isinstance(value, Mapping):
        return Inputs((), {str(name): each for name, each in value.items()}, output_fn)
    if isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence):
        return Inputs(tuple(value), {}, output_fn)
    raise DataError(
        f"a batch's inputs are a {type(value).__name__}, but they must be a tensor, or "
        f"a tuple or mapping of tensors: {_WAY_OUT}"
    )


def _of_mapping(
    batch: Mapping[Any, Any], model: Callable[..., Any], output_fn: OutputFn | None
) -> tuple[Inputs, Any]:
    form = form_of(batch)
    targets = [key for key in batch if key in TARGETS]
    tensors = {
        str(key): value
        for key, value in batch.items()
        if isinstance(value, Tensor) and key not in targets
    }
    names, any_name = _arguments(model)
    known = {key: value for key, value in tensors.items() if key in names}
    if len(targets) > 1 or not tensors:
        what = f"labels may be any of {', '.join(targets)}"
        what = what if tensors else "no tensor of inputs"
        raise DataError(f"a batch is {form}, with {what}: {_WAY_OUT}")
    labels = batch[targets[0]] if targets else None
    if not targets and len(known) < len(tensors):
        raise DataError(
            f"a batch is {form}, and none of these is a name of labels "
            f"({', '.join(TARGETS)}): {_WAY_OUT}"
        )
    chosen = tensors if any_name and len(tensors) > 1 else known
    alone = not known and len(tensors) == 1
    if isinstance(labels, Tensor):
        labels = _shifted(labels, tensors if alone else chosen, model, form)
        if own := _decoder_inputs(labels, chosen, model):
            return Inputs((), {**(chosen or tensors), **own}, output_fn), labels
    if alone:
        return _inputs(next(iter(tensors.values())), output_fn), labels
    if not chosen:
        arguments = ", ".join(sorted(names)) or "it names none"
        raise DataError(
            f"a batch is {form}, and none of these is an argument of "
            f"the model's forward ({arguments}): {_WAY_OUT}"
        )
    return Inputs((), chosen, output_fn), labels


def _decoder_inputs(
    labels: Tensor, given: Mapping[str, Tensor], model: Callable[..., Any]
) -> dict[str, Tensor]:
    """Return what a transformers encoder-decoder makes of labels, for its decoder.

    Without labels, its ``forward`` has no inputs for it, or takes the encoder's.
    """
    inner = getattr(model, "called_like", model)
    make = getattr(inner, "prepare_decoder_input_ids_from_labels", None)
    if make is None or any(name.startswith("decoder_input") for name in given):
        return {}
    return {"decoder_input_ids": make(labels)}


def _shifted(
    labels: Tensor,
    inputs: Mapping[str, Tensor],
    model: Callable[..., Any],
    form: str,
) -> Tensor:
    """Return labels aligned with the outputs: shifted by one where the model shifts."""
    if labels.dim() != 2 or labels.is_floating_point():
        return labels
    given = labels != IGNORED
    copied = [
        name
        for name, tensor in inputs.items()
        if tensor.shape == labels.shape and not tensor.is_floating_point()
        if given.any() and torch.equal(tensor[given], labels[given])
    ]
    if _shifts(model, bool(copied)):
        end = torch.full_like(labels[:, :1], IGNORED)
        return torch.cat([labels[:, 1:], end], 1)
    for name in copied:
        raise DataError(
            f"a batch is {form}, and its labels equal its {name!r}: "
            "a causal language model would learn to copy its input. Shift the labels "
            f"by one, and {_WAY_OUT}"
        )
    return labels


def _shifts(model: Callable[..., Any], copied: bool) -> bool:
    """Return whether a transformers model shifts its labels by one itself.

    Some models, such as GPT-2, have no ``loss_type``, but transformers' default loss,
    which shifts. Some models that do not shift have it, too. Nobody passes these their
    inputs as labels, so `copied` distinguishes the two.
    """
    if getattr(model, "loss_type", None) == "ForCausalLM":
        return True
    loss = getattr(model, "loss_function", None) if copied else None
    return getattr(loss, "__name__", "") == "ForCausalLMLoss"


def _forward(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return the model's ``forward``, or that of the model inside a wrapper."""
    inner = getattr(model, "called_like", model)
    return inner.forward if isinstance(inner, nn.Module) else inner


def _arguments(model: Callable[..., Any]) -> tuple[set[str], bool]:
    """Return the names of a model's arguments, and whether it takes ``**kwargs``."""
    try:
        parameters = _signature(model).parameters
    except (TypeError, ValueError):  # compiled code
        return set(), True
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    names = {name for name, each in parameters.items() if each.kind in kinds}
    kinds_there = {each.kind for each in parameters.values()}
    return names, Parameter.VAR_KEYWORD in kinds_there


_SIGNATURES: WeakKeyDictionary[FunctionType, Signature] = WeakKeyDictionary()


def _signature(model: Callable[..., Any]) -> Signature:
    """Return the signature of a model's ``forward``.

    It is read once for each class, because each batch needs it, and reading it takes
    longer than a small layer.
    """
    forward = _forward(model)
    function = getattr(forward, "__func__", None)
    if type(function) is not FunctionType:
        return signature(forward)
    if function not in _SIGNATURES:
        _SIGNATURES[function] = signature(forward)
    return _SIGNATURES[function]


def _check_call(inputs: Inputs, model: Callable[..., Any], batch: Any) -> None:
    """Raise :class:`DataError` if the model's ``forward`` cannot take these inputs."""
    try:
        call = _signature(model)
    except (TypeError, ValueError):
        return
    try:
        call.bind(*inputs.args, **inputs.kwargs)
    except TypeError as error:
        raise DataError(
            f"a batch is {form_of(batch)}, but {type(model).__name__}.forward{call} "
            f"cannot take its inputs ({error}): {_WAY_OUT}"
        ) from None


def logits_of(returned: Any) -> Tensor:
    """Return the tensor of outputs, or logits, from what a model returned.

    This is the tensor itself; or the entry with the name ``logits``, as in
    transformers' outputs; or the only floating-point tensor of a tuple or mapping.

    Raises
    ------
    StructureError
        If it is not clear which tensor it is.

    Examples
    --------
    >>> logits_of({"logits": torch.zeros(2), "loss": torch.zeros(())})
    tensor([0., 0.])
    """
    if isinstance(returned, Tensor):
        return returned
    logits = getattr(returned, "logits", None)
    values: list[Any] = []
    if isinstance(returned, Mapping):
        logits = returned.get("logits", logits)
        values = list(returned.values())
    elif isinstance(returned, (tuple, list)):
        values = list(returned)
    if isinstance(logits, Tensor):
        return logits
    floats = [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]
    if len(floats) == 1:
        return floats[0]
    raise StructureError(
        f"the model returns {form_of(returned)}, but a curvature needs one tensor of "
        "outputs: name it 'logits', or pass an output_fn that returns it, for example "
        "lambda returned: returned[0]"
    )


def form_of(batch: Any) -> str:
    """Return a description of a batch's form, for errors."""
    if isinstance(batch, Mapping):
        keys = ", ".join(f"{key!r:.40}" for key in list(batch)[:12])
        return f"a mapping of {keys or 'nothing'}"
    if isinstance(batch, (tuple, list)):
        parts = ", ".join(type(part).__name__ for part in batch[:8])
        return f"a {type(batch).__name__} of {len(batch)}: {parts or 'nothing'}"
    return f"a {type(batch).__name__}"
