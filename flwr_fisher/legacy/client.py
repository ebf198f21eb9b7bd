"""Adapters that make a ``NumPyClient``, or a `client_fn`, a client of this library.

An older app's lists of arrays have no names. Nearly all are those of
``model.state_dict().values()``; some have the parameters only, or the trained ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from flwr_fisher.client import FisherClient, make_client_app
from flwr_fisher.client.messages import Mod
from flwr_fisher.errors import ClientError, ParamsError, check_known
from flwr_fisher.params import NORM_STATISTICS, trainable_names

NDArray = npt.NDArray[Any]
Order = str | Sequence[str]
Part = str | Callable[[Any], Any]


def from_numpy_client(
    client: Any,
    model: nn.Module,
    trainloader: Any,
    valloader: Any = None,
    *,
    order: Order = "state",
    **options: Any,
) -> FisherClient:
    """Return a :class:`FisherClient` around a ``NumPyClient``.

    Its `fit` trains as before. It gets the server's arrays as a list, and the server's
    config with ``server-round``, but without this library's own keys. The arrays that
    it returns are loaded into the model, and the curvature is computed there. Its
    number of examples is the client's weight. Its metrics are added to the reply; only
    numbers are, not texts. Without a `valloader`, its `evaluate`, if it has one,
    answers evaluations. It may train this model or one of its own; the lists of its own
    must have all of the state, if it has batch norms.

    Parameters
    ----------
    client : NumPyClient
        Yours, or what its ``to_client()`` returned.
    model : nn.Module
        The network to which its arrays belong.
    trainloader : Iterable
        Its training data, for the curvature; as for :class:`FisherClient`.
    valloader : Iterable, optional
        Held-out batches. They are used for evaluations in place of its `evaluate`.
    order : "state" | "parameters" | "trainable" | Sequence[str], default "state"
        The entries of its lists of arrays: ``model.state_dict().values()``,
        ``model.parameters()``, the parameters that require a gradient, or entries of
        the given names.
    **options
        :class:`FisherClient`'s.

    Raises
    ------
    ClientError
        If it is not a ``NumPyClient``.

    Examples
    --------
    ::

        def client_fn(context: Context) -> FisherClient:
            net, trainloader = Net(), load(context.node_config["partition-id"])
            return from_numpy_client(FlowerClient(net, trainloader), net, trainloader)

        app = flwr_fisher.client.make_client_app(client_fn)
    """
    client = getattr(client, "numpy_client", client)  # inside of `to_client`'s
    if not _defines(client, "fit"):
        raise ClientError(
            f"{type(client).__name__} does not define fit(parameters, config): pass a "
            "NumPyClient, or use FisherClient(model, trainloader, train_fn=...)"
        )

    def evaluate(
        model: nn.Module, valloader: Any, device: torch.device, config: Any
    ) -> dict[str, float]:
        returned = client.evaluate(to_list(model, names_of(model, order)), dict(config))
        loss, metrics = _checked(returned, "evaluate")
        return {**metrics, "loss": float(loss)}

    evaluates = valloader is None and _defines(client, "evaluate")
    options = {"evaluate_fn": evaluate if evaluates else None, **options}
    train_fn = _Fit(client, order)
    return FisherClient(model, trainloader, valloader, train_fn=train_fn, **options)


def client_app(
    client_fn: Callable[[Context], Any],
    *,
    model: Part,
    trainloader: Part,
    valloader: Part | None = None,
    order: Order = "state",
    mods: list[Mod] | None = None,
    **options: Any,
) -> ClientApp:
    """Return an app for a `client_fn`, in place of ``ClientApp(client_fn)``.

    Parameters
    ----------
    client_fn : Callable[[Context], NumPyClient]
        Yours; it may return ``….to_client()``.
    model, trainloader, valloader : str | Callable
        Where the client's network and data are: an attribute's name, or a function of
        the client.
    order : optional
        The entries of its lists of arrays; see :func:`from_numpy_client`.
    mods : list[Mod], optional
        Flower's client mods, for training only.
    **options
        :class:`FisherClient`'s.

    Examples
    --------
    ::

        app = client_app(client_fn, model="net", trainloader="trainloader")
    """

    def make(context: Context) -> FisherClient:
        client = client_fn(context)
        client = getattr(client, "numpy_client", client)
        parts = [
            part(client) if callable(part) else getattr(client, part)
            for part in (model, trainloader, valloader)
            if part is not None
        ]
        return from_numpy_client(client, *parts, order=order, **options)

    return make_client_app(make, mods)


@dataclass(frozen=True)
class _Fit:
    """A ``train_fn`` that trains by the client's `fit`."""

    client: Any
    order: Order

    def __call__(
        self,
        model: nn.Module,
        trainloader: Any,
        device: torch.device,
        config: Mapping[str, Any],
    ) -> dict[str, float]:
        names = names_of(model, self.order)
        returned = self.client.fit(to_list(model, names), dict(config))
        arrays, metrics = _checked(returned, "fit")
        source = f"what {type(self.client).__name__}.fit returned"
        new, old = from_list(model, names, arrays, source), model.state_dict()
        left = [k for k in old if k.endswith(NORM_STATISTICS) and k not in new]
        if left and any(not torch.equal(old[k], v.to(old[k])) for k, v in new.items()):
            raise ClientError(
                f"{source} is of another network than the model, and has no "
                f"'{left[0]}': let fit train the model, or return all of "
                'state_dict(), with order="state"'
            )
        model.load_state_dict(new, strict=False)
        model.to(device)
        return metrics

    def settings(self) -> dict[str, str]:
        """Return the settings on which a training depends."""
        return {"client": type(self.client).__qualname__}


