"""FedPM: preconditioned local steps, and preconditioned mixing of the models."""

from collections.abc import Sequence
from typing import Any

from flwr_fisher.errors import check_positive
from flwr_fisher.log_lines import logger
from flwr_fisher.params import norm
from flwr_fisher.rounds import fedpm_mix
from flwr_fisher.server.exchange import Exchange, ServerState, Step, Uploads, weights_of
from flwr_fisher.strategies.base import CurvatureStrategy
from flwr_fisher.wire import CovarianceUpload


class FedPM(CurvatureStrategy):
    r"""Federated learning with preconditioned mixing (AAAI 2026).

    Clients take steps preconditioned by FOOF, and the server mixes their layers by the
    second moments of the inputs that each of them has seen:

    .. math:: W_i \leftarrow W_i - \eta\, \hat G (A_i + \delta I)^{-1}, \qquad
              W \leftarrow \Big(\sum_i p_i W_i A_i\Big) \Big(\sum_i p_i A_i\Big)^{-1}

    A client measures :math:`A_i` over its whole data twice a round, in one forward pass
    each: at the parameters that it received, for its steps, and at its trained
    parameters, for the upload. Parameters without an A (norm layers, embeddings, tied
    weights) take plain steps with the same :math:`\eta` and are averaged, as buffers
    are. See :class:`flwr_fisher.rounds.Preconditioner` and
    :func:`flwr_fisher.rounds.fedpm_mix`.

    Clients must train with ``LocalSGD``, whose learning rate is :math:`\eta`: near 1
    for a linear model, and from 0.03 on for a network; momentum multiplies it. Beside
    the model, an upload has an n by n matrix for each layer of n inputs.

    Parameters
    ----------
    damping : float, default 0.1
        :math:`\delta` of the local steps, as a share of A's mean eigenvalue. The
        paper's is absolute.
    mixing_damping : float, default 1e-3
        How strongly the mixture is drawn to FedAvg's mean, as a share of the mean
        eigenvalue of :math:`\sum_i p_i A_i`. It decides the result in directions in
        which clients have hardly any inputs.
    **kwargs
        :class:`CurvatureStrategy`'s: FedAvg's sampling keywords and ``seed``.

    Raises
    ------
    ConfigurationError
        If an argument is out of range.

    Notes
    -----
    If the learning rate is too large for the damping, the training diverges within a
    few rounds, and the clients' errors say so: lower the rate, or raise `damping`. A is
    measured in eval mode, with batch norm's running statistics. A round's metrics have
    ``mixing-norm``, the distance from FedAvg's mean to the mixture, and
    ``num-averaged-layers``, how many layers were averaged because their A cannot be
    second moments. Only the model is kept from round to round.
    ``CurvatureResult.details`` is the step from FedAvg's mean to the mixture, by
    parameter.

    Examples
    --------
    ::

        strategy = FedPM(damping=0.1, fraction_train=0.2)
        result = strategy.start(grid, ArrayRecord(shared_state(model)), num_rounds=100)
    """

    def __init__(
        self, *, damping: float = 0.1, mixing_damping: float = 1e-3, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        check_positive("damping", damping)
        check_positive("mixing_damping", mixing_damping)
        self.damping, self.mixing_damping = damping, mixing_damping

    def exchanges(self, server_round: int) -> Sequence[Exchange[CovarianceUpload]]:
        """Return one exchange: training with preconditioned steps."""
        return [
            Exchange(
                {"job": "fedpm", "damping": self.damping},
                CovarianceUpload.from_arrays,
                self._step,
                require_same_parameters=True,
            )
        ]

    def _step(self, state: ServerState, uploads: Uploads[CovarianceUpload]) -> Step:
        """Return a step to the mixture of the trained models."""
        mixture = fedpm_mix(
            [upload.payload.params for upload in uploads],
            [upload.payload.covariances for upload in uploads],
            weights_of(uploads),
            damping=self.mixing_damping,
        )
        if mixture.averaged:
            logger.warning(
                "averaging %s instead of mixing: the mean of the clients' second "
                "moments cannot be inverted, so a client sent wrong ones",
                ", ".join(mixture.averaged),
            )
        metrics: dict[str, int | float | list[float]] = {
            "mixing-norm": float(norm(mixture.correction)),
            "num-averaged-layers": len(mixture.averaged),
        }
        params = {key: mixture.params[key] for key in state.params}
        return Step(ServerState(params), metrics, mixture.correction)

    def settings(self) -> dict[str, Any]:
        """Return this strategy's own settings."""
        return {"damping": self.damping, "mixing_damping": self.mixing_damping}
