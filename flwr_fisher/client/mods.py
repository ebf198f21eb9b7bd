"""What stands around a client's work: who it is in the log, and how errors travel."""

from flwr.app import Context, Error, Message
from flwr.clientapp.typing import ClientAppCallable

from flwr_fisher.failures import Failures
from flwr_fisher.flower_internals import ErrorCode

_failures = Failures()  # of all clients in this process


def name_of(context: Context) -> str:
    """Return what a client is called in its log.

    Examples
    --------
    >>> from flwr.app import RecordDict
    >>> name_of(Context(1, 7, {"partition-id": 3}, RecordDict(), {}))
    'partition-3'
    """
    partition = context.node_config.get("partition-id")
    return f"node-{context.node_id}" if partition is None else f"partition-{partition}"


def answered(
    message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Make an exception an error reply.

    One that reaches Flower is printed with its traceback, each time.
    """
    try:
        return call_next(message, context)
    except Exception as error:  # a user's model, data and loop raise anything
        reason = _failures.tell(name_of(context), error)
        code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        return Message(Error(code=code, reason=reason), reply_to=message)


def addressed(
    message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Make a mod's error an answer to the request.

    Flower's own privacy mods answer the reply that they refuse, and the server would
    wait for the request's answer until its timeout.
    """
    reply = call_next(message, context)
    if reply.has_error() and reply.metadata.dst_node_id != message.metadata.src_node_id:
        return Message(reply.error, reply_to=message)
    return reply
