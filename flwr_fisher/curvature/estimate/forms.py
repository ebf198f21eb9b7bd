"""The form in which each parameter's gradients are computed, found by a trial.

The trial runs the model on a few examples, and shows which layers' gradients follow
from their inputs and output gradients.

Long: the trial, its guard against lookups that end a process, what it explains, and the
shared parameters are one decision.
"""

import copy
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flwr_fisher.curvature.batch import Inputs, concatenated
from flwr_fisher.curvature.estimate.direct_layers import (
    DirectLayer,
    EmbeddingRows,
    SharedParameter,
)
from flwr_fisher.curvature.estimate.layers import (
    KroneckerLayer,
    is_packed,
    is_transposed,
)
from flwr_fisher.curvature.estimate.taps import Tap, tapped_forward
from flwr_fisher.curvature.estimate.tied_layers import Pair, tied_pairs
from flwr_fisher.curvature.model_checks import (
    check_examples_do_not_mix,
    check_outputs_have_rows,
    refusing_one_batch_size,
)
from flwr_fisher.curvature.models import outputs_with
from flwr_fisher.curvature.sums import widened, within
from flwr_fisher.devices import CPU
from flwr_fisher.params import trainable, trainable_names

_FEW = 5
_EVERY = 3  # each third one has a gradient, not the first: kernels may read it alone
# Relative: larger than rounding, also TF32's; a wrong formula is off by far more.
_TOLERANCE = 5e-3
_ROUNDINGS = 4  # how many units of rounding a sum may be off


class LookupRefusedError(Exception):
    """An operation was about to index a tensor by integers."""


class _NoLookups(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that refuses every operation with integers and floats as inputs.

    All operations that look something up have such inputs. If they are out of range on
    a GPU, they end the process.

    Examples
    --------
    >>> with _NoLookups():
    ...     torch.ones(3)[torch.tensor([4])]
    Traceback (most recent call last):
        ...
    flwr_fisher.curvature.estimate.forms.LookupRefusedError: aten.index.Tensor
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, or raise the error."""
        leaves = tree_leaves((args, kwargs or {}))
        dtypes = {x.dtype for x in leaves if isinstance(x, Tensor)} - {torch.bool}
        others = {x for x in dtypes if x.is_floating_point or x.is_complex}
        if others and dtypes - others:
            raise LookupRefusedError(str(func))
        return func(*args, **(kwargs or {}))


class FormTrial:
    """A trial: outputs and gradients on a few examples, some without a gradient.

    The gradients of these examples must be exactly zero, wherever each row belongs to
    one example.

    Parameters
    ----------
    model : nn.Module
        In eval mode.
    inputs : Inputs
        A batch; the trial takes a few of its examples.
    layers : Mapping[str, KroneckerLayer | DirectLayer]
        The layers whose calls matter.

    Attributes
    ----------
    inputs : Inputs
        The examples of the trial, more than one.
    outputs, direction : Tensor
        What the model returns, and a random gradient with respect to it.
    others : Tensor
        Booleans: which examples have no gradient.
    spread : bool
        Whether each example gets a copy of what a layer makes once for the whole batch.
    calls : dict[str, Tap]
        The call of each layer that was called once.
    at_outputs : dict[str, Tensor | None]
        The gradients of these layers' outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        layers: Mapping[str, KroneckerLayer | DirectLayer],
    ) -> None:
        self.model, self.layers = model, layers
        self.inputs = concatenated([inputs[:_FEW]] * 2)[:_FEW]
        with refusing_one_batch_size(model, inputs, self.inputs):
            outputs, taps = tapped_forward(model, self.inputs, layers, spread=False)
        check_outputs_have_rows(self.inputs, outputs)
        ones = any(len(call.inputs) == 1 for each in taps.values() for call in each)
        self.spread = ones and _may_spread(model, self.inputs, layers, outputs)
        if self.spread:
            outputs, taps = tapped_forward(model, self.inputs, layers)
        calls = {name: each[0] for name, each in taps.items() if len(each) == 1}
        self.calls = {n: call for n, call in calls.items() if call.output is not None}
        generator = torch.Generator().manual_seed(0)
        direction = torch.randn(outputs.shape, generator=generator)
        self.direction = direction.to(outputs, non_blocking=True)
        rows = torch.arange(len(outputs), device=outputs.device)
        self.others = rows % _EVERY != 1
        self.direction.masked_fill_(_column(self.others, outputs), 0)
        self.outputs = outputs.detach()
        trained = list(trainable(model).values())
        edges = [call.edge() for call in self.calls.values()]
        edges += [get_gradient_edge(parameter) for parameter in trained]
        gradients = iter(
            torch.autograd.grad(outputs, edges, self.direction, allow_unused=True)
        )
        self.at_outputs = {name: next(gradients) for name in self.calls}
        self._of = {id(parameter): next(gradients) for parameter in trained}
        # After the gradients, because the model's forward may change weights in place.
        check_examples_do_not_mix(model, self.inputs, self.outputs)

    def reaches_others(self, gradient: Tensor) -> Tensor:
        """Return, as a tensor, whether gradients reach examples that have no loss."""
        return (gradient.ne(0) & _column(self.others, gradient)).any()

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return a trained parameter's gradient, or None if it has no dense one."""
        found = self._of[id(parameter)]
        return None if found is None or found.is_sparse else found

    @property
    def is_guarded(self) -> bool:
        """Whether an index out of range would crash the process, as on a GPU."""
        return self.outputs.device.type != "cpu"

    def guard(self) -> AbstractContextManager[object]:
        """Return a context that refuses lookups, if they could crash the process."""
        if not self.is_guarded:
            return nullcontext()
        return _NoLookups()  # type: ignore[no-untyped-call]

    def on_cpu(self) -> "FormTrial":
        """Return the same trial of a copy of the model on the CPU."""
        own = [*self.model.parameters(), *self.model.buffers()]
        copies: dict[int, Any] = {
            id(x): nn.Parameter(x.detach().cpu(), x.requires_grad)
            if isinstance(x, nn.Parameter)
            else x.detach().cpu()
            for x in own
        }
        model = copy.deepcopy(self.model, copies)
        return FormTrial(model, self.inputs.to(CPU), {})


