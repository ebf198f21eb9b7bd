"""Self-attention whose projections PyTorch packs in one parameter, layer by layer.

``nn.MultiheadAttention`` hands its parameters to a function, and calls no layer. Here
it is computed from the layers that it is made of, so that they are seen.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import mha


def is_packed(module: nn.Module) -> bool:
    """Return whether a module is attention with one parameter for its projections."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
        and module.in_proj_weight is not None
        and module.bias_k is None
        and not module.add_zero_attn
    )


@contextmanager
def layer_by_layer(
    model: nn.Module, record: Callable[[str, Tensor, Tensor], None]
) -> Iterator[None]:
    """Compute packed self-attention from its layers; the result is the same.

    Parameters
    ----------
    model : nn.Module
        In eval mode.
    record : Callable[[str, Tensor, Tensor], None]
        Called with a module's name, the tokens ``[n, T, E]`` and their queries, keys
        and values ``[n, T, 3 E]``.
    """
    with ExitStack() as stack:
        # Encoder layers have a fast path of their own, which calls no module.
        stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
        for name, module in model.named_modules():
            if is_packed(module):
                forward = partial(_forward, module, partial(record, name))
                module.forward = forward
                stack.callback(module.__dict__.pop, "forward")
        yield


def _forward(
    module: nn.MultiheadAttention,
    record: Callable[[Tensor, Tensor], None],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Do what the module's own ``forward`` does, by its layers where it is plain."""
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
    """Return what is added to the scores ``[n, heads, T, T]``."""
    n, heads, count, _ = like.shape
    masks = []
    if attention is not None:
        each = (n, heads) if attention.dim() == 3 else (1, 1)
        masks.append(_added(attention, like).view(*each, count, count))
    if padding is not None:
        masks.append(_added(padding, like).view(n, 1, 1, count))
    return sum(masks[1:], masks[0]) if masks else None


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask as what is added: minus infinity where it is true."""
    if mask.dtype != torch.bool:
        return mask.to(like)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)
