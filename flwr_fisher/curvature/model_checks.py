"""Checks of a model by a few examples: whether each example has outputs of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_fisher.curvature.batch import Inputs
from flwr_fisher.curvature.kept_model import attributes_of
from flwr_fisher.curvature.models import REENTRANT
from flwr_fisher.curvature.sums import within
from flwr_fisher.errors import FlwrFisherError, StructureError
from flwr_fisher.randomness import rewinding, seeded


def check_examples_are_independent(model: nn.Module, consequence: str) -> None:
    """Raise :class:`StructureError` for a batch norm without running statistics.

    `consequence` says what cannot be computed then, in a clause of the error.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise StructureError(
                f"layer '{name}' normalises by the statistics of each batch, so "
                f"{consequence}: use track_running_stats=True, or group norm"
            )


_LEAST = 0.05  # relative: far above the rounding of other kernels, TF32's too
_AGAIN = 1e-3  # of the same kernels


@contextmanager
def refusing_one_batch_size(
    model: nn.Module, whole: Inputs, few: Inputs
) -> Iterator[None]:
    """Raise :class:`StructureError` where a model takes a whole batch, but not a few.

    Torch's own error speaks of shapes deep in the model.
    """
    try:
        yield
    except (FlwrFisherError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        try:
            whole(model)
        except Exception:
            raise error from None
        raise StructureError(
            f"the model takes a batch of {len(whole)} examples, but fails on "
            f"{len(few)} ({error}): in place of a fixed batch size, use the number of "
            "examples that its forward is given, such as x.shape[0]"
        ) from error


def check_outputs_have_rows(inputs: Inputs, outputs: Tensor) -> None:
    """Raise unless each example has a row of outputs, with gradients.

    Raises
    ------
    StructureError
        If outputs have another first dimension, or depend on no trainable parameter,
        or torch would leave some of these out.
    """
    n = len(inputs)
    if outputs.shape[:1] != (n,):
        raise StructureError(
            f"the model's outputs have shape {tuple(outputs.shape)} for {n} examples, "
            "but must have a row for each: undo what joins examples with something "
            "else, outputs.unflatten(0, (n, -1)) for example, in the model or in an "
            "output_fn; inputs must have the examples first, too"
        )
    if not (outputs.requires_grad and outputs.is_floating_point()):
        raise StructureError(
            "the model's outputs depend on no trainable parameter, or not by real "
            "numbers, so they have no gradient: return logits, before any argmax() or "
            "detach(), and without torch.no_grad"
        )
    check_is_not_reentrant(outputs)


def check_is_not_reentrant(outputs: Tensor) -> None:
    """Raise :class:`StructureError` for outputs through a reentrant checkpoint.

    Its graph does not contain its parameters. Torch raises an error only if a gradient
    is computed through the checkpoint, and not if the graph begins at the inputs.
    """
    if any(node.name() == "CheckpointFunctionBackward" for node in nodes_of(outputs)):
        raise StructureError(f"the model {REENTRANT}")


def nodes_of(outputs: Tensor) -> set[Any]:
    """Return the nodes of autograd's graph of a tensor."""
    nodes = set[Any]()
    waiting: list[Any] = [outputs.grad_fn]
    while waiting:
        if (node := waiting.pop()) is not None and node not in nodes:
            nodes.add(node)
            waiting += [each for each, _ in node.next_functions]
    return nodes


def check_examples_do_not_mix(
    model: nn.Module, inputs: Inputs, outputs: Tensor
) -> None:
    """Raise unless an example's outputs are its own.

    Parameters
    ----------
    model : nn.Module
        In eval mode. It is called again; a graph of its outputs may be of no use then.
    inputs : Inputs
        Several examples.
    outputs : Tensor
        What the model returned for them.

    Raises
    ------
    StructureError
        If outputs depend on the other examples of a batch, or on former calls.

    Notes
    -----
    Where outputs differ from call to call by random numbers, or the model takes no
    single example, nothing is known of other examples.
    """
    if not _near(inputs(model), outputs, _AGAIN):
        _check_keeps_nothing(model, inputs)
        return
    try:
        alone = inputs[:1](model)
    except Exception:  # a model may take no single example
        return
    if not _near(alone, outputs[:1]):
        raise StructureError(
            "the model's outputs of an example depend on the other examples of its "
            "batch, in eval mode, too, so an example has no gradient of its own: use "
            "nothing that is of the whole batch, such as x.mean(0)"
        )


def _check_keeps_nothing(model: nn.Module, inputs: Inputs) -> None:
    """Raise unless a model's outputs are the same in each call, but for randomness."""
    outputs, rewind = [], rewinding(attributes_of(model))
    for _ in range(2):
        with seeded(0):
            outputs.append(inputs(model))
        for each in rewind:
            each()
    if not _near(outputs[1], outputs[0], _AGAIN):
        raise StructureError(
            "the model's outputs of the same examples differ from call to call, and "
            "not by random numbers: it keeps something, such as a hidden state. Begin "
            "each call of forward from the same state"
        )


def _near(found: Tensor, wanted: Tensor, least: float = _LEAST) -> bool:
    """Return whether outputs are equal, or not finite."""
    if found.shape != wanted.shape:
        return False
    tolerance = max(least, 16 * torch.finfo(wanted.dtype).eps)
    near = within(tolerance, found, wanted)
    return bool(near | ~wanted.isfinite().all())
