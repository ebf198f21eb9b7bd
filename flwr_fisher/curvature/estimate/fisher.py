"""The Fisher information of a trained model."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from flwr_fisher.curvature.data import batches_of, some_of
from flwr_fisher.curvature.estimate.engine import Engine
from flwr_fisher.curvature.estimate.likelihood import (
    Expectation,
    Likelihood,
    likelihood_of,
    squared_batch_gradients,
)
from flwr_fisher.curvature.estimate.options import FisherOptions
from flwr_fisher.curvature.models import device_of, evaluating
from flwr_fisher.curvature.operators.base import Curvature
from flwr_fisher.devices import check_float64
from flwr_fisher.errors import DataError, check_whole
from flwr_fisher.log_lines import advance


def fisher(
    model: nn.Module,
    loader: Iterable[Any],
    structure: str = "kfac",
    *,
    options: FisherOptions | None = None,
    likelihood: str | Likelihood = "categorical",
    num_examples: int | None = None,
    seed: int = 0,
    max_batch_bytes: int | None = None,
) -> Curvature:
    r"""Compute a model's Fisher information, a mean over examples.

    .. math:: F = \frac1n \sum_x E_{y \sim p(\cdot|x)}\big[ g_y g_y^\top \big], \qquad
              g_y = \nabla_\theta \log p(y|x)

    (FedFisher, eq. 4). With the default, the expectation is over the model's own
    predictions, so labels are not used: this is the *true* Fisher. The model is
    evaluated in eval mode (without dropout, with batch norm's running statistics). Its
    parameters, buffers, modes and ``.grad`` are left as they were. Frozen parameters
    are not covered.

    Parameters
    ----------
    model : nn.Module
        Maps a batch ``[n, ...]`` to outputs ``[n, C]``, or ``[n, T, C]`` for tokens:
        the classes are the last dimension, not the second as in ``F.cross_entropy``.
    loader : Iterable
        Batches ``(inputs, labels)``, or only ``inputs`` if labels are not used (but a
        class of -100 always means that there is no label); mappings with an entry
        ``label``; or batches of any other form with
        :class:`~flwr_fisher.curvature.MappedLoader`. It is read once.
    structure : "kfac" | "diagonal", default "kfac"
        ``kfac``: a :class:`Kronecker` for each linear or convolution layer that is
        called once. Any other parameter has its exact diagonal, and so has a layer with
        more than 16 384 inputs or outputs, such as a vocabulary's. ``diagonal``: the
        exact diagonal.
    options : FisherOptions, optional
        From which examples and labels, at which cost. By default
        ``FisherOptions.full()``: all examples, and all labels up to a tolerance.
    likelihood : "categorical" | "bernoulli" | "gaussian" | Likelihood
        Softmax over the last dimension (the default); independent sigmoids;
        unit-variance regression; or a :class:`Likelihood` of your own.
    num_examples : int, optional
        How many examples the loader gives. With it, ``options.examples`` are chosen
        from all of them at random; without it they are the first, and no more are read.
    seed : int, default 0
        The seed of all random numbers: labels, signs, grids and examples.
    max_batch_bytes : int, optional
        A limit for unfolded inputs and gradients; a larger batch is computed in parts.
        By default the whole computation takes about as much memory as a training step
        on the batch, or 64 MiB if that is more. On a device other than the CPU, the
        batch may take at least 1 GiB, and the sums take their memory in addition.

    Returns
    -------
    Curvature
        The curvature over the trainable parameters, in the parameters' dtype, summed in
        at least float32.

    Raises
    ------
    ConfigurationError
        If the model has no trainable parameter, or is on a device without float64, such
        as MPS; or if an argument is out of range, not known, or does not fit the
        structure.
    DataError
        If the loader yields no examples, or something else than batches; or if the
        expectation needs the given labels and they do not fit the outputs.
    StructureError
        If the model's output does not fit the likelihood, labels show that its classes
        are not last, or a parameter has neither a Kronecker form nor per-example
        gradients.

    Notes
    -----
    On a GPU the loop waits for the device at most once a batch, or a part of a batch:
    when a tolerance lets it choose its passes.
    Under ``torch.autocast`` the model runs in half precision, and its results are
    multiplied and summed in at least float32. If TF32 is allowed, float32 products have
    the three digits of TF32. Neither changes which structure a layer has. Recurrent
    layers run without cuDNN, which has no backward pass for them in eval mode.

    Examples
    --------
    >>> import torch
    >>> model = nn.Linear(3, 2)
    >>> F = fisher(model, [torch.randn(8, 3)], "kfac")
    >>> {name: tuple(d.shape) for name, d in F.diagonal().items()}
    {'weight': (2, 3), 'bias': (2,)}
    """
    options = FisherOptions.full() if options is None else options
    FisherOptions.of("options", options).check(structure)
    if num_examples is not None:
        check_whole("num_examples", num_examples, 1)
    if max_batch_bytes is not None:
        check_whole("max_batch_bytes", max_batch_bytes, 1)
    device = device_of(model)
    check_float64(device, "move the model to the CPU, model.cpu()")
    expectation = Expectation(likelihood_of(likelihood), options, seed)
    wanted = options.num_examples(num_examples)
    with evaluating(model):
        # Rows are chosen where the data come from, mostly on the CPU: to count them on
        # a GPU is to wait for it.
        batches = batches_of(loader, model, None, report=False)
        if wanted is not None:
            batches = some_of(batches, wanted, num_examples, seed)
        if options.expectation == "empirical-batch":
            return squared_batch_gradients(model, batches, expectation.likelihood)
        engine: Engine | None = None
        for some in batches:
            labelled = expectation.with_labels(some)
            if not len(labelled):
                continue
            batch = labelled.to(device)
            if engine is None:
                engine = Engine(model, batch, structure, expectation, max_batch_bytes)
            engine.add(batch, labelled.labels)
            advance(len(some))
        if engine is None:
            raise DataError(
                "the loader has no examples, or none with a label other than -100, so "
                "it has no Fisher"
            )
        return engine.result()
