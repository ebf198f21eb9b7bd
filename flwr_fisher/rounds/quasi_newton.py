r"""Server steps along quasi-Newton directions, with K-FAC as the first metric.

Clients send a gradient of all their data in each step. Their pooled K-FAC F, taken once
at the first model and damped, gives the first direction, :math:`-\eta_0 F^{-1} g`
(Martens & Grosse 2015). Alone, F is too small where the model is sure, and it knows
nothing between layers. Each gradient corrects it: L-BFGS (Liu & Nocedal 1989; Nocedal &
Wright 2006, algorithm 7.4) with :math:`\gamma F^{-1}` as its initial inverse
Hessian, and :math:`\gamma` from the last pair (eq. 7.20 in F's metric). A step
after which the loss rose is taken back. What it has shown of the curvature stays, and
the next one is shorter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flwr_fisher.curvature import Curvature, Kronecker
from flwr_fisher.params import Params, add, dot, double, norm, scale, select, subtract

# Chosen on validation examples of six tables, MNIST and CIFAR-10.
DAMPING = 1e-3  # lambda; eigenvalues of F are curvatures of a mean loss in nats
FIRST = 0.05  # eta_0, the first gamma
_SHORTER = 0.25  # of the length of a direction, after a step that was taken back
_MOST_CHANGE = 10.0  # of gamma, in one step
TOO_FAR = 1e12  # a client's loss where its model's outputs are not finite
_TINY = 1e-10  # the least cosine between a step and the change of the gradient

Inverse = Callable[[Params], dict[str, Tensor]]
Pair = tuple[Params, Params]


@dataclass(frozen=True)
class Descent:
    r"""Where a descent is, and the step that it tries.

    Parameters
    ----------
    gradient : dict[str, Tensor]
        Of the mean loss at the model of least loss so far, in float64.
    loss : float
        There.
    step : dict[str, Tensor]
        From there to the model to try.
    gamma : float
        :math:`\gamma`.
    pairs : Sequence[tuple[Params, Params]]
        The steps so far, and how each changed the gradient, the oldest first.
    """

    gradient: dict[str, Tensor]
    loss: float
    step: dict[str, Tensor]
    gamma: float = FIRST
    pairs: Sequence[Pair] = ()

    @classmethod
    def begin(cls, gradient: Params, loss: float, inverse: Inverse) -> "Descent":
        """Return the first step, from the gradient at the first model.

        Parameters
        ----------
        gradient : Mapping[str, Tensor]
            Of the mean loss over all clients' data.
        loss : float
            The mean loss.
        inverse : Callable
            Returns a vector's product with the inverse of the damped K-FAC.

        Examples
        --------
        >>> import torch
        >>> gradient = {"w": torch.ones(1, dtype=torch.float64)}
        >>> Descent.begin(gradient, 1.0, lambda v: {"w": v["w"] / 2}).step
        {'w': tensor([-0.0250], dtype=torch.float64)}
        """
        return cls(double(gradient), loss, {})._turned(inverse, 1.0)

    def is_better(self, loss: float) -> bool:
        """Return whether the model tried is taken."""
        return loss <= self.loss

    def after(
        self,
        gradient: Params,
        loss: float,
        inverse: Inverse,
        *,
        same_clients: bool = True,
    ) -> "Descent":
        """Return the next step, from the gradient and the loss at the model tried.

        Parameters
        ----------
        gradient, loss, inverse
            As for :meth:`begin`.
        same_clients : bool, default True
            Whether the same clients have sent the gradient as the one before. Otherwise
            the change of the gradient is not used.
        """
        here = replace(self, gradient=double(gradient), loss=loss)
        pair = self.step, subtract(here.gradient, self.gradient)
        best = here if self.is_better(loss) else self
        # Not finite there: nothing is known but that the step was too long.
        if same_clients and loss <= 0.5 * TOO_FAR:
            best = best._with_pair(pair, inverse)
        if self.is_better(loss):
            return best._turned(inverse, 1.0)
        shorter = best._turned(inverse, _SHORTER)
        most = _SHORTER * float(norm(self.step))
        factor = min(1.0, most / max(float(norm(shorter.step)), 1e-300))
        return replace(shorter, step=scale(shorter.step, factor))

    def _with_pair(self, pair: Pair, inverse: Inverse) -> "Descent":
        """Return it with one more pair, if the loss is convex along the step."""
        step, change = pair
        slope = dot(step, change)
        if not slope > _TINY * (dot(step, step) * dot(change, change)).sqrt():
            return self
        gamma = float(slope / dot(change, inverse(change)))
        gamma = min(max(gamma, self.gamma / _MOST_CHANGE), self.gamma * _MOST_CHANGE)
        return replace(self, gamma=gamma, pairs=[*self.pairs, pair])

    def _turned(self, inverse: Inverse, length: float) -> "Descent":
        """Return it with a step along the quasi-Newton direction."""
        direction = two_loops(self.gradient, self.pairs, inverse, self.gamma)
        return replace(self, step=scale(direction, -length))


def damped_inverse(kfac: Curvature, damping: float = DAMPING) -> Inverse:
    r"""Return a function: a vector's product with a damped K-FAC's inverse.

    Of a layer it is
    :math:`(G + \sqrt\lambda / \pi\, I)^{-1} W (A + \pi \sqrt\lambda\, I)^{-1}`,
    where :math:`\pi^2` is the ratio of the factors' mean eigenvalues (Martens & Grosse
    2015, section 6.3); of other parameters, the inverse of the diagonal plus
    :math:`\lambda`.

    Parameters
    ----------
    kfac : Curvature
        What ``fisher`` returns, in float64.
    damping : float
        :math:`\lambda`.
    """
    solvers = [_solver(block, damping) for block in kfac.blocks()]

    def inverse(vector: Params) -> dict[str, Tensor]:
        parts = [solve(select(vector, names)) for names, solve in solvers]
        solved = {name: value for part in parts for name, value in part.items()}
        return select(solved, vector)

    return inverse


def _solver(block: Curvature, damping: float) -> tuple[list[str], Inverse]:
    """Return a block's parameters, and its damped solver."""
    if isinstance(block, Kronecker):
        factors = block.A_factor, block.G_factor
        a, g = (factor.trace() / factor.shape[-1] for factor in factors)
        ratio = torch.where((a > 0) & (g > 0), a / g, torch.ones_like(a)).sqrt()
        root = damping**0.5
        A, G = (
            factor
            + (part * root)[:, None, None] * torch.eye(factor.shape[-1]).to(factor)
            for factor, part in ((block.A, ratio), (block.G, 1 / ratio))
        )
        block, damping = block.with_factors(A, G), 0.0
    return list(block.shapes), block.solver(damping)


def two_loops(
    gradient: Params, pairs: Sequence[Pair], inverse: Inverse, factor: float
) -> dict[str, Tensor]:
    """Return the product of L-BFGS's inverse Hessian with a gradient.

    Parameters
    ----------
    gradient : Mapping[str, Tensor]
        In float64.
    pairs : Sequence[tuple[Params, Params]]
        Steps, and changes of the gradient, the oldest first. Their inner products are
        positive.
    inverse : Callable
        Returns a vector's product with the initial inverse, but for its `factor`.
    factor : float
        By which it is multiplied.
    """
    left, shares = dict(gradient), list[float]()
    for step, change in reversed(pairs):
        share = float(dot(step, left) / dot(step, change))
        left, shares = add(left, change, -share), [*shares, share]
    direction = scale(inverse(left), factor)
    for (step, change), share in zip(pairs, reversed(shares), strict=True):
        other = float(dot(change, direction) / dot(step, change))
        direction = add(direction, step, share - other)
    return direction
