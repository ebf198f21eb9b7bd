"""FedAvg: the mean of the clients' models, plain or over a secure sum."""

from collections.abc import Sequence
from typing import Any

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.server.exchange import (
    Exchange,
    ServerState,
    Step,
    Summation,
    Uploads,
    mean_vector,
)
from flwr_fisher.server.privacy import Privacy, check_privacy, settings_of
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.wire import Additive


class FedAvg(CurvatureStrategy):
    """FedAvg (McMahan et al., AISTATS 2017): the mean of the clients' models.

    The mean is the same as that of Flower's ``FedAvg``. As with all strategies of this
    library, a seed gives the same run again, a run survives a crash, and the server
    checks every reply. With `secure` the server sees the mean and no client's model.
    The clients may be of any kind, but their ``ClientApp`` must have a
    :class:`~flwr_fisher.secure.SecureSumsMod`. (Flower's own secure aggregation needs
    its legacy API.)

    Parameters
    ----------
    privacy : Privacy, optional
        With `secure`: DP-FedAvg (McMahan, Ramage, Talwar & Zhang, ICLR 2018). Each
        client clips its step, which counts once, and adds a share of the noise. Without
        secure sums Flower's ``DifferentialPrivacyServerSideFixedClipping`` does the
        same.
    **kwargs
        :class:`CurvatureStrategy`'s: Flower's FedAvg's sampling keywords, ``seed`` and
        ``secure``.

    Raises
    ------
    ConfigurationError
        If an argument is out of range, or if there is `privacy` without `secure`.

    Notes
    -----
    FedProx (Li et al., MLSys 2020) is FedAvg with another training on the clients. For
    FedProx, start this strategy with
    ``train_config=ConfigRecord({"proximal-mu": 0.1})``. Flower's ``FedProx`` sends the
    same, and :class:`~flwr_fisher.client.LocalSGD` follows it.

    Examples
    --------
    ::

        app = make_client_app(client_fn, mods=[SecureSumsMod()])  # on the clients
        strategy = FedAvg(fraction_train=0.5, secure=SecureSums())
        result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=10)
    """

    def __init__(self, *, privacy: Privacy | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.privacy = check_privacy(privacy, self.norm_statistics)
        if self.privacy is not None and self.secure is None:
            raise ConfigurationError(
                "privacy= needs secure=SecureSums(), because clients add their noise "
                "to a secure sum"
            )

    def exchanges(self, server_round: int) -> Sequence[Exchange[Additive]]:
        """Return one exchange, which asks the sampled clients to train."""
        read = Additive.reader("params")
        if self.privacy is None:
            mean = Summation[Additive]()
            return [Exchange({}, read, mean_model, additive=mean)]
        steps = Summation[Additive](weighted=True, privacy=self.privacy)
        return [Exchange({}, read, _add, additive=steps)]

    def settings(self) -> dict[str, Any]:
        """Return this strategy's own settings."""
        return settings_of(self.privacy)


def mean_model(state: ServerState, uploads: Uploads[Additive]) -> Step:
    """Return a step to the mean of the clients' models, with all groups of tensors."""
    return Step(ServerState(mean_vector(uploads, "params"), state.groups))


def _add(state: ServerState, uploads: Uploads[Additive]) -> Step:
    """Return a step by the mean of the clients' steps; integers do not change."""
    (summed,) = uploads
    step = summed.payload.part("params")
    return Step(ServerState({k: v + step[k] for k, v in state.params.items()}))
