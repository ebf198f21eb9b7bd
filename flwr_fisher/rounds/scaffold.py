"""SCAFFOLD's means of models and of control variates (Karimireddy et al. 2020)."""

from collections.abc import Sequence

from torch import Tensor

from flwr_fisher.errors import check_positive, check_range
from flwr_fisher.params import (
    Params,
    add,
    check_same_layout,
    finite,
    select,
    subtract,
    weighted_mean,
)


def scaffold_step(
    params: Params,
    control: Params,
    deltas: Sequence[Params],
    control_deltas: Sequence[Params],
    weights: Sequence[float],
    *,
    participation: float = 1.0,
    lr: float = 1.0,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    r"""Return SCAFFOLD's new model and control variate.

    .. math:: \theta \leftarrow \theta - \eta_g \sum_{i \in S} p_i \Delta_i, \qquad
              c \leftarrow c + \frac{|S|}{N} \sum_{i \in S} p_i \Delta c_i

    (Karimireddy, Kale, Mohri, Reddi, Stich & Suresh, "SCAFFOLD: Stochastic Controlled
    Averaging for Federated Learning", ICML 2020, Algorithm 1, lines 16-17). The paper
    weights clients equally. Its clients step along :math:`g_i(y) - c_i + c`.

    Parameters
    ----------
    params : Mapping[str, Tensor]
        :math:`\theta`, parameters and buffers.
    control : Mapping[str, Tensor]
        :math:`c`, over the parameters that are trained; zeros before the first round.
    deltas : Sequence[Mapping[str, Tensor]]
        A client's :math:`\Delta_i = \theta - \theta_i`, shaped like `control`. Other
        params are returned as they are.
    control_deltas : Sequence[Mapping[str, Tensor]]
        A client's :math:`\Delta c_i = c_i^+ - c_i`, from :func:`scaffold_control`.
    weights : Sequence[float]
        A client's weight; :math:`p_i` is its share in the cohort. If all weights are 1,
        it is the paper's method. With :math:`n_i` the fixed point is that of the mean
        over examples.
    participation : float, default 1
        In (0, 1]: the cohort's share of all clients, :math:`|S| / N`, or of their
        weights. Then :math:`c` stays the mean of all clients' :math:`c_i`.
    lr : float, default 1
        :math:`\eta_g`.

    Returns
    -------
    params, control : dict[str, Tensor]
        The new :math:`\theta` and :math:`c`.

    Raises
    ------
    ConfigurationError
        If `participation` or `lr` is out of range.
    ParamsError
        If layouts differ, there is no client, weights are unusable, or :math:`c` is
        not finite.

    Examples
    --------
    One of two clients takes part:

    >>> import torch
    >>> zero, one = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
    >>> scaffold_step(one, zero, [one], [one], [1], participation=0.5)
    ({'w': tensor([0.])}, {'w': tensor([0.5000])})
    """
    check_range("participation", participation, 0, 1, above=0)
    check_range("lr", lr, 0)
    step, shift = weighted_mean(deltas, weights), weighted_mean(control_deltas, weights)
    check_same_layout(control, step, "deltas")
    new = add(control, shift, participation)
    moved = add(select(params, step), step, -lr)
    return {**params, **moved}, finite(new, "the new control variate")


def scaffold_control(
    control: Params, server_control: Params, delta: Params, *, steps: int, lr: float
) -> dict[str, Tensor]:
    r"""Return a client's new control variate, by the paper's option II.

    .. math:: c_i^+ = c_i - c + \frac{\theta - \theta_i}{K \eta_l}

    (Algorithm 1, line 12), for K local steps of plain SGD with the rate :math:`\eta_l`:
    then it is the mean of the gradients along the client's steps. With momentum it is
    not.

    Parameters
    ----------
    control, server_control : Mapping[str, Tensor]
        :math:`c_i` and :math:`c`; zeros at first.
    delta : Mapping[str, Tensor]
        :math:`\theta - \theta_i`, of the same layout.
    steps : int
        K, the number of local steps.
    lr : float
        :math:`\eta_l > 0`.

    Raises
    ------
    ConfigurationError
        If `steps` or `lr` is out of range.
    ParamsError
        If layouts differ, or the result is not finite.
    """
    check_range("steps", steps, 1)
    check_positive("lr", lr)
    new = add(subtract(control, server_control), delta, 1 / (steps * lr))
    return finite(new, "the client's control variate")
