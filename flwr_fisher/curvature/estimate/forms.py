r"""Which layers have a form, by their types and by a check on the first batch.

A forward pass is recorded by taps. A tap holds what a layer was given, and the place in
autograd's graph where its output is. With both, one backward pass that stops at these
places is enough for every layer's per-example gradients: gradients of weights are never
formed for a whole batch.

The type of a layer says how its per-example gradients follow from the input and the
output's gradient of its one call. It may be wrong about a model: a subclass computes
something else, a weight is also used outside of its layer, time is folded into the
batch, a model sorts its examples. So each layer is checked on all examples of the first
batch. A parameter whose layer does not pass, or has no form, gets its exact diagonal
from per-example gradients.

The check takes two backward passes. Let :math:`r_i` be the output's gradient of
example i at a layer, for random gradients :math:`v_i` of the model's outputs.

1. In a second pass, :math:`v_i` is multiplied by a random number :math:`c_i`. Then
   :math:`r_i` must be :math:`c_i` times what it was. If row i of the layer depended on
   another example, it would not.
2. So the row is the example's own, and the sum over examples of the gradients that the
   form computes must be the parameter's gradient, as autograd has it. Since the
   :math:`v_i` are random, errors of several examples do not cancel.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flwr_fisher.curvature.data import Inputs, concatenated
from flwr_fisher.curvature.estimate.layers import (
    DirectLayer,
    EmbeddingRows,
    KroneckerLayer,
    Layer,
    LinearLayer,
    RepeatedRow,
    layer_of,
)
from flwr_fisher.curvature.estimate.pieces import drawn
from flwr_fisher.curvature.models import check_outputs, check_rows, outputs_with
from flwr_fisher.errors import StructureError
from flwr_fisher.params import trainable_names, widened


@dataclass(frozen=True)
class Tap:
    """One call of one layer: its input, and the shape and graph edge of its output."""

    inputs: Tensor
    shape: torch.Size
    # An edge, not the tensor: it stays right when a later ReLU works in place. There is
    # none without gradients.
    output: GradientEdge | None

    def edge(self) -> GradientEdge:
        """Return the graph edge of the layer's output."""
        assert self.output is not None
        return self.output


