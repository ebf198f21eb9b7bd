"""A client app's answers to Flower's messages: queries, replies and errors.

Both ``FisherClient`` and apps of plain functions use this file.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from functools import wraps
from typing import Any

from flwr.app import (
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp as FlowerApp
from flwr.clientapp.typing import ClientAppCallable
from torch import nn

from flwr_fisher import __version__
from flwr_fisher.client.jobs.train import requested_training
from flwr_fisher.client.problem import LocalProblem
from flwr_fisher.client.request import config_of, partition_of
from flwr_fisher.errors import ClientError, ConfigurationError
from flwr_fisher.files import digest_of
from flwr_fisher.flower_internals import ErrorCode
from flwr_fisher.log_lines import Failures
from flwr_fisher.params import trainable_names
from flwr_fisher.wire.options import LIBRARY

# As flwr.clientapp has it since 1.32.
Mod = Callable[[Message, Context, ClientAppCallable], Message]
_Register = Callable[[ClientAppCallable], ClientAppCallable]

_DIGITS = 32  # characters of a frozen parameter's digest
_REPLACED = "original_module"  # PEFT's prefix of a module with a trained copy
_failures = Failures()  # of all clients in this process


class ClientApp(FlowerApp):
    """Flower's ``ClientApp``, with this library's answers to queries.

    It answers the server's queries before training as :func:`identify` does, unless it
    has a query function of your own. It refuses strategies that request more than
    training, before your train function runs.

    Parameters
    ----------
    mods : list[Mod], optional
        Flower's mods, around each of the app's functions.

    Examples
    --------
    ::

        from flwr_fisher.client import ClientApp, fisher_arrays

        app = ClientApp()
    """

    def __init__(self, *, mods: list[Mod] | None = None) -> None:
        super().__init__(mods=mods)
        self._has_query = False

    def query(self, *args: Any, **options: Any) -> _Register:
        """Register a query function in place of :func:`identify`, as in Flower."""
        self._has_query = True
        return super().query(*args, **options)

    def train(self, *args: Any, **options: Any) -> _Register:
        """Register a train function, as in Flower. It is not called for other jobs."""
        register = super().train(*args, **options)

        def registered(function: ClientAppCallable) -> ClientAppCallable:
            @wraps(function)
            def train(message: Message, context: Context) -> Message:
                with suppress(ConfigurationError):  # a job of the app's own
                    requested_training(config_of(message)[0])
                return function(message, context)

            register(train)
            return function

        return registered

    def __call__(self, message: Message, context: Context) -> Message:
        """Handle a message; answer a query, if the app has no function for it.

        Raises
        ------
        ClientError
            If the app's function does not return a message.
        """
        if message.metadata.message_type == MessageType.QUERY and not self._has_query:
            return identify(message, context)
        reply: object = super().__call__(message, context)
        if not isinstance(reply, Message):
            raise ClientError(
                f"the app's function returned {reply!r:.80}, no Message(RecordDict("
                "...), reply_to=message)"
            )
        return reply


def identify(
    message: Message, context: Context, model: nn.Module | None = None
) -> Message:
    """Answer the questions that this library's strategies ask before they train.

    The answer has the node's ``partition-id``, if there is one, so that a strategy
    recognises the node in every run. It also has this library's version, so that the
    strategy knows what the client can do. :func:`make_client_app` and this library's
    :class:`ClientApp` answer in this way by themselves; Flower's ``ClientApp`` needs
    one line.

    Some strategies also query what is trained. With a `model` the answer has the names
    of its trainable parameters, and a digest of each frozen one. The server then skips,
    before the training, a client whose frozen parameters differ from those of most
    clients.

    Parameters
    ----------
    message : Message
        The query.
    context : Context
        The node's.
    model : nn.Module, optional
        The model, with its frozen parameters loaded. It does not need the arrays that
        the server sends.

    Examples
    --------
    ::

        app = flwr.clientapp.ClientApp()
        app.query()(identify)

    With adapters of a pre-trained model::

        @app.query()
        def query(message: Message, context: Context) -> Message:
            return identify(message, context, adapted_model())
    """
    if model is not None and asks_for_parameters(message):
        record = ConfigRecord({"trained": trainable_names(model)})
        with suppress(Exception):  # special tensors may raise anything
            record["frozen"] = [
                f"{name} {digest_of('', {'': parameter})[:_DIGITS]}"
                for name, parameter in _frozen(model).items()
            ]
        return Message(RecordDict({"config": record}), reply_to=message)
    metrics, config = MetricRecord(), ConfigRecord({LIBRARY: __version__})
    if "partition-id" in context.node_config:
        metrics["partition-id"] = partition_of(context)
    return Message(RecordDict({"metrics": metrics, "config": config}), reply_to=message)


def asks_for_parameters(message: Message) -> bool:
    """Return whether a query asks for the client's parameters, not for its name."""
    return bool(config_of(message)[0].get("query") == "trained")


def not_sent(problem: LocalProblem, sent: Collection[str]) -> str:
    """Return a text by which the server finds clients that are unlike the others.

    It tells what no array of an upload shows, and all clients must have in common, with
    blanks between: a digest of the frozen parameters that the server does not send, one
    of the names of the classes, and the likelihood's name. A digest is "" if there are
    no such parameters or names, or if it cannot be computed.
    """
    frozen = {k: v for k, v in _frozen(problem.model).items() if k not in sent}
    digest = ""
    with suppress(Exception):  # as above
        digest = digest_of(list(frozen), frozen)[:_DIGITS] if frozen else ""
    names = problem.class_names
    classes = digest_of(names)[:_DIGITS] if names else ""
    return f"{digest} {classes} {problem.likelihood_name}"


def told_to(tells: object, told: str) -> str:
    """Return the part of a client's text, :func:`not_sent`, that is compared."""
    # Where "labels" are, each client may freeze what it likes.
    return f" {told.partition(' ')[2]}" if tells == "labels" else told


def _frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's frozen parameters by name.

    Without heads that PEFT has replaced by a trained copy: no output depends on them,
    and each client has its own.
    """
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and _REPLACED not in name.split(".")
    }


def name_of(context: Context) -> str:
    """Return a client's name in its log.

    Examples
    --------
    >>> from flwr.app import RecordDict
    >>> name_of(Context(1, 7, {"partition-id": 3}, RecordDict(), {}))
    'partition-3'
    """
    partition = context.node_config.get("partition-id")
    return "this node" if partition is None else f"partition-{partition}"


def errors_as_replies(
    message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Turn an exception into an error reply, which answers the server's request.

    Flower would print an exception with its traceback, every time. Errors of Flower's
    own privacy mods answer the client's reply: the server would wait for them in vain.
    """
    try:
        reply = call_next(message, context)
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        reason = _failures.tell(name_of(context), error)
        code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        return Message(Error(code=code, reason=reason), reply_to=message)
    is_error = isinstance(reply, Message) and reply.has_error()
    if is_error and reply.metadata.dst_node_id != message.metadata.src_node_id:
        return Message(reply.error, reply_to=message)
    return reply
