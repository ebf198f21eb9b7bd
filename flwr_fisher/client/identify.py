"""What a client answers when a strategy asks who it is."""

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict

from flwr_fisher import __version__
from flwr_fisher.client.store import partition_of
from flwr_fisher.wire import LIBRARY


def identify(message: Message, context: Context) -> Message:
    """Answer the question that this library's strategies ask before they train.

    The answer is the node's ``partition-id``, if it has one, by which a strategy knows
    it again in every run, and this library's version, by which it knows that the client
    can do what it will ask for. :func:`make_client_app` answers so by itself; an app
    whose train function calls :func:`fisher_arrays` says it in a line.

    Parameters
    ----------
    message : Message
        The question.
    context : Context
        The node's.

    Examples
    --------
    ::

        app = ClientApp()
        app.query()(identify)
    """
    named = "partition-id" in context.node_config
    own = {"partition-id": partition_of(context)} if named else {}
    content = RecordDict({"metrics": MetricRecord({**own})})
    content["config"] = ConfigRecord({LIBRARY: __version__})
    return Message(content, reply_to=message)
