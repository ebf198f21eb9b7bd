"""FedFisher's merge: the mode of the product of the clients' posteriors."""

from collections.abc import Sequence
from typing import Any

from flwr_fisher.merge.iterative import Progress, Score
from flwr_fisher.merge.linear_system import linear_systems
from flwr_fisher.merge.options import check_score, merge_options
from flwr_fisher.merge.posterior import LocalPosterior, fedavg
from flwr_fisher.merge.solve import MergeResult, solve


def fedfisher(
    posteriors: Sequence[LocalPosterior],
    *,
    score: Score | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> MergeResult:
    r"""Merge the clients' models by their Fisher information.

    Finds the parameters that minimise, layer by layer,

    .. math:: \sum_i w_i \|\theta - \theta_i\|^2_{F_i}
              + \lambda_\ell \|\theta - \bar\theta\|^2, \qquad
              \bar\theta = \sum_i p_i \theta_i,

    FedFisher's eq. 6 with :math:`w_i = p_i` and :math:`\lambda = 0`; of its many
    minimisers then the one nearest :math:`\bar\theta` (eq. 7, Lemma 1; with ``adam``,
    some minimiser). The paper assumes clients of equal size; the
    :math:`p_i = n_i / \sum_j n_j` is what its derivation gives. No data is needed,
    except by `score`. What no curvature covers (buffers) is averaged.

    Parameters
    ----------
    posteriors : Sequence[LocalPosterior]
        One a client, all with the same keys, shapes and dtypes.
    solver : "cg" | "closed-form" | "adam" | "gd", default "cg"
        ``cg``: conjugate gradients, for any structure; a diagonal block is divided by,
        which is what they converge to. ``closed-form``: FisherMerge's, for diagonals.
        ``adam``: the optimiser of the paper's experiments. ``gd``: the gradient descent
        of its Algorithm 1.
    anchor : float, optional
        :math:`\rho \ge 0`; :math:`\lambda_\ell` is that share of the mean eigenvalue of
        the layer's :math:`\sum_i w_i F_i`. Default 0.03 with ``cg``, otherwise 0.
    shrink : float, optional
        In [0, 1]: scales correlations between a layer's inputs by ``1 - shrink``.
        Default 0.1 with ``cg``, otherwise 0.
    damping : float, optional
        In [0, 1]: draws the second moment of a layer's output gradients towards the
        multiple of the identity with the same trace; a client that is sure of nearly
        every example estimates it from few. Of no effect on a diagonal. Default 0.3
        with ``cg``, otherwise 0.
    balance : float, optional
        :math:`\gamma` in [0, 1]: in layer :math:`\ell`,
        :math:`w_i \propto p_i / (\operatorname{tr} F_{i\ell})^\gamma`, since an
        over-confident client's Fisher is small. Default 1 with ``cg``, otherwise 0.
    iterations : int, optional
        At most this many: by default 100 (``cg``) or 2000 (``adam``, ``gd``).
    tolerance : float, default 1e-6
        ``cg`` and ``gd`` stop when a layer's residual has fallen by this factor.
    lr : float, default 0.01
        The step of ``adam``.
    score : Callable[[dict[str, Tensor]], float], optional
        For ``adam``: called with the merged parameters every 100 steps, the best of
        which (the highest) is returned. The paper scores on 500 examples that its
        server holds.
    progress : Callable[[str], object], optional
        Called with how each layer's solution went, in words.
    **options
        `solver` and the seven after it, as described above.

    Returns
    -------
    MergeResult
        On the device of the clients' parameters.

    Raises
    ------
    UnknownNameError
        If `solver` is not known.
    ConfigurationError
        If a number is out of range, or `score` is given to another solver.
    ParamsError
        If there is no posterior, their layouts or dtypes differ, or a client's
        parameters or curvature are not finite, or its curvature is negative.
    StructureError
        If curvatures cover different parameters, or a closed form is wanted of a
        structure that has none.

    Examples
    --------
    Two models that were trained on different data, merged:

    >>> import torch
    >>> from flwr_fisher.curvature import fisher
    >>> from flwr_fisher.merge import LocalPosterior, fedfisher
    >>> from flwr_fisher.params import shared_state
    >>> clients = []
    >>> for data in torch.randn(2, 8, 3):
    ...     model = torch.nn.Linear(3, 2)  # and train it on the data
    ...     F = fisher(model, [data], structure="kfac")
    ...     clients.append(LocalPosterior(shared_state(model), F, len(data)))
    >>> merged = fedfisher(clients)
    >>> model.load_state_dict(merged.params)
    <All keys matched successfully>

    By hand: the surer client counts for more.

    >>> from flwr_fisher.curvature import Diagonal
    >>> sure = LocalPosterior({"w": torch.zeros(1)}, Diagonal({"w": torch.ones(1)}), 5)
    >>> flat = Diagonal({"w": torch.full((1,), 0.25)})
    >>> unsure = LocalPosterior({"w": torch.ones(1)}, flat, 5)
    >>> fedfisher([sure, unsure], solver="closed-form").params
    {'w': tensor([0.2000])}
    """
    chosen = merge_options(**options)
    check_score(score, chosen.solver)
    mean = fedavg(posteriors)
    blocks, shares = linear_systems(posteriors, mean, chosen)
    return solve(mean, blocks, shares, chosen, score, progress)
