"""GIANT: clients' Newton directions by conjugate gradients."""

from flwr_fisher.strategies.baselines.newton import NewtonStrategy


class GIANT(NewtonStrategy):
    r"""Globally improved approximate Newton (Wang et al., NeurIPS 2018).

    Each client solves :math:`H_i d_i = g` for the mean gradient :math:`g` by conjugate
    gradients on its own Hessian, and the server steps along the mean of the
    :math:`d_i`. For convex losses; see :func:`flwr_fisher.rounds.giant_direction`.
    Clients are weighted by their examples, where the paper's have equally many; its
    line search is left out, `lr` stands in.

    Parameters
    ----------
    lr : float, default 1.0
        :math:`\eta`; 1 is Newton's own step.
    iterations : int, default 10
        Of conjugate gradients, a pass over a client's data each.
    **kwargs
        :class:`CurvatureStrategy`'s: FedAvg's sampling keywords and ``seed``.

    Raises
    ------
    ConfigurationError
        If an argument is out of range; or by ``configure_train``: a round has two
        exchanges, which Flower's own loop does not know.

    Notes
    -----
    Buffers stay as they are. ``CurvatureResult.details`` is the last mean direction, by
    parameter; a round's metrics have ``gradient-norm``.

    Examples
    --------
    ::

        strategy = GIANT(fraction_train=0.4)
        result = strategy.start(grid, ArrayRecord(shared_state(model)), num_rounds=100)
    """

    def solver(self) -> dict[str, str | int | float]:
        """Return the options of a client's solver."""
        return {"solver": "giant", "iterations": self.iterations}
