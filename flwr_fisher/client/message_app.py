"""Between Flower's messages and a client: a server of another kind is told so."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flwr_fisher.errors import ClientError

# What Flower's older strategies, of flwr.server.strategy, send.
_TYPES = ("get_parameters", "get_properties", "reconnect")
_ARRAYS = ("fitins.parameters", "evaluateins.parameters")


class MessageApp(ClientApp):
    """An app for strategies of Flower's Message API, which tells others of them."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Handle a message.

        Raises
        ------
        ClientError
            If the server's strategy is of the older kind.
        """
        arrays = message.content.array_records if message.has_content() else {}
        older = message.metadata.message_type in _TYPES
        if older or any(name in arrays for name in _ARRAYS):
            raise ClientError(
                "the server runs one of Flower's older strategies (flwr.server."
                "strategy), and this ClientApp is flwr-fisher's: start a strategy of "
                "flwr_fisher.strategies or flwr.serverapp.strategy, or make it "
                "as_legacy(...) in a server_app(server_fn), both of "
                "flwr_fisher.legacy (docs/moving-from-numpyclient.md)"
            )
        return super().__call__(message, context)
