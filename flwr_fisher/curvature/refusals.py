"""Which of torch's errors say that it has no such derivative."""

import torch

_SAID = (
    *("not implemented", "not been implemented", "does not support", "forward AD"),
    *("jvp", "vmap", "functorch", "torch.func", "torch.utils.checkpoint"),
    # vmap: the memory of a tensor that it has wrapped, and a GRU's and LSTM's own steps.
    *("Cannot access", "the broadcast shape"),
)


def is_refusal(error: RuntimeError) -> bool:
    """Return whether torch refuses a transformation, and nothing else went wrong.

    Examples
    --------
    >>> is_refusal(RuntimeError("vmap: we don't support .item()"))
    True
    >>> is_refusal(torch.OutOfMemoryError("CUDA out of memory"))
    False
    """
    if isinstance(error, torch.OutOfMemoryError):
        return False
    said = str(error)
    return isinstance(error, NotImplementedError) or any(x in said for x in _SAID)
