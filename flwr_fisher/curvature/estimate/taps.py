"""A record of the layers' calls in one forward pass: their inputs and outputs.

Long: beside the record is what makes each layer's call visible to it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.backends import mha
from torch.overrides import TorchFunctionMode

from flwr_fisher.curvature.batch import Inputs
from flwr_fisher.curvature.estimate.direct_layers import DirectLayer, SharedParameter
from flwr_fisher.curvature.estimate.layers import (
    ByLayer,
    KroneckerLayer,
    PackedProjection,
    is_packed,
    prepares_inputs,
)
from flwr_fisher.curvature.model_checks import check_examples_do_not_mix
from flwr_fisher.curvature.models import outputs_with
from flwr_fisher.errors import StructureError


@contextmanager
def layer_by_layer(
    model: nn.Module, record: Callable[[str, Tensor, Tensor], object] | None = None
) -> Iterator[None]:
    """Compute packed self-attention from its layers; the result is the same.

    Parameters
    ----------
    model : nn.Module
        In eval mode.
    record : Callable[[str, Tensor, Tensor], object], optional
        Called with a module's name, the tokens ``[n, T, E]`` and their queries, keys
        and values ``[n, T, 3 E]``. Without it the block is for backward passes, in
        which checkpointed parts of a model are computed again.
    """
    with ExitStack() as stack:
        # Encoder layers have a fast path of their own, which calls no module.
        stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
        for name, module in model.named_modules():
            if is_packed(module):
                if (outer := vars(module).get("forward")) is None:
                    stack.callback(module.__dict__.pop, "forward")
                else:
                    stack.callback(setattr, module, "forward", outer)
                note = partial(record, name) if record else _unrecorded
                module.forward = ByLayer(_forward, module, note)
        yield


def _unrecorded(*_: object) -> None: ...


@contextmanager
def _convolutions(
    modules: Mapping[str, nn.Module], calls: dict[str, list[tuple[Tensor, Tensor]]]
) -> Iterator[None]:
    """Record convolutions inside modules that change their inputs first.

    Parameters
    ----------
    modules : Mapping[str, nn.Module]
        Convolutions with a ``forward`` of their own.
    calls : dict[str, list[tuple[Tensor, Tensor]]]
        After each module's call: its convolutions' inputs and outputs.
    """

    def forward(name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Convolutions(module.get_parameter("weight")) as seen:
            output = type(module).forward(module, *args, **kwargs)
        calls[name] = seen.calls
        return output

    with ExitStack() as stack:
        for name, module in modules.items():
            module.forward = partial(forward, name, module)
            stack.callback(module.__dict__.pop, "forward")
        yield


_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)


class _Convolutions(TorchFunctionMode):
    """Notes the inputs and outputs of convolutions with one weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.calls = weight, list[tuple[Tensor, Tensor]]()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and record a convolution."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func in _CONVOLUTIONS:
            inputs = args[0] if args else kwargs["input"]
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            if weight is self.weight:
                self.calls.append((inputs, output))
        return output


