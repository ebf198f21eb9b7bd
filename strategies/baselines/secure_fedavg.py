"""FedAvg over a secure sum: the server sees the mean, and no client's model."""

from collections.abc import Sequence
from typing import Any

from flwr_fisher.params import weighted_mean
from flwr_fisher.server.exchange import (
    Exchange,
    ServerState,
    Step,
    Summed,
    Uploads,
    weights_of,
)
from flwr_fisher.server.noise import Privacy, check_privacy, settings_of
from flwr_fisher.server.secure_options import SecureSums
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
    privacy : Privacy, optional
        Make it DP-FedAvg (McMahan, Ramage, Talwar & Zhang, ICLR 2018): each client's
        step is clipped, counts once, and has a share of the noise. Without secure sums
        Flower's ``DifferentialPrivacyServerSideFixedClipping`` does the same.
    **kwargs
        :class:`CurvatureStrategy`'s: FedAvg's sampling keywords and ``seed``.

    Examples
    --------
    ::

        app = ClientApp(client_fn, mods=[SecureSumsMod()])  # on the clients
        strategy = SecureFedAvg(fraction_train=0.5)
        result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=10)
    """

    def __init__(
        self,
        *,
        secure: SecureSums | None = None,
        privacy: Privacy | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(secure=SecureSums() if secure is None else secure, **kwargs)
        self.privacy = check_privacy(privacy)

    def exchanges(self, server_round: int) -> Sequence[Exchange[VectorUpload]]:
        """Ask the sampled clients to train."""
        read = VectorUpload.reader(params=True)
        if self.privacy is None:
            mean = Summed[VectorUpload](weighted=True)
            return [Exchange({}, read, _step, summed=mean)]
        steps = Summed[VectorUpload](weighted=True, privacy=self.privacy)
        return [Exchange({}, read, _add, summed=steps)]

    def settings(self) -> dict[str, Any]:
        """Return this strategy's own settings."""
        return settings_of(self.privacy)


def _add(state: ServerState, uploads: Uploads[VectorUpload]) -> Step:
    """Add the mean of the clients' steps, whose integers are zero."""
    (summed,) = uploads
    step = summed.payload.params
    return Step(ServerState({k: v + step[k] for k, v in state.params.items()}))


def _step(state: ServerState, uploads: Uploads[VectorUpload]) -> Step:
    """Take the mean, which has come as one upload."""
    trained = [upload.payload.params for upload in uploads]
    return Step(ServerState(weighted_mean(trained, weights_of(uploads))))
