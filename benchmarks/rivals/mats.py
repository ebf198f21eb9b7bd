"""MaTS: models matched in their task subspaces (Tam, Bansal & Raffel, TMLR 2024)."""

from collections.abc import Sequence

from torch import Tensor

from flwr_fisher.curvature import Curvature, WeightedSum
from flwr_fisher.curvature.operators.base import conjugate_gradient
from flwr_fisher.curvature.operators.lazy import shared_blocks
from flwr_fisher.errors import check_whole
from flwr_fisher.merge.posterior import LocalPosterior, check_posteriors
from flwr_fisher.params import (
    Params,
    add,
    finite,
    norm,
    select,
    subtract,
    weighted_mean,
)

SCALING = 0.3
"""The sum of task vectors that the released code starts from, for a whole network."""

_TOLERANCE = 1e-5  # of the right-hand side's norm: SciPy's, which the code leaves


def mats(
    posteriors: Sequence[LocalPosterior],
    *,
    start: Params | None = None,
    iterations: int = 100,
) -> dict[str, Tensor]:
    r"""Return MaTS' parameters, as its released code finds them (r-three/mats).

    Conjugate gradients on :math:`\sum_i F_i\,\theta = \sum_i F_i \theta_i`, layer by
    layer. With :math:`F_i = G_i \otimes A_i` that is :math:`\sum_i G_i W A_i = \sum_i
    G_i W_i A_i`, which has no closed form. It is FedFisher's equation; what differs is
    that every model counts the same, whatever data it is of, that nothing is added to
    the factors, and that the start matters as much as the end: iterations are few, and
    both are chosen on validation data. The rest of the parameters is averaged.

    The released code takes *empirical* factors, of the first 1000 examples at most,
    and 100 iterations from :func:`task_arithmetic` for whole networks (10 for adapters,
    whose Fisher is dense). Its option to scale off-diagonal entries is 1 there: none.
    A convolution is no case of theirs; here it is a layer of its patches (KFC).

    Parameters
    ----------
    posteriors : Sequence[LocalPosterior]
        With curvatures of any structure.
    start : Mapping[str, Tensor], optional
        What the iterations start from; by default the models' mean.
    iterations : int, default 100
        At most; a layer whose residual is 1e-5 of the right-hand side ends before. With
        0 it is the start.

    Raises
    ------
    ConfigurationError
        If `iterations` is negative.
    ParamsError
        If the posteriors cannot be merged, or a solution is not finite.

    Examples
    --------
    Two fits of one weight, of which the second is four times as sure:

    >>> import torch
    >>> from flwr_fisher.curvature import Diagonal
    >>> weak, strong = (Diagonal({"w": torch.tensor([F])}) for F in (1.0, 4.0))
    >>> fits = [
    ...     LocalPosterior({"w": torch.tensor([0.0])}, weak, 1),
    ...     LocalPosterior({"w": torch.tensor([5.0])}, strong, 1),
    ... ]
    >>> mats(fits)
    {'w': tensor([4.])}
    """
    check_whole("iterations", iterations, 0)
    check_posteriors(posteriors)
    models = [posterior.params for posterior in posteriors]
    merged = weighted_mean(models, [1.0] * len(models))
    first = merged if start is None else start
    for parts in shared_blocks([posterior.curvature for posterior in posteriors]):
        merged |= _layer(parts, models, first, iterations)
    return merged


def _layer(
    parts: Sequence[Curvature], models: Sequence[Params], start: Params, iterations: int
) -> dict[str, Tensor]:
    made = [part.made() for part in parts]
    total = WeightedSum(made, [1.0] * len(made))
    here = select(start, total.shapes)
    target = {name: 0 * value for name, value in here.items()}
    for part, model in zip(made, models, strict=True):
        target = add(target, part.matvec(select(model, total.shapes)))
    left = subtract(target, total.matvec(here))
    remaining = float(norm(left))
    if not remaining:
        return here
    step = conjugate_gradient(
        total.matvec,
        left,
        iterations=iterations,
        tolerance=_TOLERANCE * float(norm(target)) / remaining,
    )
    what = f"MaTS' solution for {list(total.shapes)}"
    return finite(add(here, step.solution), what)


def task_arithmetic(
    models: Sequence[Params], start: Params, scaling: float = SCALING
) -> dict[str, Tensor]:
    r"""Return :math:`\theta_0 + \lambda \sum_i (\theta_i - \theta_0)`.

    (Ilharco et al., ICLR 2023.) With one over the number of models it is their mean.

    Parameters
    ----------
    models : Sequence[Mapping[str, Tensor]]
        The trained ones.
    start : Mapping[str, Tensor]
        :math:`\theta_0`, from which all were trained.
    scaling : float
        :math:`\lambda`.

    Examples
    --------
    >>> import torch
    >>> ends = [{"w": torch.tensor([2.0])}, {"w": torch.tensor([4.0])}]
    >>> task_arithmetic(ends, {"w": torch.tensor([1.0])}, 0.5)
    {'w': tensor([3.])}
    """
    merged = dict(start)
    for model in models:
        merged = add(merged, subtract(model, start), scaling)
    return merged
