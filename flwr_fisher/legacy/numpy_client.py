"""Adapters that make a ``NumPyClient``, or a `client_fn`, a client of this library."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from numbers import Integral, Real
from typing import Any

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from torch import nn

from flwr_fisher.client import EvaluateFn, FisherClient, make_client_app
from flwr_fisher.client.messages import Mod
from flwr_fisher.errors import ClientError
from flwr_fisher.legacy.lists import (
    Order,
    from_list,
    names_of,
    order_of,
    to_list,
)
from flwr_fisher.log_lines import logger

Part = str | Callable[[Any], Any]


def from_numpy_client(
    client: Any,
    model: nn.Module,
    trainloader: Any,
    valloader: Any = None,
    *,
    order: Order | None = None,
    **options: Any,
) -> FisherClient:
    """Return a :class:`FisherClient` around a ``NumPyClient``.

    Its `fit` trains as before. It gets the server's arrays as a list, and the server's
    config with ``server-round``, but without this library's own keys. The arrays that
    it returns are loaded into the model, and the curvature is computed there. Its
    number of examples is the client's weight. Its metrics are added to the reply; only
    numbers are, not texts. Without a `valloader`, its `evaluate`, if it has one,
    answers evaluations. It may train this model or one of its own.

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
    order : "state" | "parameters" | "trainable" | Sequence[str], optional
        The entries of its lists of arrays: ``model.state_dict().values()``,
        ``model.parameters()``, the parameters that require a gradient, or entries of
        the given names. Default: the order of what its ``get_parameters`` returns, or
        ``state`` if it has no such method.
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
    if not _has(client, "fit"):
        raise ClientError(
            f"{type(client).__name__} does not define fit(parameters, config): pass a "
            "NumPyClient, or use FisherClient(model, trainloader, train_fn=...)"
        )
    evaluates = valloader is None and _has(client, "evaluate")
    own: EvaluateFn | None = _Evaluate(client, model, order) if evaluates else None
    return FisherClient(
        model,
        trainloader,
        valloader,
        **{"train_fn": _Fit(client, order), "evaluate_fn": own, **options},
    )


def client_app(
    client_fn: Callable[[Context], Any],
    *,
    model: Part,
    trainloader: Part,
    valloader: Part | None = None,
    order: Order | None = None,
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
    build = _of_context(client_fn)

    def make(context: Context) -> FisherClient:
        client = build(context)
        client = getattr(client, "numpy_client", client)
        parts = (model, trainloader, valloader)
        own = [None if part is None else _part(client, part) for part in parts]
        network, train, held_out = own
        if not isinstance(network, nn.Module):
            raise ClientError(
                f"model={model!r} must give an nn.Module, not {type(network).__name__}"
            )
        return from_numpy_client(
            client, network, train, held_out, order=order, **options
        )

    return make_client_app(make, mods)


@dataclass(frozen=True)
class _Fit:
    """A ``train_fn`` that trains by the client's `fit`."""

    client: Any
    order: Order | None

    def __call__(
        self,
        model: nn.Module,
        trainloader: Any,
        device: torch.device,
        config: Mapping[str, Any],
    ) -> dict[str, float]:
        names = _names(self.client, model, self.order)
        returned = self.client.fit(to_list(model, names), dict(config))
        arrays, count, metrics = _checked(returned, list, "fit", "a list of arrays")
        what = f"what {type(self.client).__name__}.fit returned"
        model.load_state_dict(from_list(model, names, arrays, what), strict=False)
        model.to(device)
        return {**metrics, "num-examples": count}

    def settings(self) -> dict[str, str]:
        """Return the settings on which a training depends."""
        return {"client": type(self.client).__qualname__}


@dataclass(frozen=True)
class _Evaluate:
    """An ``evaluate_fn`` that evaluates by the client's `evaluate`."""

    client: Any
    model: nn.Module
    order: Order | None

    def __call__(
        self,
        model: nn.Module,
        valloader: Any,
        device: torch.device,
        config: Mapping[str, Any],
    ) -> dict[str, float]:
        if model is not self.model:
            raise ClientError(
                "the server evaluates TCT's model, and "
                f"{type(self.client).__name__}.evaluate knows only its network: pass "
                "a valloader"
            )
        names = _names(self.client, model, self.order)
        returned = self.client.evaluate(to_list(model, names), dict(config))
        loss, count, metrics = _checked(returned, Real, "evaluate", "the loss")
        return {**metrics, "loss": float(loss), "num-examples": count}


def _has(client: Any, method: str) -> bool:
    """Return whether the client defines a method, instead of Flower's empty one."""
    own = getattr(client, method, None)
    return callable(own) and str(own.__module__).partition(".")[0] != "flwr"


def _names(client: Any, model: nn.Module, order: Order | None) -> list[str]:
    """Return the names of the client's lists of arrays."""
    every = names_of(model, "state")
    if order is not None:
        return names_of(model, order)
    if every == names_of(model, "trainable") or not _has(client, "get_parameters"):
        return every
    arrays = client.get_parameters(config={})
    if (known := order_of(model, arrays)) is not None:
        return names_of(model, known)
    from_list(model, every, arrays, f"{type(client).__name__}.get_parameters")
    return every


def _checked(
    returned: Any, first: type, method: str, what: str
) -> tuple[Any, int, dict[str, Any]]:
    """Return the three results of a ``NumPyClient``'s method, after checks."""
    match returned:
        case (one, Integral() as count, dict() as metrics) if isinstance(one, first):
            if int(count) > 0:
                return one, int(count), metrics
    shown = [
        part if isinstance(part, Integral) else type(part).__name__
        for part in (returned if isinstance(returned, tuple | list) else [returned])
    ]
    raise ClientError(
        f"{method} must return ({what}, number of examples above 0, dict of metrics), "
        f"got {shown}"
    )


def _part(client: Any, part: Part) -> Any:
    """Return the client's model or loader."""
    if callable(part):
        return part(client)
    if not hasattr(client, part):
        raise ClientError(
            f"{type(client).__name__} has no attribute '{part}', only "
            f"{sorted(vars(client))}: pass the name of the right one, or a function "
            "of the client"
        )
    return getattr(client, part)


def _of_context(client_fn: Callable[..., Any]) -> Callable[[Context], Any]:
    """Return a `client_fn` that takes a context; one with a ``cid`` is deprecated."""
    parameters: list[Parameter] = list(signature(client_fn).parameters.values())
    # texts, with `from __future__ import annotations`
    if not parameters or not (
        parameters[0].name == "cid" or parameters[0].annotation in (str, "str")
    ):
        return client_fn
    logger.warning(
        "DEPRECATED FEATURE: a client_fn of `cid`. Flower expects `def client_fn("
        "context: Context)`, and so does flwr_fisher.legacy once Flower drops it: "
        'take context.node_config["partition-id"]'
    )

    def of_context(context: Context) -> Any:
        return client_fn(str(context.node_config.get("partition-id", context.node_id)))

    return of_context
