"""TCT's final model: a linear model on tangent features."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from flwr_fisher.curvature.data import Inputs
from flwr_fisher.errors import CheckpointError, ParamsError
from flwr_fisher.files import save_tensors
from flwr_fisher.params import check_same_layout, load_state, shared_state
from flwr_fisher.tangent.features import TangentFeatures

_PREFIX = "tct/"
_AT_ONCE = 2**24  # features of the examples that are computed together: 64 MiB
_KEYS = ("weight", "mean", "std", "seed", "head")


class TCTModel(nn.Module):
    r"""TCT's final model, which predicts from standardised tangent features.

    .. math:: f(x) = \frac{\phi(x) - \mu}{\sigma} \, \Theta

    (TCT, section 4.2.) The class is that of the largest entry. The entries are
    regressions on one-hot labels minus 1/C, not log-probabilities.

    Parameters
    ----------
    model : nn.Module
        The trained network, with its own head. It is copied. Features are always
        computed in eval mode.
    weight : Tensor
        :math:`\Theta`, ``[p, C]``.
    mean, std : Tensor
        The mean and the standard deviation of each feature, ``[p]``; `std` is positive.
    seed : int
        The seed of the features.
    head : str, optional
        The layer that features replace, as for
        :class:`~flwr_fisher.tangent.TangentFeatures`.

    Attributes
    ----------
    num_features, num_classes : int
        p and C.
    head : str
        The layer's name.
    seed : int
        The seed of the features.

    Raises
    ------
    ParamsError
        If a shape does not fit the model.
    ConfigurationError, StructureError
        As raised by :class:`~flwr_fisher.tangent.TangentFeatures`.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> weight, mean, std = torch.randn(20, 3), torch.zeros(20), torch.ones(20)
    >>> tct = TCTModel(model, weight, mean, std, seed=0)
    >>> tct(torch.randn(5, 4)).shape
    torch.Size([5, 3])
    >>> TCTModel.is_in(tct.to_tensors())
    True
    """

    weight: Tensor
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        model: nn.Module,
        weight: Tensor,
        mean: Tensor,
        std: Tensor,
        *,
        seed: int,
        head: str | None = None,
    ) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        self.num_features = len(weight)
        self.seed, self._given_head = seed, head
        self._features: TangentFeatures | None = None
        features = self._tangent_features()
        self.head, self.num_classes = features.head, features.num_classes
        p, C = features.num_features, features.num_classes
        expected = {"weight": (p, C), "mean": (p,), "std": (p,)}
        for name, value in (("weight", weight), ("mean", mean), ("std", std)):
            if value.shape != (shape := expected[name]):
                raise ParamsError(
                    f"{name} has shape {tuple(value.shape)}, expected {shape}, as the "
                    f"model has {p} features and {C} classes of its head '{self.head}'"
                )
            self.register_buffer(name, value.detach().clone().to(features.device))
        self.register_load_state_dict_post_hook(_forget_features)  # type: ignore[no-untyped-call]

    @property
    def called_like(self) -> nn.Module:
        """The network: this model is called with the same arguments."""
        return self.model

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return scores ``[B, C]`` of examples ``[B, ...]``; the largest is the class.

        The arguments are those of the network. The scores have no gradients, neither
        with respect to the examples nor to the features.
        """
        size = max(1, _AT_ONCE // self.num_features)
        x = Inputs(args, kwargs)
        starts = range(0, max(len(x), 1), size)
        return torch.cat([self._scores(x[k : k + size]) for k in starts])

    def _scores(self, x: Inputs) -> Tensor:
        z = self._tangent_features()(x).sub_(self.mean).div_(self.std)
        return z @ self.weight.to(z.dtype)

    def _tangent_features(self) -> TangentFeatures:
        """Return the features of the network with its current parameters and device."""
        if self._features is None:
            self._features = TangentFeatures(
                self.model, self.num_features, seed=self.seed, head=self._given_head
            )
        return self._features

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "TCTModel":
        # moved to another device or dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._features = None
        return self

    @staticmethod
    def is_in(tensors: Mapping[str, Tensor]) -> bool:
        """Return whether these tensors are those of a TCT model, not a plain model."""
        return f"{_PREFIX}weight" in tensors

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the network's tensors by their own keys, and the rest by ``tct/…``.

        Returns
        -------
        dict[str, Tensor]
            The tensors that :func:`~flwr_fisher.params.shared_state` returns for the
            network, then ``tct/weight`` ``[p, C]``, ``tct/mean`` and ``tct/std``
            ``[p]``, ``tct/seed``, an int64 scalar, and ``tct/head``, the layer's name
            in UTF-8 as uint8. The tensors are on the CPU, and share no memory with the
            model.
        """
        state = shared_state(self.model)
        state |= {f"{_PREFIX}{k}": getattr(self, k) for k in ("weight", "mean", "std")}
        state[f"{_PREFIX}seed"] = torch.tensor(self.seed)
        head = list(self.head.encode())
        state[f"{_PREFIX}head"] = torch.tensor(head, dtype=torch.uint8)
        return {k: v.detach().cpu().clone().contiguous() for k, v in state.items()}

    @classmethod
    def from_tensors(
        cls, model: nn.Module, tensors: Mapping[str, Tensor]
    ) -> "TCTModel":
        """Return the model from the tensors of :meth:`to_tensors`.

        Parameters
        ----------
        model : nn.Module
            A network of the same architecture, with its own head. Only the values of
            its frozen parameters matter, because the tensors do not have these. It is
            left as it was.
        tensors : Mapping[str, Tensor]
            Tensors as :meth:`to_tensors` returns them. From the end of stage 1 on, a
            TCT run's arrays are such tensors.

        Raises
        ------
        ParamsError
            If a key is missing or unexpected, or a shape does not fit.
        """
        state = {k: v for k, v in tensors.items() if not k.startswith(_PREFIX)}
        added = {k.removeprefix(_PREFIX): tensors[k] for k in tensors if k not in state}
        if added.keys() != set(_KEYS):
            wrong = sorted(_PREFIX + key for key in added.keys() ^ set(_KEYS))
            raise ParamsError(
                f"a TCT model's tensors lack, or wrongly have, the keys {wrong}"
            )
        check_same_layout(shared_state(model), state, "the tensors of the network")
        network = copy.deepcopy(model)
        load_state(network, state)
        weight, mean, std = (added[key] for key in ("weight", "mean", "std"))
        head = bytes(added["head"].tolist()).decode()
        return cls(network, weight, mean, std, seed=int(added["seed"]), head=head)

    def save(self, path: Path | str) -> None:
        """Write :meth:`to_tensors` as a safetensors file.

        Parameters
        ----------
        path : Path | str
            The file. An existing one is replaced.

        Raises
        ------
        CheckpointError
            If the disk refuses.
        """
        try:
            save_tensors(Path(path).expanduser(), self.to_tensors())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot write {path}: {error}") from error

    @classmethod
    def load(cls, path: Path | str, model: nn.Module) -> "TCTModel":
        """Load the model that :meth:`save` wrote, bit for bit.

        Parameters
        ----------
        path : Path | str
            The file.
        model : nn.Module
            As for :meth:`from_tensors`.

        Raises
        ------
        CheckpointError
            If the file is missing, damaged, or another model's.
        ParamsError
            If `model` is no module.
        """
        try:
            return cls.from_tensors(model, load_file(Path(path).expanduser()))
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} has no TCT model of this architecture: {error}"
            ) from error


def _forget_features(module: TCTModel, _: object) -> None:
    module._features = None  # they were those of the values before
