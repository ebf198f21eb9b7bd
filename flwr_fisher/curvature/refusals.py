"""Which of torch's errors say that it has no such derivative."""

_SAID = (
    *("not implemented", "not been implemented", "does not support", "forward AD"),
    *("jvp", "vmap", "functorch", "torch.func", "torch.utils.checkpoint"),
    # vmap: the memory of a wrapped tensor, and a GRU's and LSTM's own steps.
    *("Cannot access", "the broadcast shape"),
)


def is_refusal(error: RuntimeError) -> bool:
    """Return whether torch refuses a transformation, and nothing else went wrong.

    Examples
    --------
    >>> is_refusal(RuntimeError("vmap: we don't support .item()"))
    True
    >>> is_refusal(RuntimeError("CUDA out of memory"))
    False
    """
    return isinstance(error, NotImplementedError) or any(s in str(error) for s in _SAID)
