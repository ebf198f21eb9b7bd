r"""K-FAC from sums: a client's contribution.

A sum of Kronecker products is no Kronecker product. FedFisher (Jhunjhunwala et al.,
AISTATS 2024, section 4) concludes that a server needs each client's own factors. But
conjugate gradients need only two things: products of the sum with vectors, which are
sums of the clients' products, and a preconditioner. Each layer's partial traces give
one, and they add up as well:

.. math:: \sum_i p_i F_i v, \qquad \bar A = \sum_i p_i \operatorname{tr}(G_i) A_i,
          \qquad \bar G = \sum_i p_i \operatorname{tr}(A_i) G_i.
"""

from flwr_fisher.curvature import BlockDiagonal, Curvature, Diagonal, Kronecker
from flwr_fisher.curvature.operators.layer import LayerCurvature
from flwr_fisher.errors import StructureError


def balanced(
    curvature: Curvature, *, shrink: float, damping: float, balance: float
) -> Curvature:
    r"""Return a client's curvature as it enters the sums, except for its example count.

    It is :math:`F / (\operatorname{tr} F)^\gamma` in each layer, regularised. A client
    can compute it by itself.

    Parameters
    ----------
    curvature : Curvature
        The client's Fisher.
    shrink, damping, balance : float
        As for :func:`~flwr_fisher.merge.fedfisher`; `balance` is :math:`\gamma`.

    Examples
    --------
    >>> import torch
    >>> F = Diagonal({"w": torch.tensor([1.0, 3.0])})
    >>> balanced(F, shrink=0.3, damping=0.0, balance=1.0).diagonal()
    {'w': tensor([0.2500, 0.7500])}
    """
    blocks = []
    for block in curvature.made().blocks():
        regularised = block.made().regularised(shrink=shrink, damping=damping)
        trace = regularised.trace()
        # A client whose curvature is zero has nothing to balance.
        factor = trace**-balance if trace > 0 else 1.0
        blocks.append(regularised.scaled(factor) if balance else regularised)
    return BlockDiagonal(blocks)


def partial_traces(curvature: Curvature) -> Curvature:
    r"""Return layers' partial traces, each as a product :math:`\bar G \otimes \bar A`.

    Both factors have the layer's trace. Parameters that belong to no layer keep their
    diagonal.

    Raises
    ------
    StructureError
        If a block is neither. It names the block.
    """
    blocks: list[Curvature] = []
    for block in curvature.blocks():
        if isinstance(block, LayerCurvature):
            (A, of_A), (G, of_G) = block.partial_traces()
            factors = A.scaled(of_A).to_dense(), G.scaled(of_G).to_dense()
            blocks.append(
                Kronecker(block.weight, block.weight_shape, *factors, block.bias)
            )
        elif isinstance(block, Diagonal):
            blocks.append(block)
        else:
            raise StructureError(
                f"the curvature of {list(block.shapes)} is a {type(block).__name__}, "
                "but sums need structure='kfac' or 'diagonal'"
            )
    return BlockDiagonal(blocks)
