"""One scale for all clients' layers in front of a batch norm, before a merge."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from flwr_fisher.curvature.batch import Inputs
from flwr_fisher.curvature.batches import batches_of
from flwr_fisher.curvature.models import evaluating
from flwr_fisher.log_lines import logger
from flwr_fisher.merge.batch_norms import MEAN, VARIANCE
from flwr_fisher.merge.refresh import norms_by_prefix
from flwr_fisher.params import Params

_EXAMPLES = 32  # that are looked at
_MOST = 10  # times the layer's median factor, for a channel that is hardly used


def align_scales(model: nn.Module, loader: Iterable[Any], like: Params) -> list[str]:
    r"""Scale what batch norms take in as another model does; outputs stay as they are.

    The scale of a layer in front of a batch norm does not matter to the network, and
    clients end at scales of their own. A mean of rows at unlike scales, by a Fisher or
    without, is mostly the longest row. So before a Fisher is taken, each row :math:`w`
    of such a layer, and its bias, becomes

    .. math:: c\,w, \qquad c = \sqrt{(v' + \epsilon) / (v + \epsilon)},

    where :math:`v` is the norm's running variance, :math:`v'` that of the model in
    `like`, and :math:`\epsilon` the norm's; the running variance becomes :math:`v'`,
    the running mean :math:`c` times what it was. A channel that is hardly used has at
    most 10 times the median factor of its layer. In eval mode the network computes what
    it did, which is tried on a batch: where it does not (the layer's output is used
    elsewhere, too), a layer is left as it was.

    Parameters
    ----------
    model : nn.Module
        Trained. Changed in place: weights and biases of linear layers and convolutions
        whose output a batch norm takes in as it is, and that norm's statistics. Frozen
        layers, and norms without running statistics, are left alone.
    loader : Iterable
        Its first batch is looked at; as for
        :func:`~flwr_fisher.merge.refresh_norms`.
    like : Mapping[str, Tensor]
        Running variances, by name, that are the same for all clients: those of the
        model that they began with. Norms that are not in it are left alone.

    Returns
    -------
    list[str]
        The names of the layers that were scaled.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, eps=0))
    >>> start = {k: v.clone() for k, v in model.state_dict().items()}
    >>> _ = model[0].weight.data.fill_(3.0), model[1].running_var.fill_(4.0)
    >>> align_scales(model, [torch.ones(2, 1)], start)
    ['0']
    >>> model[0].weight.item(), model[1].running_var.item()
    (1.5, 1.0)
    """
    prefixes = {norm: prefix for prefix, norm in norms_by_prefix(model).items()}
    known = {n: p for n, p in prefixes.items() if p + VARIANCE in like}
    if not known:
        return []
    device = next(iter(known)).get_buffer(VARIANCE).device
    batch = next(iter(batches_of(loader, model, device)), None)
    if batch is None:
        return []
    inputs = batch.inputs[:_EXAMPLES]
    # A model that was compiled would not see what is hooked to it since.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        pairs = [
            _Pair(layer, norm, like[known[norm] + VARIANCE])
            for layer, norm in _followed(model, inputs)
            if norm in known and _fits(layer, norm)
        ]
        done = _scaled(model, inputs, pairs)
    names = {module: name for name, module in model.named_modules()}
    if len(done) < len(pairs):
        kept = [names[pair.layer] for pair in pairs if pair not in done]
        logger.info(
            "layers before batch norms that are used elsewhere, too, keep their own "
            "scale: %s",
            ", ".join(kept),
        )
    return [names[pair.layer] for pair in done]


@dataclass(frozen=True, eq=False)
class _Pair:
    """A layer, the norm that takes in its output, and the variance to be had there."""

    layer: nn.Module
    norm: _BatchNorm
    variance: Tensor

    def tensors(self) -> list[Tensor]:
        """Return what is scaled: the layer's parameters, the mean, the variance."""
        own = list(self.layer.parameters(recurse=False))
        return [*own, self.norm.get_buffer(MEAN), self.norm.get_buffer(VARIANCE)]

    def scale(self) -> None:
        """Scale the layer's rows, and the norm's statistics with them."""
        *own, mean, variance = self.tensors()
        eps = self.norm.eps
        wanted = self.variance.to(variance)
        factors = ((wanted + eps) / (variance + eps)).sqrt()
        most = factors.median() * _MOST
        reached = (most.square() * (variance + eps) - eps).clamp(min=0)
        after = torch.where(factors > most, reached, wanted)
        factors = factors.clamp(max=most)
        for tensor in own:
            shape = [-1, *(1 for _ in tensor.shape[1:])]
            tensor.mul_(factors.reshape(shape).to(tensor))
        mean.mul_(factors.to(mean))
        variance.copy_(after)


def _scaled(
    model: nn.Module, inputs: Inputs, pairs: Sequence[_Pair]
) -> Sequence[_Pair]:
    """Scale all pairs at once, or one after another; return those that could be."""
    with evaluating(model), torch.no_grad():
        before = inputs(model)

        def same() -> bool:
            after = inputs(model)
            slack = torch.finfo(after.dtype).eps ** 0.5 * before.abs().max()
            return bool((after - before).abs().max() <= slack)

        def kept(some: Sequence[_Pair]) -> bool:
            values = [[t.clone() for t in pair.tensors()] for pair in some]
            for pair in some:
                pair.scale()
            if same():
                return True
            for pair, own in zip(some, values, strict=True):
                for tensor, value in zip(pair.tensors(), own, strict=True):
                    tensor.copy_(value)
            return False

        if kept(pairs):
            return pairs
        return [pair for pair in pairs if kept([pair])]


def _fits(layer: nn.Module, norm: _BatchNorm) -> bool:
    """Return whether a layer has a trained row for each of a norm's channels."""
    own = dict(layer.named_parameters(recurse=False))
    if not isinstance(layer, (nn.Linear, _ConvNd)) or isinstance(
        layer, _ConvTransposeNd
    ):
        return False
    if "weight" not in own or (layer.bias is not None and "bias" not in own):
        return False  # made of other parameters, by weight_norm, say
    trained = all(parameter.requires_grad for parameter in own.values())
    return trained and len(own["weight"]) == norm.num_features


def _followed(model: nn.Module, inputs: Inputs) -> list[tuple[nn.Module, _BatchNorm]]:
    """Return the layers whose output a batch norm takes in as it is, each once."""
    found = list[tuple[nn.Module, _BatchNorm]]()
    calls = list[nn.Module]()
    with evaluating(model), _watched(model, found, calls), torch.no_grad():
        inputs(model)
    return [(a, b) for a, b in found if calls.count(a) == calls.count(b) == 1]


@contextmanager
def _watched(
    model: nn.Module,
    found: list[tuple[nn.Module, _BatchNorm]],
    calls: list[nn.Module],
) -> Iterator[None]:
    """Note calls of layers and norms, and which takes in what another has returned."""
    made: list[tuple[nn.Module, Any]] = []

    def after(module: nn.Module, _: Any, output: Any) -> None:
        calls.append(module)
        made[-1:] = [(module, output)]  # the norm is called next, or not at all

    def before(norm: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        found.extend((layer, norm) for layer, output in made if output is x)

    hooks: list[Any] = []
    for module in model.modules():
        if isinstance(module, (nn.Linear, _ConvNd, _BatchNorm)):
            hooks.append(module.register_forward_hook(after))
        if isinstance(module, _BatchNorm):
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
