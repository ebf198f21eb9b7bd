"""The Fisher information of a trained model.

Long: most of it is one docstring, which says what every option does.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack, overload

import torch
from torch import nn

from flwr_fisher.curvature.batch import Batch
from flwr_fisher.curvature.batches import (
    at_most,
    batches_of,
    check_can_be_read_again,
    count_of,
    reads_at_random,
)
from flwr_fisher.curvature.estimate.engine import Engine
from flwr_fisher.curvature.estimate.expectation import (
    Expectation,
    squared_batch_gradients,
)
from flwr_fisher.curvature.estimate.layers import Positions
from flwr_fisher.curvature.estimate.likelihood import (
    LIKELIHOODS,
    Likelihood,
    likelihood_of,
)
from flwr_fisher.curvature.estimate.memory import examples_at_once
from flwr_fisher.curvature.estimate.model_sums import make_sums
from flwr_fisher.curvature.estimate.options import TOLERANCE, FisherOptions
from flwr_fisher.curvature.models import device_of, evaluating
from flwr_fisher.curvature.operators.base import Curvature
from flwr_fisher.devices import check_float64
from flwr_fisher.errors import ConfigurationError, DataError, check_whole, extra


class _Options(TypedDict, total=False):
    expectation: str
    likelihood: str | Likelihood
    tolerance: float
    num_samples: int
    max_passes: int | None
    max_positions: int | None
    weight_sharing: str
    seed: int
    examples: int | None
    total_passes: int | None
    engine: str
    device: torch.device | str | None
    max_batch_bytes: int | None


@overload
def fisher(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    structure: str = ...,
    **options: Unpack[_Options],
) -> Curvature: ...


@overload
def fisher(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    structure: list[str] | tuple[str, ...],
    **options: Unpack[_Options],
) -> tuple[Curvature, ...]: ...


def fisher(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    structure: str | list[str] | tuple[str, ...] = "kfac",
    expectation: str = "exact",
    likelihood: str | Likelihood = "categorical",
    tolerance: float = TOLERANCE,
    num_samples: int = 1,
    max_passes: int | None = None,
    max_positions: int | None = None,
    weight_sharing: str = "expand",
    seed: int = 0,
    examples: int | None = None,
    total_passes: int | None = None,
    engine: str = "auto",
    device: torch.device | str | None = None,
    max_batch_bytes: int | None = None,
) -> Curvature | tuple[Curvature, ...]:
    r"""Compute a model's Fisher information, a mean over examples.

    .. math:: F = \frac1n \sum_x E_{y \sim p(\cdot|x)}\big[ g_y g_y^\top \big], \qquad
              g_y = \nabla_\theta \log p(y|x)

    (FedFisher, eq. 4). With the default, the expectation is over the model's own
    predictions, so labels are not used: this is the *true* Fisher. The model is
    evaluated in eval mode (without dropout, with batch norm's running statistics) and
    left as it was. Frozen parameters are not covered.

    Parameters
    ----------
    model : nn.Module
        Maps a batch ``[n, ...]`` to outputs ``[n, C]``, or ``[n, T, C]`` for tokens:
        the classes are the last dimension, not the second as in ``F.cross_entropy``.
    loader : Iterable
        Batches ``(inputs, labels)``, or only ``inputs`` if labels are not used (but a
        class of -100 always means that there is no label); mappings with an entry
        ``label``; or batches of any other form with
        :class:`~flwr_fisher.curvature.Pairs`. For ``ekfac`` it is read twice.
    structure : str | list[str] | tuple[str, ...], default "kfac"
        One of the following, or several, which share every pass. ``kfac``: a
        :class:`Kronecker` for each linear or convolution layer (one each for queries,
        keys and values in ``nn.MultiheadAttention``'s self-attention). Any other
        parameter has its exact diagonal, and so has a layer with more than 16 384
        inputs or outputs, such as a vocabulary's. ``ekfac``: an :class:`EigenKronecker`
        in place of the :class:`Kronecker`. ``block``: a :class:`Dense` for each such
        layer. ``diagonal``. ``dense``: the whole matrix. The last four are exact in the
        entries that they have.
    expectation : str, default "exact"
        ``exact``: over all labels, up to `tolerance`. ``sampled``: over labels drawn
        from the model, which is unbiased. ``empirical``: over the given labels, example
        by example; a label of -100, PyTorch's ``ignore_index``, adds nothing.
        ``empirical-batch``: the mean over batches of the squared gradient of a batch's
        mean loss, over its labels without -100 (FedFish's Fisher); for ``diagonal``
        only.
    likelihood : "categorical" | "bernoulli" | "gaussian" | Likelihood
        Softmax over the last dimension (the default); independent sigmoids;
        unit-variance regression; or a :class:`Likelihood` of your own.
    tolerance : float, default 1e-3
        With ``exact``: the share of each batch's :math:`\sum_{x,c} p_c (1 - p_c)` (the
        trace of the Fisher with respect to the outputs) that may be left out to save
        backward passes. With 0 nothing is left out.
    num_samples : int, default 1
        With ``sampled``: how many labels are drawn for each example.
    max_passes : int, optional
        With ``exact``: about how many backward passes an example may cost; by default
        any number. If it would cost more, the result is an unbiased estimate: the most
        likely labels are taken exactly, and one label that is drawn from the others
        represents them. Positions (tokens) share passes, with random signs.
    max_positions : int, optional
        At most how many positions of a layer (of a convolution's output, or tokens)
        count in an example for K-FAC's :math:`A`. For :math:`G`, whose gradients vary
        more, it is twice as many. The positions lie on a grid with a random origin,
        which is unbiased. By default all count.
    weight_sharing : "expand" | "reduce", default "expand"
        How K-FAC's factors are computed if a layer has several positions (Eschenhagen
        et al., NeurIPS 2023). ``expand``: every position is an input of its own
        (:math:`A` is summed over positions, :math:`G` averaged; Grosse & Martens 2016).
        ``reduce``: an example counts with its mean input and its summed gradient. This
        is cheaper, and exact if the model is linear up to a mean over positions.
    seed : int, default 0
        The seed of all random numbers: labels, signs, grids, `examples`. The global
        generators and the loader's own are left as they were, whatever the model and
        the loader draw from them.
    examples : int, optional
        Take a random subset of at most this many examples; by default all. A K-FAC of a
        few hundred examples merges as well as one of ten thousand.
    total_passes : int, optional
        About how many passes, forward or backward, all examples together may take; by
        default any number. Examples are taken in random order until this number of
        passes is reached. From a loader with its own order, a random subset is taken,
        so small that it takes at most this many passes.
    engine : "auto" | "nngeometry", default "auto"
        ``nngeometry`` computes the exact expectation through that library, for
        comparison; it refuses layers for which its result is known to be wrong, and
        also has the structures ``lowrank``, ``quasidiag`` and ``implicit``.
    device : torch.device | str | None
        The model's device; by default that of its first trainable parameter.
    max_batch_bytes : int, optional
        A limit for unfolded inputs and gradients; a larger batch is computed in parts.
        By default the whole computation takes about as much memory as a training step
        on the batch, or 64 MiB if that is more. On a device other than the CPU, the
        batch has 1 GiB at least, and the sums are held beside these.

    Returns
    -------
    Curvature | tuple[Curvature, ...]
        The curvature over the trainable parameters, in the parameters' dtype, summed in
        at least float32. It is a tuple if several structures are named.

    Raises
    ------
    ConfigurationError
        If the model has no trainable parameter, is on another device, or is on a device
        without float64, such as MPS; if an argument is out of range or not known; or if
        the expectation does not fit the structure.
    DataError
        If the loader yields no examples, or something else than batches; or if the
        expectation needs the given labels and they do not fit the outputs.
    StructureError
        If the model's output does not fit the likelihood, labels show that its classes
        are not last, a parameter has neither a Kronecker form nor per-example
        gradients, or a dense matrix would be too large.

    Notes
    -----
    On a GPU the loop waits for the device at most once a batch, or a part of a batch:
    when a tolerance lets it choose its passes, or when labels are checked or drawn.
    Under ``torch.autocast`` the model runs in half precision, and its results are
    multiplied and summed in at least float32. If TF32 is allowed, float32 products have
    the three digits of TF32. Neither changes which structure a layer has. Recurrent
    layers run without cuDNN, which has no backward pass for them in eval mode.

    Examples
    --------
    >>> model = torch.nn.Linear(3, 2)
    >>> F = fisher(model, [torch.randn(8, 3)], structure="kfac")
    >>> {name: tuple(d.shape) for name, d in F.diagonal().items()}
    {'weight': (2, 3), 'bias': (2,)}
    """
    structures = [structure] if isinstance(structure, str) else list(structure)
    FisherOptions(
        expectation=expectation,
        tolerance=tolerance,
        examples=examples,
        max_passes=max_passes,
        max_positions=max_positions,
        weight_sharing=weight_sharing,
    ).check(structures, engine)
    if isinstance(examples, str):  # "auto": only a client knows the number
        raise ConfigurationError(
            f"examples='{examples}' is for FisherOptions only: pass a number to "
            "fisher, None for all examples, or **FisherOptions().for_client(count)"
        )
    check_whole("num_samples", num_samples, 1)
    if num_samples > 1 and expectation != "sampled":
        raise ConfigurationError(
            f"num_samples={num_samples} is for expectation='sampled', not "
            f"'{expectation}': leave it out"
        )
    if max_batch_bytes is not None:
        check_whole("max_batch_bytes", max_batch_bytes, 1)
    device = device_of(model, device)
    check_float64(device, "move the model to the CPU, model.cpu()")
    if total_passes is not None:
        check_whole("total_passes", total_passes, 1)
    over_labels = Expectation(
        likelihood_of(likelihood),
        expectation,
        tolerance if expectation == "exact" else 0.0,
        num_samples,
        max_passes,
        seed,
    )
    readings = 2 if "ekfac" in structures else 1  # K-FAC's eigenbasis comes first
    budget = _Budget(examples, total_passes, over_labels, readings)
    with evaluating(model):
        loader = budget.chosen(loader, model, seed)
        if engine == "nngeometry":
            results = _by_nngeometry(model, loader, device, structures, over_labels)
        elif expectation == "empirical-batch":
            if structures != ["diagonal"]:
                raise ConfigurationError(
                    "expectation='empirical-batch' needs structure='diagonal'"
                )
            batches = batches_of(loader, model, device)
            results = [squared_batch_gradients(model, batches, over_labels.likelihood)]
        else:
            results = _by_examples(
                model,
                loader,
                device,
                structures,
                over_labels,
                budget,
                Positions(max_positions, seed),
                weight_sharing,
                max_batch_bytes,
            )
    return results[0] if isinstance(structure, str) else tuple(results)


@dataclass(frozen=True)
class _Budget:
    """How many examples are taken: a number, or a bound on all their passes.

    Parameters
    ----------
    examples, total_passes : int | None
        As for :func:`fisher`.
    expectation : Expectation
        Knows about how many passes an example takes.
    readings : int
        How often the loader is read, each time with its share of the passes.
    """

    examples: int | None
    total_passes: int | None
    expectation: Expectation
    readings: int

    def chosen(
        self, loader: Iterable[Any], model: nn.Module, seed: int
    ) -> Iterable[Any]:
        """Return a loader of as many examples as the budget allows, at most."""
        most = self.examples
        if self.total_passes is not None:
            each = 1 + self.expectation.passes
            count = count_of(loader)
            if count is not None and count * each <= self.total_passes:
                seed = 0  # all fit, so that their order does not depend on the seed
            if self.expectation.kind == "exact" and reads_at_random(loader):
                each = 1  # a confident example needs no other; `room` ends the reading
            bound = max(1, self.total_passes // each)
            most = bound if most is None else min(most, bound)
        if most is None:
            return loader
        return at_most(loader, model, most, seed, self.total_passes is not None)

    def room(self, engine: Engine) -> float:
        """Return how many more examples an engine may take in this reading."""
        if self.total_passes is None:
            return math.inf
        each: float = 1 + engine.cost * self.expectation.passes
        if engine.count:
            each = engine.passes / engine.count
        total = max(1, self.total_passes // self.readings)
        return math.ceil((total - engine.passes) / each)


def _by_examples(
    model: nn.Module,
    loader: Iterable[Any],
    device: torch.device,
    structures: list[str],
    expectation: Expectation,
    budget: _Budget,
    positions: Positions,
    weight_sharing: str,
    max_batch_bytes: int | None,
) -> list[Curvature]:
    """Read the loader once; twice for E-KFAC, which needs K-FAC's eigenbasis first."""

    def read(wanted: list[str], kfac: Curvature | None = None) -> dict[str, Curvature]:
        engine: Engine | None = None
        for whole in batches_of(loader, model, None):
            # Rows are chosen where the labels come from, mostly on the CPU: to count
            # them on a GPU is to wait for it.
            labelled = expectation.with_labels(whole)
            if not len(batch := labelled.to(device)):
                continue
            engine = engine or begun(batch, wanted, kfac)
            if (room := budget.room(engine)) <= 0:
                break
            if room < len(batch):
                batch = labelled[: int(room)].to(device)
            engine.add(batch)
        if engine is None:
            again = "" if kfac is None else "when it is read again, "
            raise DataError(
                f"{again}the loader has no examples, or none with a label other than "
                "-100, so it has no Fisher"
            )
        return engine.results(wanted)

    def begun(batch: Batch, wanted: list[str], kfac: Curvature | None) -> Engine:
        forms, sums = make_sums(
            model, batch.inputs, wanted, weight_sharing, kfac, max_batch_bytes
        )
        chunk = examples_at_once(
            model, forms, sums, positions, len(batch), max_batch_bytes
        )
        return Engine(model, sums, expectation, positions, chunk)

    if "ekfac" not in structures:
        results = read(structures)
    else:
        check_can_be_read_again(loader, "structure='ekfac' reads the loader twice")
        first = [name for name in structures if name != "ekfac"]
        results = read(first if "kfac" in first else [*first, "kfac"])
        results |= read(["ekfac"], results["kfac"])
    return [results[name] for name in structures]


def _by_nngeometry(
    model: nn.Module,
    loader: Iterable[Any],
    device: torch.device,
    structures: list[str],
    expectation: Expectation,
) -> list[Curvature]:
    with extra("nngeometry"):
        from flwr_fisher.curvature.estimate.nngeometry_engine import nngeometry_fisher

    softmax = expectation.likelihood is LIKELIHOODS["categorical"]
    if expectation.kind != "exact" or not softmax:
        raise ConfigurationError(
            "engine='nngeometry' needs expectation='exact' over classes"
        )
    batches = [batch.inputs for batch in batches_of(loader, model, device)]
    return [nngeometry_fisher(model, batches, name) for name in structures]
