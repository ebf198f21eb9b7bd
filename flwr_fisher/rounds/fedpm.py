"""FedPM's preconditioned steps and preconditioned mixing (AAAI 2026)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_fisher.curvature import InputCovariance
from flwr_fisher.errors import ConfigurationError, ParamsError, check_positive
from flwr_fisher.params import Params, double, finite, shares_of, weighted_mean

Covariances = Mapping[str, InputCovariance]


@dataclass(frozen=True)
class Preconditioner:
    r"""FedPM's local preconditioner: FOOF, layer by layer.

    .. math:: W \leftarrow W - \eta\, \hat G (A + \delta I)^{-1}

    with :math:`\hat G` the gradient as a matrix, outputs by inputs, the bias last, and
    A the second moment of the layer's inputs (FedPM, AAAI 2026; FOOF: Benzing,
    "Gradient Descent on Neurons and its Link to Approximate Second-Order Optimization",
    ICML 2022). Other parameters keep their gradient.

    The paper's :math:`\delta` is absolute. Here it is a share of A's mean eigenvalue,
    :math:`\delta = d\, \operatorname{tr} A / n`: layers' inputs differ in scale by
    orders of magnitude (a convolution's A is summed over positions), and one share fits
    all of them.

    Parameters
    ----------
    covariances : Mapping[str, InputCovariance]
        The layers.
    factors : Mapping[str, Tensor]
        Their :math:`A + \delta I` as Cholesky factors, from :meth:`of`.

    Examples
    --------
    >>> A = torch.tensor([[[3.0, 0.0], [0.0, 1.0]]])
    >>> layers = {"w": InputCovariance("w", None, A)}
    >>> Preconditioner.of(layers, damping=0.5).direction({"w": torch.ones(1, 2)})
    {'w': tensor([[0.2500, 0.5000]])}
    """

    covariances: Covariances
    factors: Mapping[str, Tensor]

    @classmethod
    def of(cls, covariances: Covariances, *, damping: float) -> "Preconditioner":
        """Factorise the layers' second moments once, in float64.

        Each direction then takes two triangular solves.

        Parameters
        ----------
        covariances : Mapping[str, InputCovariance]
            The second moments, by the weights' names.
        damping : float
            d, positive.

        Raises
        ------
        ConfigurationError
            If `damping` is out of range, or too small for rounding.
        ParamsError
            If a second moment is not finite.
        """
        check_positive("damping", damping)
        factors = {}
        for name, layer in covariances.items():
            if not layer.A.isfinite().all():
                raise ParamsError(
                    f"the inputs of '{name}' overflow, so the model diverges: lower "
                    "the learning rate"
                )
            factor, info = torch.linalg.cholesky_ex(_damped(layer.A.double(), damping))
            if info.any():
                raise ConfigurationError(
                    f"damping={damping:g} is too small to invert the inputs' second "
                    f"moment of '{name}': raise it"
                )
            factors[name] = factor
        return cls(covariances, factors)

    def direction(self, gradient: Params) -> dict[str, Tensor]:
        """Return the gradient with the layers' parts preconditioned.

        Parameters
        ----------
        gradient : Mapping[str, Tensor]
            The gradient over the trained parameters; a layer that it lacks is left out.
        """
        direction = dict(gradient)
        for name, layer in self.covariances.items():
            if name in gradient:
                matrices = layer.as_matrices(gradient)
                solved = torch.cholesky_solve(
                    matrices.double().mT, self.factors[name]
                ).mT
                direction |= layer.as_params(solved.to(matrices.dtype), gradient)
        return direction


@dataclass(frozen=True)
class FedPMMixture:
    r"""The result of :func:`fedpm_mix`.

    Parameters
    ----------
    params : dict[str, Tensor]
        The mixed model, in the first client's order and dtypes.
    correction : dict[str, Tensor]
        :math:`W - \bar W`, the difference to FedAvg's mean, in float64.
    averaged : list[str]
        Weights of layers that were averaged because the mean of their A has a negative
        eigenvalue, or no finite solution. No second moment has that, so a client sent
        something else.
    """

    params: dict[str, Tensor]
    correction: dict[str, Tensor]
    averaged: list[str]


def fedpm_mix(
    trained: Sequence[Params],
    covariances: Sequence[Covariances],
    weights: Sequence[float],
    *,
    damping: float = 1e-3,
) -> FedPMMixture:
    r"""Return FedPM's preconditioned mixture of clients' models.

    Layer by layer, with :math:`p_i` a client's share of the weights,

    .. math:: W = \Big(\sum_i p_i W_i A_i\Big) \Big(\sum_i p_i A_i\Big)^{-1}

    (FedPM, AAAI 2026), the least-squares fit to the outputs that every client's layer
    has for its own inputs; :func:`~flwr_fisher.merge.regmean` is the similar method for
    one shot. If no client has inputs in some direction (MNIST's black border), the
    inverse does not exist. So this function solves for the step away from FedAvg's mean
    :math:`\bar W = \sum_i p_i W_i`,

    .. math:: W = \bar W + \Big(\sum_i p_i (W_i - \bar W) A_i\Big)
              \Big(\sum_i p_i A_i + \delta I\Big)^{-1}, \qquad
              \delta = \frac dn \operatorname{tr} \sum_i p_i A_i

    the minimum of :math:`\sum_i p_i \|(W - W_i) A_i^{1/2}\|^2 + \delta \|W - \bar
    W\|^2`. With d = 0 it is the paper's mixture. In the null space of all :math:`A_i`
    it is the mean, and if all :math:`A_i` are equal, it is the mean everywhere.
    Parameters without an A are averaged.

    Parameters
    ----------
    trained : Sequence[Mapping[str, Tensor]]
        A client's parameters and buffers.
    covariances : Sequence[Mapping[str, InputCovariance]]
        A client's :math:`A_i`, by the weights' names, at its own parameters.
    weights : Sequence[float]
        A client's weight, such as its number of examples.
    damping : float, default 1e-3
        d, positive. A is in float32, so its rounding is about 1e-7 of the largest
        eigenvalue, which is up to n 1e-7 of the mean eigenvalue. With a d well above
        this, rounding has no effect in the null space.

    Raises
    ------
    ConfigurationError
        If `damping` is out of range.
    ParamsError
        If there is no client, layouts differ, weights are unusable, or the result is
        not finite.

    Examples
    --------
    Along the inputs that only one client has seen, the mixture follows that client:

    >>> models = [{"w": torch.tensor([[1.0, 1.0]])}, {"w": torch.tensor([[5.0, 5.0]])}]
    >>> seen = [torch.diag(torch.tensor(d))[None] for d in ([1.0, 0.0], [0.0, 1.0])]
    >>> layers = [{"w": InputCovariance("w", None, A)} for A in seen]
    >>> fedpm_mix(models, layers, [1, 1], damping=1e-9).params
    {'w': tensor([[1., 5.]])}
    """
    check_positive("damping", damping)
    mean = weighted_mean(trained, weights)
    if any(each.keys() != covariances[0].keys() for each in covariances):
        raise ParamsError(
            "clients have second moments of inputs for different layers: all clients "
            "must train the same layers"
        )
    # In float64: the clients' own dtype would round the mean.
    covered = [
        name
        for layer in covariances[0].values()
        for name in (layer.weight, layer.bias)
        if name is not None
    ]
    wide = [double(each, covered) for each in trained]
    center = weighted_mean(wide, weights)
    correction: dict[str, Tensor] = {}
    averaged = []
    for name in covariances[0]:
        layers = [each[name] for each in covariances]
        found = _correction(wide, center, layers, shares_of(weights), damping)
        if found is None:
            averaged.append(name)
        else:
            correction |= found
    mixed = {k: (center[k] + v).to(mean[k].dtype) for k, v in correction.items()}
    return FedPMMixture(finite(mean | mixed, "the mixture"), correction, averaged)


def _correction(
    trained: Sequence[Params],
    center: Params,
    layers: Sequence[InputCovariance],
    shares: Sequence[float],
    damping: float,
) -> dict[str, Tensor] | None:
    """Return a layer's step away from the mean; None if there is no minimum."""
    middle = layers[0].as_matrices(center)
    gram = torch.zeros_like(layers[0].A, dtype=torch.float64)
    product = torch.zeros_like(middle)
    for share, params, layer in zip(shares, trained, layers, strict=True):
        A = layer.A.double()
        gram.add_(A, alpha=share)
        product.baddbmm_(layer.as_matrices(params) - middle, A, alpha=share)
    factor, info = torch.linalg.cholesky_ex(_damped((gram + gram.mT) / 2, damping))
    if info.any():
        return None
    solved = torch.cholesky_solve(product.mT, factor).mT
    if not solved.isfinite().all():  # a second moment beyond float64's range
        return None
    return layers[0].as_params(solved, trained[0])


def _damped(A: Tensor, damping: float) -> Tensor:
    """Return A + delta I; where A is zero, and with it the gradient, the identity."""
    delta = damping * A.diagonal(dim1=-2, dim2=-1).mean(-1)
    delta = torch.where(delta > 0, delta, torch.ones_like(delta))
    damped = A.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(delta[:, None])
    return damped
