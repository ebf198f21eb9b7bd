"""FAGH's server step: Newton's direction from one Hessian row (Sen, Qin & Mohan)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flwr_fisher.errors import ConfigurationError, check_positive, check_range
from flwr_fisher.params import Params, check_finite, check_same_layout, finite, select


@dataclass(frozen=True)
class FaghMoments:
    r"""The moments that one step of FAGH passes to the next, before bias correction.

    Parameters
    ----------
    gradient : dict[str, Tensor]
        :math:`M_1`, in float32 or better.
    hvp : dict[str, Tensor]
        :math:`M_2`, of the Hessian's products with the probe.
    curvature : float
        The mean of :math:`u^\top H u`, as :math:`M_2` is that of :math:`H u`.
    steps : int
        :math:`t`, the number of steps so far.
    """

    gradient: dict[str, Tensor] = field(repr=False)
    hvp: dict[str, Tensor] = field(repr=False)
    curvature: float
    steps: int


@dataclass(frozen=True)
class FaghStep:
    r"""The result of a step of FAGH.

    Parameters
    ----------
    params : dict[str, Tensor]
        The new parameters, in the old ones' order and dtypes.
    moments : FaghMoments
        The moments for the next step.
    direction : dict[str, Tensor]
        :math:`(H + \rho I)^{-1} G`, which the step subtracted, times `lr`. Divided by
        its norm, it is the next round's probe if the probe is the momentum.
    curvature : float
        The bias-corrected :math:`u^\top H u`.
    fell_back : bool
        Whether that was too small to use, so that the direction is :math:`G / \rho`.
    """

    params: dict[str, Tensor] = field(repr=False)
    moments: FaghMoments = field(repr=False)
    direction: dict[str, Tensor] = field(repr=False)
    curvature: float
    fell_back: bool


def fagh_step(
    params: Params,
    gradient: Params,
    hvp: Params,
    probe_dot: float | Tensor,
    moments: FaghMoments | None,
    *,
    lr: float,
    rho: float,
    betas: tuple[float, float] = (0.9, 0.99),
    epsilon: float = 1e-6,
) -> FaghStep:
    r"""Take FAGH's server step along Newton's direction from one Hessian row.

    .. math:: \theta \leftarrow \theta - \eta (H + \rho I)^{-1} G

    From the cohort's means :math:`g = \sum_i p_i g_i` and :math:`v = \sum_i p_i H_i u`
    (Sen, Qin & Mohan, "FAGH: Accelerating Federated Learning with Approximated Global
    Hessian", Algorithm 1, lines 11-18),

    .. math::
        M_1 &\leftarrow \beta_1 M_1 + (1 - \beta_1) g, & G &= M_1 / (1 - \beta_1^t), \\
        M_2 &\leftarrow \beta_2 M_2 + (1 - \beta_2) v, & V &= M_2 / (1 - \beta_2^t),

    and :math:`c` from :math:`u^\top v` as :math:`V` is from :math:`v`. Then
    :math:`H = V V^\top / c` (eq. 6, where :math:`u = e_1` and :math:`c = V_1`), and by
    Sherman and Morrison, with :math:`\kappa = \|V\|^2 / c` and
    :math:`\hat V = V / \|V\|`,

    .. math:: (H + \rho I)^{-1} G
              = \frac1\rho \Big( G - \frac{\kappa}{\kappa + \rho}
                \hat V \hat V^\top G \Big).

    The paper prints two other denominators, in Algorithm 1, line 17, and in section
    5.2; neither gives the inverse.

    Parameters
    ----------
    params : Mapping[str, Tensor]
        The global parameters and buffers.
    gradient : Mapping[str, Tensor]
        :math:`g`, over the parameters that the step changes. Other params are returned
        as they are.
    hvp : Mapping[str, Tensor]
        :math:`v`, over the same parameters.
    probe_dot : float | Tensor
        :math:`u^\top v` for a probe :math:`u` of length 1: the first entry of `hvp` if
        the probe is the first coordinate, otherwise
        ``flwr_fisher.params.dot(probe, hvp)``.
    moments : FaghMoments | None
        What the last step returned; None before the first.
    lr : float
        :math:`\eta`.
    rho : float
        :math:`\rho > 0`, what is added to every eigenvalue.
    betas : tuple[float, float], default (0.9, 0.99)
        :math:`\beta_1` and :math:`\beta_2`, in [0, 1). A probe may change between
        steps, because :math:`c` is averaged together with :math:`V`. Then :math:`V`
        mixes the :math:`H u` of different :math:`u`; with :math:`\beta_2 = 0` it is
        only the last one.
    epsilon : float, default 1e-6
        In [0, 1]. If :math:`c \le \epsilon \|V\|`, the curvature along the probe is not
        positive or is only rounding, and the direction is :math:`G / \rho`.
        :math:`c / \|V\|` is the cosine of the angle between :math:`u` and :math:`H u`.

    Returns
    -------
    FaghStep
        The new parameters and moments, computed in float64.

    Raises
    ------
    ConfigurationError
        If a number is out of range.
    ParamsError
        If layouts differ, a result is not finite, or the moments belong to another
        model.

    Examples
    --------
    On a quadratic with the Hessian diag(4, 1), along its first axis, one step is
    Newton's, up to `rho`:

    >>> g = {"w": torch.tensor([8.0, 0.0])}
    >>> v = {"w": torch.tensor([4.0, 0.0])}
    >>> step = fagh_step({"w": torch.tensor([2.0, 0.0])}, g, v, 4.0, None, lr=1.0,
    ...                  rho=1e-6)
    >>> step.params["w"].round(decimals=4), step.curvature, step.fell_back
    (tensor([0., 0.]), 4.0, False)
    """
    check_range("epsilon", epsilon, 0, 1)
    check_positive("lr", lr, or_zero=True)
    check_positive("rho", rho)
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigurationError(f"betas must be two numbers in [0, 1), got {betas}")
    check_same_layout(select(params, gradient), gradient, "the gradient")
    check_same_layout(gradient, hvp, "hvp")
    c = float(probe_dot)
    betas = float(betas[0]), float(betas[1])
    t = 1 + (moments.steps if moments else 0)
    M1 = _moment(gradient, moments.gradient if moments else None, betas[0])
    M2 = _moment(hvp, moments.hvp if moments else None, betas[1])
    m = betas[1] * (moments.curvature if moments else 0.0) + (1 - betas[1]) * c
    G = {k: v / (1 - betas[0] ** t) for k, v in M1.items()}
    V = {k: v / (1 - betas[1] ** t) for k, v in M2.items()}
    curvature = m / (1 - betas[1] ** t)
    deflated = _without_curved_part(G, V, curvature, rho, epsilon)
    wanted = G if deflated is None else deflated
    exact = {k: (g / rho).to(params[k].device) for k, g in wanted.items()}
    new = {
        k: (v.double() - lr * exact[k]).to(v.dtype) if k in exact else v
        for k, v in params.items()
    }
    direction = {k: v.to(params[k].dtype) for k, v in exact.items()}
    first = finite(_kept(M1, params), "the gradient's moment")
    second = finite(_kept(M2, params), "the product's moment")
    moments = FaghMoments(first, second, m, t)
    check_finite(direction, "the direction of FAGH's step")
    along = torch.tensor(curvature, dtype=torch.float64)
    check_finite({"curvature": along}, "the probe")
    new = finite(new, "the model after FAGH's step")
    return FaghStep(new, moments, direction, curvature, deflated is None)


def _without_curved_part(
    G: Params, V: Params, curvature: float, rho: float, epsilon: float
) -> Params | None:
    r"""Return :math:`\rho (H + \rho I)^{-1} G`; None if the curvature is too small."""
    # Scaled by the largest entry first, so that no square overflows or vanishes.
    largest = max((float(v.abs().max()) for v in V.values() if v.numel()), default=0.0)
    if not largest > 0:
        return None
    V = {k: v / largest for k, v in V.items()}
    length = sum(float(v.square().sum()) for v in V.values()) ** 0.5
    cosine = curvature / largest / length
    if not cosine > epsilon:
        return None
    # kappa / (kappa + rho) is 1 / (1 + rho / kappa), which cannot overflow.
    rho_over_kappa = rho / largest * cosine / length
    projection = sum(float((V[k] * G[k]).sum()) for k in G) / length
    taken = projection / (1 + rho_over_kappa)
    return {k: g - V[k] * (taken / length) for k, g in G.items()}


def _kept(moment: Params, params: Params) -> dict[str, Tensor]:
    """Return a moment in the parameters' dtypes, but at least in float32."""
    wide = {k: torch.promote_types(params[k].dtype, torch.float32) for k in moment}
    return {k: v.to(wide[k]) for k, v in moment.items()}


def _moment(value: Params, last: Params | None, beta: float) -> dict[str, Tensor]:
    fresh = {k: (1 - beta) * v.detach().double() for k, v in value.items()}
    if last is None:
        return fresh
    check_same_layout(value, last, "moments")
    return {k: v.add(last[k].to(v), alpha=beta) for k, v in fresh.items()}
