"""FedAvg over a secure sum: the server sees the mean, and no client's model."""

from collections.abc import Sequence
from typing import Any

from flwr_fisher.params import weighted_mean
from flwr_fisher.server.exchange import Exchange, ServerState, Step, Summed, Uploads
from flwr_fisher.server.secure_options import SecureSums
from flwr_fisher.server.uploads import weights_of
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.wire import VectorUpload


class SecureFedAvg(CurvatureStrategy):
    """FedAvg (McMahan et al., AISTATS 2017) with secure aggregation.

    Flower's own secure aggregation is of its legacy API. Clients of any kind take part
    whose ``ClientApp`` has a :class:`~flwr_fisher.client.SecureSumsMod`, and whose
    replies hold parameters by name.

    Parameters
    ----------
    secure : SecureSums, optional
        How sums are taken.
    **kwargs
        :class:`CurvatureStrategy`'s: FedAvg's sampling keywords and ``seed``.

    Examples
    --------
    ::

        app = ClientApp(client_fn, mods=[SecureSumsMod()])  # on the clients
        strategy = SecureFedAvg(fraction_train=0.5)
        result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=10)
    """

    def __init__(self, *, secure: SecureSums | None = None, **kwargs: Any) -> None:
        super().__init__(secure=SecureSums() if secure is None else secure, **kwargs)

    def exchanges(self, server_round: int) -> Sequence[Exchange[VectorUpload]]:
        """Ask the sampled clients to train."""
        read, mean = (
            VectorUpload.reader(params=True),
            Summed[VectorUpload](weighted=True),
        )
        return [Exchange({}, read, _step, summed=mean)]


def _step(state: ServerState, uploads: Uploads[VectorUpload]) -> Step:
    """Take the mean, which has come as one upload."""
    trained = [upload.payload.params for upload in uploads]
    return Step(ServerState(weighted_mean(trained, weights_of(uploads))))