def _forward(
    module: nn.MultiheadAttention,
    record: Callable[[Tensor, Tensor], object],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute the module's ``forward`` layer by layer if it is plain self-attention."""
    if not (query is key is value and query.dim() == 3):
        return nn.MultiheadAttention.forward(
            module,
            query,
            key,
            value,
            key_padding_mask,
            need_weights,
            attn_mask,
            average_attn_weights,
            is_causal,
        )
    tokens = query if module.batch_first else query.transpose(0, 1)
    packed = F.linear(tokens, module.in_proj_weight, module.in_proj_bias)
    record(tokens, packed)
    heads = (*packed.shape[:2], 3, module.num_heads, -1)
    q, k, v = packed.view(heads).permute(2, 0, 3, 1, 4)
    mask = _mask(attn_mask, key_padding_mask, q)
    weights = None
    if need_weights:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        weights = (scores if mask is None else scores + mask).softmax(-1)
        seen = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        seen = F.scaled_dot_product_attention(q, k, v, mask)
    output = module.out_proj(seen.transpose(1, 2).flatten(2))
    return output if module.batch_first else output.transpose(0, 1), weights


def _mask(
    attention: Tensor | None, padding: Tensor | None, like: Tensor
) -> Tensor | None:
    """Return the mask to add to the scores ``[n, heads, T, T]``."""
    n, heads, count, _ = like.shape
    masks = []
    if attention is not None:
        each = (n, heads) if attention.dim() == 3 else (1, 1)
        masks.append(_added(attention, like).view(*each, count, count))
    if padding is not None:
        masks.append(_added(padding, like).view(n, 1, 1, count))
    return sum(masks[1:], masks[0]) if masks else None


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask in its additive form: minus infinity where it is true."""
    if mask.dtype != torch.bool:
        return mask.to(like)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)


class UnlikeCallsError(StructureError):
    """A later batch calls some layers in another way than the first batch did.

    Parameters
    ----------
    layers : Sequence[str]
        Their names.
    calls : str
        What is unlike, a clause.
    """

    def __init__(self, layers: Sequence[str], calls: str) -> None:
        self.layers = tuple(layers)
        super().__init__(
            f"{calls}, as in a mixture of experts. Then gradients are taken example by "
            "example, but for this the loader must be read again: pass a DataLoader, "
            "or a list of batches"
        )


@dataclass(frozen=True)
class Tap:
    """One call of one layer: its input, and the graph edge of its output."""

    inputs: Tensor
    # An edge, not the tensor: it stays right when a later ReLU works in place. There is
    # none without gradients.
    output: GradientEdge | None

    def edge(self) -> GradientEdge:
        """Return the graph edge of the layer's output."""
        assert self.output is not None
        return self.output


def tapped_forward(
    model: nn.Module,
    inputs: Inputs,
    layers: Mapping[str, KroneckerLayer | DirectLayer],
    *,
    spread: bool = True,
) -> tuple[Tensor, dict[str, list[Tap]]]:
    """Run the model once; return its output and every call of the given layers.

    Parameters
    ----------
    model : nn.Module
        The model.
    inputs : Inputs
        A batch.
    layers : Mapping[str, KroneckerLayer | DirectLayer]
        The layers to record, from :func:`kronecker_layers` and :func:`direct_layers`.
    spread : bool, default True
        Whether each example gets its own copy of what a layer makes once for the whole
        batch, such as position embeddings. Then each example has a gradient there.
    """
    taps: dict[str, list[Tap]] = {name: [] for name in layers}

    def record(name: str, inputs: Tensor, output: Tensor) -> None:
        if name in taps:
            edge = get_gradient_edge(output) if output.requires_grad else None
            taps[name].append(Tap(inputs.detach(), edge))

    prepared: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def on_call(name: str, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if calls := prepared.pop(name, []):
            for inside in calls:
                record(name, *inside)
            return output
        # Without an input by position there is nothing to record.
        if not (args and isinstance(args[0], Tensor) and isinstance(output, Tensor)):
            return output
        rows, n = args[0], len(inputs)
        if spread and rows.shape[:1] == output.shape[:1] == (1,) and n > 1:
            rows, output = (x.expand(n, *x.shape[1:]) for x in (rows, output))
        record(name, rows, output)
        return output

    copies: dict[str, Tensor] = {}
    handles = []
    for name, layer in layers.items():
        if isinstance(layer, SharedParameter):
            copies[layer.name] = copy = layer.copies(len(inputs))
            taps[name].append(Tap(copy, get_gradient_edge(copy)))
        elif not isinstance(layer, PackedProjection):  # it calls `record`
            hook = layer.layer.register_forward_hook(partial(on_call, name))
            handles.append(hook)
    own = {n: each.layer for n, each in layers.items() if prepares_inputs(each.layer)}
    try:
        with layer_by_layer(model, record), _convolutions(own, prepared):
            return outputs_with(model, copies, inputs), taps
    except (RuntimeError, IndexError) as error:
        if not copies or isinstance(error, torch.OutOfMemoryError):
            raise
        raise UnlikeCallsError(
            [n for n, x in layers.items() if isinstance(x, SharedParameter)],
            f"the model takes a copy of each of {list(copies)} for each example in the "
            f"first batch, and fails with them in another ({error})",
        ) from error
    finally:
        for handle in handles:
            handle.remove()


def tapped_once(
    model: nn.Module,
    inputs: Inputs,
    layers: Mapping[str, KroneckerLayer | DirectLayer],
    *,
    spread: bool,
) -> tuple[Tensor, dict[str, Tap]]:
    """Run the model; return its outputs, and the one call of each layer.

    As :func:`tapped_forward`, for layers that are called once.

    Raises
    ------
    UnlikeCallsError
        If a layer was called several times, or not with one row for each example.
    StructureError
        If that changed an example's outputs.
    """
    outputs, taps = tapped_forward(model, inputs, layers, spread=spread)
    rows = {name: [len(call.inputs) for call in calls] for name, calls in taps.items()}
    unlike = [name for name, each in rows.items() if each != [len(inputs)]]
    if unlike:
        check_examples_do_not_mix(model, inputs, outputs.detach())
        raise UnlikeCallsError(
            unlike,
            f"layer '{unlike[0]}' was called once in the first batch, with a row for "
            f"each example, and in another with {rows[unlike[0]]} rows for "
            f"{len(inputs)} examples",
        )
    return outputs, {name: calls[0] for name, calls in taps.items()}
