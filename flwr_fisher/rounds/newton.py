"""GIANT's and DONE's Newton directions from local Hessians.

In both, a round has two exchanges. First, clients report gradients, and the server
computes their mean g. Then each client solves H_i d_i = g approximately, by
Hessian-vector products, and the server steps along the mean of the solutions.
"""

from collections.abc import Sequence

from torch import Tensor

from flwr_fisher.curvature.operators.solvers import Matvec, conjugate_gradient
from flwr_fisher.errors import check_positive, check_range, check_whole
from flwr_fisher.params import Params, add, finite, scale, subtract, weighted_mean
from flwr_fisher.rounds.updates import stepped


def giant_direction(
    hvp: Matvec,
    gradient: Params,
    *,
    iterations: int = 10,
    tolerance: float = 1e-6,
) -> dict[str, Tensor]:
    r"""Return a client's :math:`d_i \approx H_i^{-1} g` by conjugate gradients.

    (Wang, Roosta-Khorasani, Xu & Mahoney, "GIANT: Globally Improved Approximate Newton
    Method for Distributed Optimization", NeurIPS 2018, section 3: an approximate Newton
    direction from the local Hessian and the global gradient.) FAGH's comparison takes
    10 iterations.

    Parameters
    ----------
    hvp : Callable[[Params], dict[str, Tensor]]
        The product of the client's Hessian with a vector, as by
        :func:`flwr_fisher.curvature.hvp`.
    gradient : Mapping[str, Tensor]
        :math:`g`, the mean over all clients.
    iterations : int, default 10
        At most this many products.
    tolerance : float, default 1e-6
        Stop when the residual has fallen by this factor.

    Returns
    -------
    dict[str, Tensor]
        :math:`d_i`, which must be subtracted. GIANT is for convex losses. If an
        iteration meets a direction without positive curvature, this is the iterate
        before it, or :math:`g` if there is none: a step against it still descends.

    Raises
    ------
    ConfigurationError
        If a number is out of range.
    ParamsError
        If a product's layout is not the gradient's, or the direction is not finite.

    Examples
    --------
    >>> import torch
    >>> def twice(vector):
    ...     return {"w": 2 * vector["w"]}
    >>> giant_direction(twice, {"w": torch.tensor([4.0, 6.0])})
    {'w': tensor([2., 3.])}
    """
    check_whole("iterations", iterations, 1)
    check_range("tolerance", tolerance, 0, 1)
    found = conjugate_gradient(
        # A product takes a pass over the data, so none is computed in vain.
        *(hvp, gradient),
        iterations=iterations,
        tolerance=tolerance,
        look=1,
    )
    solution, norms = found.read()
    direction = solution if len(norms) > 1 else gradient
    return finite(direction, "GIANT's direction")


def done_direction(
    hvp: Matvec, gradient: Params, *, alpha: float, iterations: int = 10
) -> dict[str, Tensor]:
    r"""Return a client's :math:`d_i \approx H_i^{-1} g` by Richardson iterations.

    .. math:: d_i \leftarrow d_i + \alpha (g - H_i d_i), \qquad d_i^{(0)} = 0

    (Dinh, Tran, Nguyen, Bao, Rezaei Balef, Zhou & Zomaya, "DONE: Distributed
    Approximate Newton-type Method for Federated Edge Learning", IEEE TPDS 2022; the
    paper's :math:`d_i` has the opposite sign). It converges where
    :math:`0 < \alpha < 2 / \lambda_\max(H_i)` and the Hessian is positive definite.
    FAGH's comparison takes 10 iterations and :math:`\alpha` of 0.01 or 0.05.

    Parameters
    ----------
    hvp : Callable[[Params], dict[str, Tensor]]
        The product of the client's Hessian with a vector, as by
        :func:`flwr_fisher.curvature.hvp`.
    gradient : Mapping[str, Tensor]
        :math:`g`, the mean over all clients.
    alpha : float
        :math:`\alpha > 0`.
    iterations : int, default 10
        R; the first needs no product.

    Returns
    -------
    dict[str, Tensor]
        :math:`d_i`, to be subtracted.

    Raises
    ------
    ConfigurationError
        If a number is out of range.
    ParamsError
        If a product's layout is not the gradient's, or the direction is not finite.

    Examples
    --------
    >>> import torch
    >>> def twice(vector):
    ...     return {"w": 2 * vector["w"]}
    >>> done_direction(twice, {"w": torch.tensor([4.0])}, alpha=0.25, iterations=2)
    {'w': tensor([1.5000])}
    """
    check_whole("iterations", iterations, 1)
    check_positive("alpha", alpha)
    solution = scale(gradient, alpha)
    for _ in range(iterations - 1):
        solution = add(solution, subtract(gradient, hvp(solution)), alpha)
    return finite(
        solution, f"DONE's direction, which alpha={alpha:g} may be too large for"
    )


def newton_step(
    params: Params,
    directions: Sequence[Params],
    weights: Sequence[float],
    *,
    lr: float = 1.0,
) -> dict[str, Tensor]:
    r"""Return GIANT's and DONE's new model, :math:`\theta - \eta \sum_i p_i d_i`.

    Parameters
    ----------
    params : Mapping[str, Tensor]
        :math:`\theta`, parameters and buffers.
    directions : Sequence[Mapping[str, Tensor]]
        A client's direction :math:`d_i`. Params that they lack are returned as they
        are.
    weights : Sequence[float]
        A client's weight; :math:`p_i` is its share. In both papers all weights are
        equal.
    lr : float, default 1
        :math:`\eta`; 1 is Newton's own step.

    Raises
    ------
    ConfigurationError
        If `lr` is negative.
    ParamsError
        If layouts differ, there is no client, weights are unusable, or the result is
        not finite.
    """
    check_range("lr", lr, 0)
    return stepped(params, weighted_mean(directions, weights), -lr)