def _column(rows: Tensor, like: Tensor) -> Tensor:
    """Return booleans ``[n]`` as ``[n, 1, …]``."""
    return rows.view(-1, *[1] * (like.dim() - 1))


def _may_spread(
    model: nn.Module,
    inputs: Inputs,
    layers: Mapping[str, KroneckerLayer | DirectLayer],
    wanted: Tensor,
) -> bool:
    """Return whether the model takes a row for each example in place of one for all."""
    try:
        with torch.no_grad():
            outputs, _ = tapped_forward(model, inputs, layers)
    except Exception:  # whatever a model raises at a shape that it does not expect
        return False
    if outputs.shape != wanted.shape:
        return False
    return bool(agree(outputs, wanted, outputs.dtype))


def agree(computed: Tensor, expected: Tensor, dtype: torch.dtype) -> Tensor:
    """Return, as a tensor, whether two tensors are equal up to rounding in a dtype."""
    tolerance = max(_TOLERANCE, 4 * torch.finfo(dtype).eps)
    return within(tolerance, computed, expected)


_AXES = 3  # the most axes to stretch a parameter along: positions, or an image's


@dataclass(frozen=True)
class Forms:
    """The form of each of a model's trained parameters: Kronecker, direct or shared.

    Parameters
    ----------
    layers : dict[str, KroneckerLayer]
        The layers with a Kronecker form, by their modules' names.
    direct : dict[str, DirectLayer]
        Norms, embeddings and parameters that all examples share, each by a name of its
        own.
    inputs : dict[str, Tensor]
        The inputs of each of these layers for a few examples.
    others : list[str]
        All other parameters.
    spread : bool
        As for :class:`FormTrial`.
    tied : dict[tuple[str, str], Pair]
        Embeddings and heads that share one weight, by their modules' names; `inputs`
        has both.
    """

    layers: dict[str, KroneckerLayer]
    direct: dict[str, DirectLayer]
    inputs: dict[str, Tensor]
    others: list[str]
    spread: bool = False
    tied: dict[tuple[str, str], Pair] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        inputs: Inputs,
        *,
        by_layer: bool = True,
        without: Container[str] = (),
    ) -> "Forms":
        """Find the forms by running the model on a few examples.

        Parameters
        ----------
        model : nn.Module
            In eval mode.
        inputs : Inputs
            A batch; a few of its examples are tried.
        by_layer : bool, default True
            If not, no parameter has a form, but the model is still run.
        without : Container[str], default ()
            The names, as in :attr:`inputs`, of layers that batches call in different
            ways. They have no form.
        """
        if not by_layer:
            FormTrial(model, inputs, {})
            return cls({}, {}, {}, [])
        layers = {n: x for n, x in kronecker_layers(model).items() if n not in without}
        direct = {n: x for n, x in direct_layers(model).items() if n not in without}
        tied = {
            names: pair
            for names, pair in tied_pairs(model).items()
            if not any(name in without for name in names)
        }
        both = {n: x for k, v in tied.items() for n, x in zip(k, v, strict=True)}
        trial = FormTrial(model, inputs, {**layers, **direct, **both})
        calls = explained(trial, [*layers, *direct])
        tied = {n: tied[n] for n in _explained(tied, trial)}
        layers = {name: layers[name] for name in calls if name in layers}
        direct = {name: direct[name] for name in calls if name in direct}
        taken = {p for layer in layers.values() for p in (layer.weight, layer.bias)}
        taken |= {p for layer in direct.values() for p in layer.names.values()}
        taken |= {p for (one, _) in tied.values() for p in one.names.values()}
        others = [name for name in trainable_names(model) if name not in taken]
        shared = shared_parameters(trial, [n for n in others if n not in without])
        used = [*calls, *(name for names in tied for name in names)]
        seen = {name: trial.calls[name].inputs for name in used}
        seen |= {name: each.copies(1) for name, each in shared.items()}
        others = [name for name in others if name not in shared]
        return cls(layers, {**direct, **shared}, seen, others, trial.spread, tied)


