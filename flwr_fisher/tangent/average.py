"""TCT's averages: SCAFFOLD's, without an upload for the control variate."""

from collections.abc import Sequence
from math import fsum
from operator import mul

from torch import Tensor

from flwr_fisher.errors import check_positive, check_range, check_whole
from flwr_fisher.params import check_finite, shares_of, weighted_mean


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
    :math:`h_i \leftarrow h_i + (\Theta^+ - \Theta_i) / (M \eta)`. A client that missed
    a round does not know :math:`\Theta^+`. With the next :math:`\Theta` instead, the
    paper's form does not reach the optimum.

    Parameters
    ----------
    control_i, control : Tensor
        ``[p, C]``, :math:`c_i` and the server's :math:`c`; zeros before round 1.
    weight, new_weight : Tensor
        ``[p, C]``, :math:`\Theta` and :math:`\Theta_i`, the latter as it is uploaded,
        because the server computes :math:`c_i^+ - c_i` from the upload.
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
    correction = control_i.double() - control.double()
    exact = correction.add(moved, alpha=_gradients_per_move(lr, local_steps))
    new = exact.to(control_i.dtype)
    check_finite({"control": new}, f"the client's control variate with lr={lr:g}")
    return new


def tct_average(
    weight: Tensor,
    control: Tensor,
    locals: Sequence[Tensor],
    weights: Sequence[float],
    *,
    parts: Sequence[float] | None = None,
    participation: float = 1.0,
    lr: float,
    local_steps: int,
) -> tuple[Tensor, Tensor]:
    r"""Return the server's new weights and control variate.

    .. math:: \Theta^+ = \sum_{i \in S} p_i \Theta_i, \qquad
              c^+ = c + \rho \sum_{i \in S} p_i \Delta c_i, \qquad
              \Delta c_i = \frac{\Theta - \Theta_i}{M \eta} - c

    SCAFFOLD's server (:func:`~flwr_fisher.rounds.scaffold_step`). With full-batch steps
    it can compute :math:`\Delta c_i` from :math:`\Theta_i`, so that clients upload
    nothing else.

    Parameters
    ----------
    weight : Tensor
        ``[p, C]``, :math:`\Theta`, from which the clients started.
    control : Tensor
        ``[p, C]``, :math:`c`, which the server sent them; zeros before round 1.
    locals : Sequence[Tensor]
        Each client's :math:`\Theta_i`, ``[p, C]``.
    weights : Sequence[float]
        Each client's weight, its number of examples; :math:`p_i` is its share in the
        cohort. If clients differ in size, equal weights, as in the paper's code, solve
        another problem.
    parts : Sequence[float], optional
        The part of its length to which each client's :math:`\Theta_i - \Theta` was cut
        before. The client's :math:`\Delta c_i` is cut to the same part. Default: all
        ones.
    participation : float, default 1
        :math:`\rho` in (0, 1], the cohort's share of all clients' weights.
    lr : float
        :math:`\eta`.
    local_steps : int
        M.

    Returns
    -------
    weight, control : Tensor
        The new :math:`\Theta` and :math:`c`, in the dtypes of `weight` and `control`;
        computed in float64.

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
    check_range("participation", participation, 0, 1, above=0)
    wide = [{"weight": local.double()} for local in locals]
    mean, c = weighted_mean(wide, weights)["weight"], control.double()
    # All is linear in Theta_i, so one client at the mean stands for the cohort.
    moved = weight.double() - mean
    taken = 1.0 if parts is None else fsum(map(mul, parts, shares_of(weights)))
    shift = (c * -taken).add(moved, alpha=_gradients_per_move(lr, local_steps))
    new = mean.to(weight.dtype), c.add(shift, alpha=participation).to(control.dtype)
    check_finite(dict(zip(("weight", "control"), new, strict=True)), "the new average")
    return new


def _gradients_per_move(lr: float, local_steps: int) -> float:
    """Return the factor from a client's total step to its mean gradient."""
    check_whole("local_steps", local_steps, 1)
    check_positive("lr", lr)
    return 1 / (local_steps * lr)
