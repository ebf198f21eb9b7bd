"""A `client_fn` as an app of Flower's Message API."""

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from torch import nn

from flwr_fisher.client import FisherClient, make_client_app
from flwr_fisher.errors import ClientError
from flwr_fisher.legacy.lists import Order
from flwr_fisher.legacy.numpy_client import from_numpy_client
from flwr_fisher.log_lines import logger

Part = str | Callable[[Any], Any]


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
    """Return the app of a `client_fn`, in place of Flower's ``ClientApp(client_fn)``.

    Parameters
    ----------
    client_fn : Callable[[Context], NumPyClient]
        Yours; it may return ``….to_client()``.
    model, trainloader, valloader : str | Callable
        Where the client has its network and its data: an attribute's name, or a
        function of the client.
    order : optional
        What its lists of arrays hold; see :func:`from_numpy_client`.
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
            raise ClientError(f"model={model!r} is no module: {type(network).__name__}")
        return from_numpy_client(
            client, network, train, held_out, order=order, **options
        )

    return make_client_app(make, mods)


def _part(client: Any, part: Part) -> Any:
    """Return the client's model or loader."""
    if callable(part):
        return part(client)
    if not hasattr(client, part):
        raise ClientError(
            f"{type(client).__name__} has no attribute '{part}', but "
            f"{sorted(vars(client))}: name the one that holds it, or pass a function "
            "of the client"
        )
    return getattr(client, part)


def _of_context(client_fn: Callable[..., Any]) -> Callable[[Context], Any]:
    """Return a `client_fn` of a context; one of a ``cid`` is deprecated."""
    parameters: list[Parameter] = list(signature(client_fn).parameters.values())
    # Under `from __future__ import annotations` they are texts.
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