def _defines(client: Any, method: str) -> bool:
    """Return whether the client defines a method, instead of Flower's empty one."""
    function = getattr(client, method, None)
    return callable(function) and not str(function.__module__).startswith("flwr.")


def _checked(returned: Any, method: str) -> tuple[Any, dict[str, Any]]:
    """Return the first result of a method, and its metrics with the number."""
    match returned:
        case (first, int() as count, dict() as metrics) if count > 0:
            return first, {**metrics, "num-examples": count}
    raise ClientError(
        f"{method} must return three results, the second the number of examples (above "
        f"0) and the third a dict of metrics, got {returned!r:.80}"
    )


def names_of(model: nn.Module, order: Order) -> list[str]:
    """Return the names of a list's arrays.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    >>> [len(names_of(model, order)) for order in ("state", "parameters")]
    [7, 4]
    """
    state = list(model.state_dict())
    if not isinstance(order, str):
        if unknown := [name for name in order if name not in state]:
            raise ParamsError(f"order names {unknown}, which the model does not have")
        return list(order)
    orders = {"state": state, "trainable": trainable_names(model)}
    orders["parameters"] = [name for name, _ in model.named_parameters()]
    check_known("order", order, orders)
    return orders[order]


def to_list(model: nn.Module, names: Sequence[str]) -> list[NDArray]:
    """Return copies of a model's entries as arrays; bfloat16 becomes float32."""
    state = model.state_dict()
    tensors = [state[name].detach().cpu() for name in names]
    return [
        (t.float() if t.dtype == torch.bfloat16 else t).numpy().copy() for t in tensors
    ]


def from_list(
    model: nn.Module, names: Sequence[str], arrays: Sequence[NDArray], source: str
) -> dict[str, Tensor]:
    """Return arrays by name, in the dtypes of the model's entries.

    Raises
    ------
    ParamsError
        If their shapes are not those of the model's entries. It names `source`.
    """
    state = model.state_dict()
    shapes = [np.shape(array) for array in arrays]
    wanted = [tuple(state[name].shape) for name in names]
    if shapes != wanted:
        raise ParamsError(
            f"{source}: arrays of shapes {shapes!s:.200}, not {wanted!s:.200}: pass "
            'order="parameters", order="trainable" or the names of the entries'
        )
    return {
        name: torch.tensor(np.asarray(array)).to(state[name].dtype)
        for name, array in zip(names, arrays, strict=True)
    }