def kronecker_layers(model: nn.Module) -> dict[str, KroneckerLayer]:
    """Return the layers that may have a Kronecker form, by their modules' names.

    Their weight is trained, and no other layer has it. The projections of attention are
    last.
    """
    layers = {}
    for name, module, trained in _sole_owners(model):
        bias = not trained.isdisjoint({"bias", "in_proj_bias"})
        layer = KroneckerLayer.of(name, module, bias=bias)
        if layer and layer.own[0] in trained and trained <= {*layer.own}:
            layers[name] = layer
    packed = {n: each for n, each in layers.items() if is_packed(each.layer)}
    return {n: each for n, each in layers.items() if n not in packed} | packed


def direct_layers(model: nn.Module) -> dict[str, DirectLayer]:
    """Return norms and embeddings with parameters that are used in one place only."""
    layers = {}
    for name, module, trained in _sole_owners(model):
        prefix = f"{name}." if name else ""
        names = {own: f"{prefix}{own}" for own in sorted(trained, reverse=True)}
        layer = DirectLayer.of(module, names) if names else None
        if layer is not None:
            # If the weight has another form, its bias has a name of its own.
            alone = "weight" not in layer.names and is_transposed(module)
            layers[layer.names["bias"] if alone else name] = layer
    return layers


def _sole_owners(model: nn.Module) -> list[tuple[str, nn.Module, set[str]]]:
    """Return the trained modules that share no parameter with another module."""
    modules = [
        (name, module, {k: p for k, p in module._parameters.items() if p is not None})
        for name, module in model.named_modules()
    ]
    owners = Counter(id(p) for *_, own in modules for p in own.values())
    return [
        (name, module, {k for k, p in own.items() if p.requires_grad and p.numel()})
        for name, module, own in modules
        if all(owners[id(parameter)] == 1 for parameter in own.values())
    ]


def explained(trial: FormTrial, names: Iterable[str]) -> dict[str, Tap]:
    """Return the call of each layer that the trial explains.

    Its gradients follow from its input and its output's gradient.
    """
    groups = _explained([(name,) for name in names], trial)
    return {name: trial.calls[name] for (name,) in groups}


def explained_layers(
    model: nn.Module, inputs: Inputs, without: type[KroneckerLayer] | UnionType
) -> tuple[dict[str, KroneckerLayer], dict[str, Tap], bool]:
    """Return a model's :func:`explained` layers by name, except for some classes.

    Also return the call of each, and whether `tapped_forward` must spread rows.
    """
    layers = {
        name: layer
        for name, layer in kronecker_layers(model).items()
        if not isinstance(layer, without)
    }
    trial = FormTrial(model, inputs, layers)
    taps = explained(trial, layers)
    return {name: layers[name] for name in taps}, taps, trial.spread


_Names = TypeVar("_Names", bound=Sequence[str])


def _explained(groups: Iterable[_Names], trial: FormTrial) -> list[_Names]:
    """Return the layers for which :func:`_explains` is true, with one device read."""
    answers = [(names, _explains(names, trial)) for names in groups]
    known = [(names, answer) for names, answer in answers if answer is not None]
    flags = torch.stack([answer for _, answer in known]).tolist() if known else []
    return [names for (names, _), true in zip(known, flags, strict=True) if true]


