"""FedGA's displaced start of local training (Dandi et al. 2022)."""

from torch import Tensor

from flwr_fisher.errors import check_range
from flwr_fisher.params import Params, subtract
from flwr_fisher.rounds.updates import stepped


def fedga_start(
    params: Params, mean_gradient: Params, gradient: Params, *, beta: float
) -> dict[str, Tensor]:
    r"""Return the displaced parameters where a client of FedGA starts training.

    .. math:: \theta_i = \theta + v_i, \qquad
              v_i = -\beta \big( \nabla f(\theta) - \nabla f_i(\theta) \big)

    (Dandi, Barba & Jaggi, "Implicit Gradient Alignment in Distributed and Federated
    Learning", AAAI 2022, figure 1; FAGH's section 2 describes it as a displacement of
    the local gradient from the global one that initialises the local model). A round
    thus has two exchanges: clients report :math:`\nabla f_i(\theta)`, the server sends
    back their mean, clients displace and train, and the server averages their models
    as FedAvg does.

    With the weights of the mean gradient, the mean of the displacements is zero, so
    they do not move the average. Gradients at displaced points have, to first order in
    :math:`\beta`, the mean :math:`\nabla \big( f + \frac\beta2 \sum_i p_i \|\nabla f_i
    - \nabla f\|^2 \big)`: they reduce the loss and the disagreement of the clients.

    Parameters
    ----------
    params : Mapping[str, Tensor]
        :math:`\theta`, parameters and buffers.
    mean_gradient : Mapping[str, Tensor]
        :math:`\nabla f(\theta)`, the server's mean over the cohort, over the trained
        parameters. Other params are returned as they are.
    gradient : Mapping[str, Tensor]
        The client's :math:`\nabla f_i(\theta)`, over the same parameters.
    beta : float
        :math:`\beta \ge 0`; 0 is FedAvg.

    Raises
    ------
    ConfigurationError
        If `beta` is negative.
    ParamsError
        If layouts differ, or the start is not finite.

    Examples
    --------
    >>> import torch
    >>> params, mean = {"w": torch.zeros(2)}, {"w": torch.tensor([1.0, 0.0])}
    >>> fedga_start(params, mean, {"w": torch.tensor([1.0, 2.0])}, beta=0.5)
    {'w': tensor([0., 1.])}
    """
    check_range("beta", beta, 0)
    return stepped(params, subtract(mean_gradient, gradient), -beta)
