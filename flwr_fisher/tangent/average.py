"""TCT's averages: SCAFFOLD's, where the control variate needs no upload of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flwr_fisher.errors import ConfigurationError, check_range
from flwr_fisher.params import check_finite, check_same_layout, weighted_mean
from flwr_fisher.tangent.spectrum import check_rate


def tct_control(
    control_i: Tensor,
    control: Tensor,
    weight: Tensor,
    new_weight: Tensor,
    *,
    lr: float,
    local_steps: int,
) -> Tensor:
    r"""Return a client's control variate after its local steps.

    .. math:: c_i^+ = c_i - c + \frac{\Theta - \Theta_i}{M \eta}

    :func:`~flwr_fisher.rounds.scaffold_control` for one matrix. The next round's
    correction is :math:`h_i = c_i - c`, with the server's next :math:`c`. While all
    clients are in every round, that is the paper's
    :math:`h_i \leftarrow h_i + (\Theta^+ - \Theta_i) / (M \eta)`; a client that missed
    some knows no :math:`\Theta^+`, and with the next :math:`\Theta` in its place the
    paper's form does not reach the optimum.

    Parameters
    ----------
    control_i, control : Tensor
        ``[p, C]``, :math:`c_i` and the server's :math:`c`; zeros before round 1.
    weight, new_weight : Tensor
        ``[p, C]``, :math:`\Theta` and :math:`\Theta_i`, the latter as it is uploaded,
        since the server computes :math:`c_i^+ - c_i` from that.
    lr : float
        :math:`\eta`.
    local_steps : int
        M.

    Returns
    -------
    Tensor
        ``[p, C]``, in the dtype of `control_i`; computed in float64.

    Raises
    ------
    ConfigurationError
        If `lr` or `local_steps` is out of range.
    ParamsError
        If shapes differ, or the result is not finite.
    """
    moved = weight.double() - new_weight.double()
    for other in (control, moved):
        _check_shape(control_i, other, "control variates and weights")
    correction = control_i.double() - control.double()
    new = _plus_mean_gradient(correction, moved, lr, local_steps).to(control_i.dtype)
    check_finite({"control": new}, f"the client's control variate with lr={lr:g}")
    return new


def tct_average(
    weight: Tensor,
    control: Tensor,
    locals: Sequence[Tensor],
    weights: Sequence[float],
    *,
    participation: float = 1.0,
    lr: float,
    local_steps: int,
) -> tuple[Tensor, Tensor]:
    r"""Return the server's new weights and control variate.

    .. math:: \Theta^+ = \sum_{i \in S} p_i \Theta_i, \qquad
              c^+ = c + \rho \sum_{i \in S} p_i \Delta c_i, \qquad
              \Delta c_i = \frac{\Theta - \Theta_i}{M \eta} - c

    SCAFFOLD's server (:func:`~flwr_fisher.rounds.scaffold_step`). With full-batch steps
    it can tell :math:`\Delta c_i` from :math:`\Theta_i`, so that clients upload nothing
    else.

    Parameters
    ----------
    weight : Tensor
        ``[p, C]``, :math:`\Theta`, what the clients started from.
    control : Tensor
        ``[p, C]``, :math:`c`, what they were sent; zeros before round 1.
    locals : Sequence[Tensor]
        Each client's :math:`\Theta_i`, ``[p, C]``.
    weights : Sequence[float]
        Each client's weight, its number of examples; :math:`p_i` is its share in the
        cohort. Equal weights, as in the paper's code, solve another problem where
        clients differ in size.
    participation : float, default 1
        :math:`\rho` in (0, 1], the cohort's share of all clients' weights.
    lr : float
        :math:`\eta`.
    local_steps : int
        M.

    Returns
    -------
    weight, control : Tensor
        In the dtypes of `weight` and `control`; computed in float64.

    Raises
    ------
    ConfigurationError
        If a number is out of range.
    ParamsError
        If shapes differ, there is no client, weights are unusable, or a result is not
        finite.

    Examples
    --------
    >>> import torch
    >>> zero = torch.zeros(1, 1)
    >>> one, two = torch.ones(1, 1), torch.full((1, 1), 2.0)
    >>> tct_average(zero, zero, [one, two], [3, 1], lr=0.5, local_steps=2)
    (tensor([[1.2500]]), tensor([[-1.2500]]))
    """
    if not 0 < participation <= 1:
        raise ConfigurationError(f"participation must be in (0, 1]: {participation}")
    wide = [{"weight": local.double()} for local in locals]
    mean = weighted_mean(wide, weights)["weight"]
    _check_shape(weight, mean, "the clients' weights")
    _check_shape(weight, control, "the control variate")
    # All of it is linear in Theta_i: one client at the mean stands for the cohort.
    c = control.double()
    moved = weight.double() - mean
    shift = _plus_mean_gradient(-c, moved, lr, local_steps)
    new = c.add(shift, alpha=participation).to(control.dtype)
    check_finite({"weight": mean.to(weight.dtype), "control": new}, "the new average")
    return mean.to(weight.dtype), new


def _plus_mean_gradient(
    control: Tensor, moved: Tensor, lr: float, local_steps: int
) -> Tensor:
    """Add the mean gradient along the local steps, which led so far."""
    check_range("local_steps", local_steps, 1)
    check_rate(lr)
    return torch.add(control, moved, alpha=1 / (local_steps * lr))


def _check_shape(reference: Tensor, other: Tensor, what: str) -> None:
    check_same_layout({"weight": reference}, {"weight": other}, what)
