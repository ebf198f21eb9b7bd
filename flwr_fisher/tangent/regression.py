r"""A client's round of TCT's second stage: a linear regression (Yu et al. 2022).

Client :math:`i` has standardised features :math:`Z` and targets :math:`Y`: one-hot
labels minus :math:`1/C`. It takes M gradient steps on
:math:`\|Z \Theta - Y\|^2 / 2 n_i`, each corrected by :math:`h_i = c_i - c` as in
SCAFFOLD. :func:`tct_update` computes their end at once, by the eigenvalues of
:math:`Z Z^\top / n_i`. :func:`tct_steps` takes them one by one.
"""

import torch
from torch import Tensor

from flwr_fisher.errors import check_positive, check_whole
from flwr_fisher.tangent.spectrum import Spectrum, check_lr, times, transposed_times

# Where M eta lambda is below it, psi's difference would lose digits, and its series'
# third term is 1e-9 of the first.
_SMALL = 1e-4


def tct_update(
    Z: Tensor,
    Y: Tensor,
    weight: Tensor,
    h: Tensor | None,
    spectrum: Spectrum,
    *,
    lr: float,
    local_steps: int,
    residual: Tensor | None = None,
) -> Tensor:
    r"""Return the weights after M corrected gradient steps, by two products with `Z`.

    With :math:`Z Z^\top / n = Q \Lambda Q^\top`, :math:`E = Z \Theta_0 - Y`,

    .. math::
        \varphi(\lambda) = \frac{1 - (1 - \eta\lambda)^M}{\lambda}, \qquad
        \psi(\lambda) = \frac{\varphi(\lambda) - \eta M}{\lambda},

    the steps :math:`\Theta \leftarrow \Theta - \eta (Z^\top (Z\Theta - Y)/n - h)` end
    at

    .. math::
        \Theta_M = \Theta_0 + \eta M h
        - \tfrac1n Z^\top Q \big( \varphi(\Lambda) Q^\top E
        - \psi(\Lambda) Q^\top Z h \big).

    :func:`tct_steps` is the slow twin; for Y = 0 and h = 0 this is
    :math:`(I - \eta Z^\top Z / n)^M \Theta_0`.

    Parameters
    ----------
    Z : Tensor
        ``[n, p]``, of any floating dtype, also memory-mapped.
    Y : Tensor
        ``[n, C]``, the targets.
    weight : Tensor
        ``[p, C]``, :math:`\Theta_0`, the round's global weights.
    h : Tensor | None
        ``[p, C]``, the correction :math:`c_i - c`; without it this is FedAvg's local
        training.
    spectrum : Spectrum
        The spectrum of `Z`, from :func:`gram_spectrum`.
    lr : float
        :math:`\eta`, below :math:`2 / \lambda_\max`.
    local_steps : int
        M; 1 is full-batch gradient descent.
    residual : Tensor | None
        ``[n, C]``, :math:`E` from :func:`tct_residual`, if it is known already.

    Returns
    -------
    Tensor
        :math:`\Theta_M`, in `weight`'s shape and dtype. Products with `Z` are computed
        in the widest of float32, `Z`'s dtype and `weight`'s dtype; matrices
        :math:`n \times n` are in float64. With float32 the result is within about 1e-5
        of the exact one.

    Raises
    ------
    ConfigurationError
        If `local_steps` is not positive or `lr` is out of range.

    Examples
    --------
    >>> import torch
    >>> from flwr_fisher.tangent import gram_spectrum
    >>> Z, Y = torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0]])
    >>> zero = torch.zeros(2, 1)
    >>> tct_update(Z, Y, zero, None, gram_spectrum(Z), lr=0.1, local_steps=1)
    tensor([[1.],
            [2.]])
    """
    check_whole("local_steps", local_steps, 1)
    check_lr(lr, spectrum.largest)
    E = tct_residual(Z, Y, weight) if residual is None else residual.double()
    phi, psi = _filters(spectrum.eigenvalues, lr, local_steps)
    Q = spectrum.eigenvectors
    inner = phi.unsqueeze(1) * (Q.mT @ E)
    if h is not None:
        inner -= psi.unsqueeze(1) * (Q.mT @ times(Z, h.to(weight)))
    moved = weight - transposed_times(Z, Q @ inner / len(Z), weight.dtype)
    return moved if h is None else moved.add_(h, alpha=lr * local_steps)


def tct_steps(
    Z: Tensor,
    Y: Tensor,
    weight: Tensor,
    h: Tensor | None,
    *,
    lr: float,
    local_steps: int,
) -> Tensor:
    r"""Take M corrected gradient steps on a client's regression, one by one.

    .. math:: \Theta \leftarrow \Theta - \eta \big( Z^\top (Z \Theta - Y) / n - h \big)

    (Yu, Wei, Karimireddy, Ma & Jordan, "TCT: Convexifying Federated Learning using
    Bootstrapped Neural Tangent Kernels", NeurIPS 2022, stage 2). It needs no spectrum,
    so it also works for clients with too many examples for one. With an `lr` above
    :math:`2 / \lambda_\max` it diverges. Parameters, dtypes and errors are those of
    :func:`tct_update`.

    Examples
    --------
    >>> import torch
    >>> Z, Y = torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0]])
    >>> tct_steps(Z, Y, torch.zeros(2, 1), None, lr=0.1, local_steps=1)
    tensor([[1.],
            [2.]])
    """
    check_whole("local_steps", local_steps, 1)
    check_positive("lr", lr)
    theta, scale = weight.clone(), lr / len(Z)
    for _ in range(local_steps):
        E = tct_residual(Z, Y, theta)
        theta -= transposed_times(Z, E * scale, theta.dtype)
        if h is not None:
            theta.add_(h, alpha=lr)
    return theta


def tct_residual(Z: Tensor, Y: Tensor, weight: Tensor) -> Tensor:
    r"""Return :math:`E = Z \Theta - Y`, ``[n, C]`` in float64.

    The client's loss is ``E.square().sum() / (2 * n)``, and its predictions are the
    classes where ``E + Y`` is largest. Pass it to :func:`tct_update`, which needs it,
    too.

    Parameters
    ----------
    Z, Y, weight : Tensor
        As for :func:`tct_update`.

    Examples
    --------
    >>> import torch
    >>> tct_residual(torch.ones(1, 2), torch.ones(1, 1), torch.full((2, 1), 0.75))
    tensor([[0.5000]], dtype=torch.float64)
    """
    return times(Z, weight) - Y


def _filters(eigenvalues: Tensor, lr: float, steps: int) -> tuple[Tensor, Tensor]:
    r"""Return phi and psi at every eigenvalue."""
    x = lr * eigenvalues
    small = x * steps < _SMALL
    # Any harmless value stands where the series does.
    x, lam = x.masked_fill(small, 0.25), eigenvalues.masked_fill(small, 1.0)
    # log1p keeps the digits that 1 - x loses; from x = 1 on it has no value.
    gentle = -torch.expm1(steps * torch.log1p(-x.clamp(max=0.5)))
    phi = torch.where(x < 0.5, gentle, 1 - (1 - x).pow(steps)) / lam
    psi = (phi - lr * steps) / lam
    first = -(lr**2) * steps * (steps - 1) / 2
    series = first * (1 - lr * eigenvalues * (steps - 2) / 3)
    psi = torch.where(small, series, psi)
    return torch.where(small, lr * steps + eigenvalues * series, phi), psi