def tapped_forward(
    model: nn.Module, inputs: Inputs, layers: Mapping[str, Layer]
) -> tuple[Tensor, dict[str, list[Tap]]]:
    """Run the model once; return its outputs and every call of the given layers.

    Parameters
    ----------
    model : nn.Module
        The model.
    inputs : Inputs
        A batch.
    layers : Mapping[str, Layer]
        The layers to record, by names of any kind.
    """
    taps: dict[str, list[Tap]] = {name: [] for name in layers}

    def on_call(name: str, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # A call by keyword, or with another output than a tensor, is not one that a
        # layer's form describes. Without a tap the layer has no form.
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            edge = get_gradient_edge(output) if output.requires_grad else None
            taps[name].append(Tap(args[0].detach(), output.shape, edge))

    replaced = dict[str, Tensor]()
    for name, layer in layers.items():
        if isinstance(layer, RepeatedRow):
            rows = replaced[layer.weight] = layer.repeated(len(inputs))
            edge = None if rows.grad_fn is None else get_gradient_edge(rows)
            taps[name].append(Tap(rows.detach(), rows.shape, edge))
    # These hooks are the last ones, so they see what the user's hooks return.
    with ExitStack() as hooks:
        for name, layer in layers.items():
            if isinstance(layer, RepeatedRow):
                continue
            hook = layer.layer.register_forward_hook(partial(on_call, name))
            hooks.enter_context(hook)
        if replaced:
            return outputs_with(model, replaced, inputs), taps
        return inputs(model), taps


def tapped_once(
    model: nn.Module, inputs: Inputs, layers: Mapping[str, Layer]
) -> tuple[Tensor, dict[str, Tap]]:
    """Run the model; return its outputs, and the one call of each layer.

    Raises
    ------
    StructureError
        If a layer was called several times, or not with one row for each example, as it
        was in the first batch.
    """
    outputs, taps = tapped_forward(model, inputs, layers)
    for name, calls in taps.items():
        rows = [len(call.inputs) for call in calls]
        if rows != [len(inputs)]:
            raise StructureError(
                f"layer '{name}' was called once in the first batch, with a row for "
                f"each example, and in another with {rows} rows for {len(inputs)} "
                "examples: shuffle the loader, so that the first batch shows it"
            )
    return outputs, {name: calls[0] for name, calls in taps.items()}


_FEW = 5  # examples that show the sizes of activations
_ROWS = 13  # copies of an example; hardly any other axis is as long
# Relative: larger than rounding, also TF32's; a wrong formula is off by far more.
_TOLERANCE = 5e-3
_ROUNDINGS = 4  # how many units of rounding a sum may be off
_AT_ONCE, _AT_ONCE_ELSEWHERE = 2**22, 2**25  # entries of a layer's input columns


@dataclass(frozen=True)
class Forms:
    """The form of each of a model's trained parameters.

    Parameters
    ----------
    layers : dict[str, KroneckerLayer]
        The layers with a Kronecker form, by their modules' names.
    direct : dict[str, DirectLayer]
        Norms and embeddings.
    inputs : dict[str, Tensor]
        The inputs of each of these layers for one example.
    others : list[str]
        All other parameters, which need per-example gradients.
    padded : bool
        Whether the model has tokens that act on no output, by no layer: padding.
    """

    layers: dict[str, KroneckerLayer]
    direct: dict[str, DirectLayer]
    inputs: dict[str, Tensor]
    others: list[str]
    padded: bool

    @classmethod
    def of(
        cls, model: nn.Module, inputs: Inputs, max_bytes: int | None = None
    ) -> "Forms":
        """Find the forms by running the model on the first batch.

        Parameters
        ----------
        model : nn.Module
            In eval mode.
        inputs : Inputs
            The batch.
        max_bytes : int, optional
            About how many bytes activations and their gradients may take; a larger
            batch is checked in parts. By default it is checked at once, as in a step of
            training.

        Raises
        ------
        StructureError
            If an example has no row of outputs, or its outputs depend on the others.
        """
        layers, seen = layers_by_type(model), dict[str, Tensor]()
        layers |= _repeatable(model, inputs)
        size, padded = len(inputs), False
        if max_bytes is not None:
            size = _fitting(model, inputs, layers, max_bytes)
        for number, part in enumerate(inputs.split(size)):
            several = part if len(part) > 1 else concatenated([part, part])
            outputs, taps = tapped_forward(model, several, layers)
            check_outputs(outputs, len(several))
            layers, is_padded = passing(several, layers, outputs, taps)
            padded |= is_padded
            if not number:
                # Behind the backward passes, because a forward pass may change in place
                # what they need.
                seen = {n: each[0].inputs[:1] for n, each in taps.items() if each}
                check_rows(model, several, outputs)
        taken = {parameter for layer in layers.values() for parameter in layer.names}
        return cls(
            {n: x for n, x in layers.items() if isinstance(x, KroneckerLayer)},
            {n: x for n, x in layers.items() if isinstance(x, DirectLayer)},
            {name: seen[name] for name in layers},
            [name for name in trainable_names(model) if name not in taken],
            padded,
        )


def _repeatable(model: nn.Module, inputs: Inputs) -> dict[str, Layer]:
    """Return the parameters ``[1, ...]`` for which the model takes rows, by name."""
    found = dict[str, Layer]()
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(prefix, recurse=False):
            by_type = layer_of(module, name, None) is not None
            if p.requires_grad and p.dim() > 1 and len(p) == 1 and not by_type:
                found[name] = RepeatedRow(module, name, None)
    if not found:
        return {}
    rows = concatenated([inputs[:1]] * _ROWS)
    with torch.no_grad():
        outputs = rows(model)
    # One by one: an adapter's zero factor would hide what becomes of the other.
    return {k: v for k, v in found.items() if _takes_rows(model, rows, outputs, {k: v})}


def _takes_rows(
    model: nn.Module, rows: Inputs, outputs: Tensor, row: Mapping[str, Layer]
) -> bool:
    """Return whether rows in a parameter's place, one an example, change nothing."""
    try:
        with torch.no_grad():
            again, _ = tapped_forward(model, rows, row)
        off, size = (widened(x).norm() for x in (outputs - again, outputs))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False  # it repeats them itself
    return bool(off <= _TOLERANCE * size)  # or else it looks at their shape


def _fitting(
    model: nn.Module, inputs: Inputs, layers: Mapping[str, Layer], max_bytes: int
) -> int:
    """Return about how many examples' activations and gradients fit in memory."""
    few = concatenated([inputs[:_FEW]] * 2)[:_FEW]
    outputs, taps = tapped_forward(model, few, layers)
    activations = sum(each[0].inputs.numel() for each in taps.values() if each)
    entries = 2 * activations + 4 * outputs.numel()
    # Two at least, since one example alone mixes with no other.
    return max(2, max_bytes * len(few) // (entries * outputs.itemsize))


def layers_by_type(model: nn.Module) -> dict[str, Layer]:
    """Return the layers whose type has a form, by their modules' names.

    Something of them is trained, and they share no parameter with another module.
    """
    modules = [
        (name, module, {k: p for k, p in module._parameters.items() if p is not None})
        for name, module in model.named_modules()
    ]
    owners = Counter(id(p) for *_, owned in modules for p in owned.values())
    layers = {}
    for name, module, owned in modules:
        prefix = f"{name}." if name else ""
        trained = {
            k: f"{prefix}{k}" for k, p in owned.items() if p.requires_grad and p.numel()
        }
        alone = all(owners[id(parameter)] == 1 for parameter in owned.values())
        if alone and trained and trained.keys() <= {"weight", "bias"}:
            layer = layer_of(module, trained.get("weight"), trained.get("bias"))
            if layer is not None:
                layers[name] = layer
    return layers


def passing(
    inputs: Inputs,
    layers: Mapping[str, Layer],
    outputs: Tensor,
    taps: Mapping[str, list[Tap]],
) -> tuple[dict[str, Layer], bool]:
    """Return the layers whose form gives each example's gradient, as autograd does.

    And whether there is padding: tokens that act on no output, by no layer.

    Parameters
    ----------
    inputs : Inputs
        At least two examples.
    layers : Mapping[str, Layer]
        The layers to check.
    outputs, taps
        What :func:`tapped_forward` returned for them.
    """
    # First, what needs no gradient: one call, with a row for each example, whose shapes
    # are those of the layer's own operation.
    calls = {
        name: taps[name][0]
        for name, layer in layers.items()
        if len(taps[name]) == 1 and _fits(layer, taps[name][0], len(inputs))
    }
    if not calls:
        return {}, False
    edges = [call.edge() for call in calls.values()]
    counts = [len(layers[name].names) for name in calls]
    leaves = [get_gradient_edge(p) for name in calls for p in layers[name].parameters()]
    generator = torch.Generator().manual_seed(0)
    of_one = outputs.reshape(len(inputs), -1)[:, 0]
    v, c = (drawn(Tensor.normal_, each, generator) for each in (outputs, of_one))
    grad = partial(torch.autograd.grad, outputs, allow_unused=True)
    first = grad(edges + leaves, v, retain_graph=True)
    second = grad(edges, v * _rows(c, v))
    of_leaves = iter(first[len(edges) :])
    seen = dict[str, _Seen]()
    for name, r, r_again, count in zip(calls, first, second, counts, strict=False):
        gradients = [next(of_leaves) for _ in range(count)]
        missing = [each is None or each.is_sparse for each in gradients]
        if r is not None and r_again is not None and not any(missing):
            layer, inputs_of = layers[name], calls[name].inputs
            seen[name] = _Seen(layer, inputs_of, r, widened(r_again), gradients)
    if not seen:
        return {}, False
    passed = {
        name: layers[name]
        for name, is_silent in _passed(seen, c).items()
        if not is_silent or _passes_alone(seen[name], c)
    }
    return passed, _has_padding(seen)


class _Seen(NamedTuple):
    """What two backward passes show of a layer: its input, r, r again, gradients."""

    layer: Layer
    inputs: Tensor
    r: Tensor
    r_again: Tensor
    gradients: list[Tensor]


def _fits(layer: Layer, call: Tap, count: int) -> bool:
    if isinstance(layer, EmbeddingRows) and call.inputs.is_floating_point():
        return False  # a subclass that looks up something else
    # `shape[0]`, too: a norm's or an embedding's shapes fit with any rows.
    has_rows = len(call.inputs) == count and call.shape[:1] == (count,)
    used = call.output is not None and has_rows
    return used and layer.fits(call.inputs.shape, call.shape)


def _passes_alone(seen: _Seen, c: Tensor) -> bool:
    """Return whether a layer passes if it is called by itself, on drawn inputs.

    A batch shows nothing of a layer whose gradient is 0, as that of blank images is:
    any form explains it.
    """
    layer, x, generator = seen.layer, seen.inputs, torch.Generator().manual_seed(0)
    if isinstance(layer, RepeatedRow):
        return True  # there is no call
    if x.is_floating_point():
        x = drawn(Tensor.normal_, x, generator)
    else:  # other rows of an embedding
        x = (x + 1) % len(layer.parameters()[0])
    try:
        output = layer.layer(x)
        r = drawn(Tensor.normal_, output, generator)
        gradients = list(torch.autograd.grad(output, layer.parameters(), r))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False  # it takes more than its input
    again = widened(r) * _rows(c, r).to(widened(r))
    return bool(_passed({"": _Seen(layer, x, r, again, gradients)}, c))


def _has_padding(seen: Mapping[str, _Seen]) -> bool:
    """Return whether a token's gradient is 0 at all layers with this number of tokens.

    At some of them it is 0 where only a class token is read. A convolution is not
    asked: a maximum leaves out some of its positions by chance.
    """
    acting = dict[int, Tensor]()
    for each in seen.values():
        if isinstance(each.layer, LinearLayer) and each.r.dim() > 2:
            acts = each.r.ne(0).any(-1).flatten(1)
            acting[acts.shape[1]] = acts | acting.get(acts.shape[1], acts)
    return any(not acts.all() for acts in acting.values())


def _passed(seen: Mapping[str, _Seen], c: Tensor) -> dict[str, bool]:
    """Return which layers pass, and whether one of their gradients is 0.

    All are compared at once, in few operations.
    """
    every = list(seen.values())
    wide = [widened(each.r) for each in every]
    # 1. Each row depends on its own example alone.
    wanted = torch._foreach_mul(wide, [_rows(c, r).to(r) for r in wide])
    norms = _norms_of_rows(wanted)
    torch._foreach_sub_(wanted, [each.r_again for each in every])
    errors = _norms_of_rows(wanted)
    del wanted  # as large as all outputs of layers
    # Row by row: the two rows of examples that change places are few among many.
    tolerance = max(_tolerance(each.r.dtype) for each in every)
    typical = norms.square().mean(1, keepdim=True).sqrt()
    own = errors.le(2 * tolerance * (norms + typical)).all(1)
    # 2. The examples' gradients add up to autograd's, parameter by parameter: a
    # weight's gradient may be far smaller than that of the bias.
    sums = [widened(x) for each in every for x in _summed(each)]
    gradients = [widened(x) for each in every for x in each.gradients]
    # Under autocast gradients are in float32, but their sums are rounded as outputs.
    dtypes = {x.dtype for each in every for x in (each.r, *each.gradients)}
    tolerance = max(map(_tolerance, dtypes))
    distances = torch._foreach_norm(torch._foreach_sub(sums, gradients))
    # A bias before a norm has no other gradient than rounding. A weight's gradients are
    # products.
    sizes = torch._foreach_norm(wide, 1)
    columns = [k for k, x in enumerate(every) if isinstance(x.layer, KroneckerLayer)]
    products = dict[int, Tensor]()
    if columns:
        pairs = [wide[k] for k in columns], [widened(every[k].inputs) for k in columns]
        found = torch._foreach_mul(*(torch._foreach_norm(list(x)) for x in pairs))
        products = dict(zip(columns, found, strict=True))
    rounding = list[Tensor]()
    for k, each in enumerate(every):
        rounding += [sizes[k]] * len(each.gradients)
        if k in products:
            rounding[-len(each.gradients)] = products[k]
    unit = _ROUNDINGS * max(torch.finfo(x.dtype).eps for x in wide)
    lengths = torch.stack(list(torch._foreach_norm(gradients)))
    most = tolerance * lengths + unit * torch.stack(rounding)
    equal = torch.stack(list(distances)).le(most)
    # A device is waited for once.
    answers = iter(torch.cat([own, equal, lengths.eq(0)]).tolist())
    owns = [next(answers) for _ in every]
    equals, zeros = (
        [[next(answers) for _ in each.gradients] for each in every] for _ in range(2)
    )
    of_names = zip(seen, owns, equals, zeros, strict=True)
    return {k: any(zero) for k, is_own, same, zero in of_names if is_own and all(same)}


def _norms_of_rows(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(x.flatten(1), dim=1) for x in tensors])


def _summed(seen: _Seen) -> list[Tensor]:
    """Return the sums of the examples' gradients, as the layer's form computes them."""
    layer, inputs, r, *_ = seen
    size = len(inputs)
    if isinstance(layer, KroneckerLayer):  # whose columns may be large
        entries = _AT_ONCE if inputs.device.type == "cpu" else _AT_ONCE_ELSEWHERE
        size = max(1, entries // layer.num_column_entries(inputs.shape))
    parts = zip(torch.split(inputs, size), torch.split(r, size), strict=True)
    first, *others = [layer.gradients(a, g) for a, g in parts]
    for terms in others:
        torch._foreach_add_(first, terms)
    return first


def _tolerance(dtype: torch.dtype) -> float:
    return max(_TOLERANCE, 4 * torch.finfo(dtype).eps)


def _rows(values: Tensor, like: Tensor) -> Tensor:
    """Return ``[n]`` as ``[n, 1, …]``, with as many axes as `like`."""
    return values.view(-1, *[1] * (like.dim() - 1))
