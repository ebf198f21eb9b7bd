"""Tangent features: entries of an example's gradient at random coordinates."""

import hashlib
import json

import numpy as np
import torch
from torch import Tensor, nn

from flwr_fisher.curvature.data import Inputs
from flwr_fisher.curvature.models import evaluating
from flwr_fisher.errors import check_whole
from flwr_fisher.randomness import random_stream
from flwr_fisher.tangent.feature_engine import Chosen, FeatureEngine
from flwr_fisher.tangent.head import (
    check_last,
    find_head,
    linear_layer,
    one_output_copy,
)


class TangentFeatures:
    r"""Computes empirical neural tangent kernel features of a network with one output.

    .. math:: \phi(x) = S \, \frac{\partial f_1(x; \theta)}{\partial \theta}
              \in \mathbb{R}^p

    (TCT, section 4.1.) :math:`f_1` is the network with its last layer replaced by a
    freshly initialised one with a single output; what the model does after that layer,
    such as a log-softmax, is left out. S takes p random coordinates. The new layer and
    S are drawn from `seed`, so the seed and the weights determine the features. The
    network is in eval mode: without dropout, with batch norm's running statistics.

    Features are in the order of ``model.named_parameters()``, with the new layer in
    place of the old one, and each parameter flattened as in memory. Frozen parameters
    have no features, but the new layer always has.

    Parameters
    ----------
    model : nn.Module
        The network. It is copied, so later changes of its parameters have no effect,
        and it is not changed.
    num_features : int
        How many coordinates to take. If the network has fewer, all are taken.
    seed : int, default 0
        The seed of the new layer's weights and of the coordinates; each has its own
        random numbers. The global generators are left as they were.
    head : str, optional
        The name of the layer to replace, an ``nn.Linear``. By default the last in the
        model's definition; the first batch shows whether it is also called last.

    Attributes
    ----------
    head : str
        The name of the layer that was replaced.
    num_classes : int
        The number of outputs that this layer had.
    num_features : int
        p, at most the number of trained parameters.
    digest : str
        A digest, in 64 hexadecimal digits, of everything that must be the same on all
        clients, except the parameters' values: the head's name, the seed, parameters'
        names and shapes, the coordinates and the new layer's weights.
    dtype : torch.dtype
        The dtype of the features: float64 if the head is in float64, otherwise float32.
    device : torch.device
        The device of the features; examples must be there, too.

    Raises
    ------
    ConfigurationError
        If `num_features` is below 1, or `head` names no linear layer.
    StructureError
        If there is no linear layer, or the head shares its weight with another layer.
        On the first batch also if the head is not called exactly once, if a linear
        layer is called after it although no `head` was named, or if an example's output
        depends on the other examples of its batch.

    Notes
    -----
    Linear and convolution layers that are called once, with one row for each example,
    share one backward pass of the batch, and only the chosen entries of an example's
    gradient are computed. Other parameters go through ``torch.func``.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> features = TangentFeatures(model, num_features=20)
    >>> features.head, features.num_classes
    ('2', 3)
    >>> features(torch.randn(5, 4)).shape
    torch.Size([5, 20])
    """

    def __init__(
        self,
        model: nn.Module,
        num_features: int,
        *,
        seed: int = 0,
        head: str | None = None,
    ) -> None:
        check_whole("num_features", num_features, 1)
        self.seed, self.head = seed, find_head(model, head)
        self._head_is_named = head is not None
        self.num_classes = linear_layer(model, self.head).out_features
        with torch.inference_mode(False):
            self._network = one_output_copy(model, self.head, seed)
        trained = {k: p for k, p in self._network.named_parameters() if p.requires_grad}
        sizes = {name: p.numel() for name, p in trained.items()}
        total = sum(sizes.values())
        self.num_features = min(num_features, total)
        stream = random_stream(seed, "tangent", "coordinates")
        drawn = stream.choice(total, self.num_features, replace=False, shuffle=False)
        coordinates = np.sort(drawn.astype(np.int64))
        new = linear_layer(self._network, self.head)
        self.dtype = torch.promote_types(new.weight.dtype, torch.float32)
        self.device = new.weight.device
        self._chosen = _by_parameter(coordinates, sizes, self.device)
        shapes = {name: list(p.shape) for name, p in trained.items()}
        self.digest = _digest([self.head, seed, shapes], coordinates, new)
        self._engine: FeatureEngine | None = None

    def __call__(self, x: Tensor | Inputs) -> Tensor:
        """Return the features of a batch.

        Parameters
        ----------
        x : Tensor | Inputs
            Examples ``[B, ...]`` on :attr:`device`; taken in parts if they are many.

        Returns
        -------
        Tensor
            ``[B, p]`` in :attr:`dtype`, detached. An example's row does not depend on
            the rest of the batch, but for rounding.

        Raises
        ------
        StructureError
            As above; also where a parameter has no gradient through ``torch.func``.
        """
        if isinstance(x, Tensor):
            x = Inputs((x,))
        with evaluating(self._network):
            x = x.mapped(lambda t: t.clone() if t.is_inference() else t.detach())
            shape = len(x), self.num_features
            out = torch.empty(shape, dtype=self.dtype, device=self.device)
            if len(x):
                if self._engine is None:  # the first batch chooses its methods
                    named = self._head_is_named
                    check_last(self._network, self.head, x[:1], named=named)
                    self._engine = FeatureEngine(self._network, self._chosen, x)
                self._engine.write(x, out)
        return out


def _by_parameter(
    coordinates: np.ndarray, sizes: dict[str, int], device: torch.device
) -> dict[str, Chosen]:
    """Return the chosen entries of each parameter that has any."""
    chosen, start = {}, 0
    for name, size in sizes.items():
        first, last = np.searchsorted(coordinates, [start, start + size])
        if first < last:
            entries = torch.from_numpy(coordinates[first:last] - start).to(device)
            chosen[name] = Chosen(entries, slice(int(first), int(last)))
        start += size
    return chosen


def _digest(settings: object, coordinates: np.ndarray, head: nn.Linear) -> str:
    digest = hashlib.sha256(json.dumps(settings).encode())
    digest.update(coordinates.astype("<i8").tobytes())
    for parameter in head.parameters():
        # In float32, so that a client with a float64 model agrees with the others.
        digest.update(parameter.detach().float().cpu().numpy().astype("<f4").tobytes())
    return digest.hexdigest()