def _explains(names: Sequence[str], trial: FormTrial) -> Tensor | None:
    """Return whether inputs and output gradients reproduce the layers' gradients.

    For several layers that share their parameters, the sum of theirs must. Return None
    if the shapes alone show that they do not.

    They do not if the weight is also used outside the layer's own call, or if a
    subclass computes something else. If the layer's rows are not the batch's examples
    (in a model that folds time into the batch, or puts time first), they do not give an
    example's gradient. Then per-example gradients are computed in another way.
    """
    first = trial.layers[names[0]]
    gradients = [trial.gradient(parameter) for parameter in first.parameters()]
    known = [gradient for gradient in gradients if gradient is not None]
    if len(known) < len(gradients):
        return None
    found: list[list[Tensor]] = []
    foreign: list[Tensor] = []  # whether other examples have a gradient, too
    rounding: list[list[Tensor]] = []  # a bias before a norm has no other gradient
    for name in names:
        layer, output = trial.layers[name], trial.at_outputs.get(name)
        if output is None or len(output) != len(trial.others):
            return None
        inputs = trial.calls[name].inputs
        if not layer.fits(inputs.shape, output.shape):
            return None
        if isinstance(layer, EmbeddingRows) and inputs.is_floating_point():
            return None  # a class of its own looks up something else: BART's, positions
        foreign.append(trial.reaches_others(output))
        found.append(layer.gradients(inputs, output))
        wide = widened(output)
        unit = _ROUNDINGS * torch.finfo(wide.dtype).eps
        rounding.append([unit * wide.abs().sum()] * len(known))
        if isinstance(layer, KroneckerLayer):  # a weight's gradients are products
            norms = torch.linalg.vector_norm(wide), torch.linalg.vector_norm(inputs)
            rounding[-1][0] = unit * norms[0] * norms[1]
    computed, allowed = (
        [torch.stack(each).sum(0) for each in zip(*every, strict=True)]
        for every in (found, rounding)
    )
    equal = [  # one by one: a weight's may be far smaller than the bias's
        agree(a, b, b.dtype) | torch.dist(widened(a), widened(b)).le(least)
        for a, b, least in zip(computed, known, allowed, strict=True)
    ]
    return torch.stack(equal).all() & ~torch.stack(foreign).any()


def shared_parameters(
    trial: FormTrial, names: Sequence[str]
) -> dict[str, SharedParameter]:
    """Return the parameters that the model takes as one copy for each example.

    Notes
    -----
    A model that looks up entries of a parameter may look them up among the copies, out
    of range. On a GPU this would end the process. So a model that looks up anything is
    tried in a copy on the CPU.
    """
    if not names or len(trial.others) != len(trial.inputs):
        return {}
    if not trial.is_guarded:
        return _shared_parameters(trial, names)
    with suppress(LookupRefusedError):
        return _shared_parameters(trial, names)
    try:
        found = _shared_parameters(trial.on_cpu(), names)
    except Exception:  # the model cannot be copied, or cannot run there
        return {}
    return {name: each.in_model(trial.model) for name, each in found.items()}


def _shared_parameters(
    trial: FormTrial, names: Sequence[str]
) -> dict[str, SharedParameter]:
    candidates = {name: list(_candidates(trial.model, name)) for name in names}
    likeliest = [each[0] for each in candidates.values()]
    if _takes(trial, likeliest):
        return {each.name: each for each in likeliest}
    found = {
        name: next((each for each in own if _takes(trial, [each])), None)
        for name, own in candidates.items()
    }
    return {name: each for name, each in found.items() if each is not None}


def _candidates(model: nn.Module, name: str) -> Iterator[SharedParameter]:
    module, _, own = name.rpartition(".")
    layer, shape = model.get_submodule(module), model.get_parameter(name).shape
    if shape[:1] == (1,):  # its first axis stands for the examples
        yield SharedParameter(layer, {own: name}, shape[1:])
    for axes in range(_AXES + 1):
        yield SharedParameter(layer, {own: name}, torch.Size([1] * axes) + shape)


def _takes(trial: FormTrial, candidates: Sequence[SharedParameter]) -> bool:
    """Return whether a run with copies gives the model's own outputs and gradients.

    They are not if copies are mixed up with something that is no example, or if the
    model has no place for them.
    """
    copies = {each.name: each.copies(len(trial.inputs)) for each in candidates}
    try:
        with trial.guard():
            outputs = outputs_with(trial.model, copies, trial.inputs)
        rows = torch.autograd.grad(
            outputs, list(copies.values()), trial.direction, allow_unused=True
        )
        one = {each.name: each.copies(1) for each in candidates}
        with trial.guard():  # one example may take another kernel
            alone = outputs_with(trial.model, one, trial.inputs[:1])
    except LookupRefusedError:
        raise
    except Exception:  # whatever a model raises at a shape that it does not expect
        return False
    for some, own in ((outputs, trial.outputs), (alone, trial.outputs[:1])):
        if some.shape != own.shape or not agree(some, own, some.dtype):
            return False
    for candidate, gradient in zip(candidates, rows, strict=True):
        wanted = trial.gradient(candidate.parameters()[0])
        if wanted is None or gradient is None or trial.reaches_others(gradient):
            return False
        (total,) = candidate.gradients(copies[candidate.name], gradient)
        if not agree(total, wanted, wanted.dtype):
            return False
    return True
