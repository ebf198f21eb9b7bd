"""FedFish's formulas: a client's Fisher, and the server's mean (Dhawan et al.)."""

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

from flwr_fisher.curvature import Curvature, Diagonal
from flwr_fisher.options import Options, option
from flwr_fisher.params import Params, check_same_layout, shares_of, weighted_mean

_TINY = 1e-300
_AT_ONCE = 1 << 18  # entries of a parameter, over clients, that are in float64


class FishOptions(Options):
    """How a client of FedFish computes its Fisher; the defaults are the paper's."""

    fisher_source: str = option(
        "extra-pass",
        "Whether the Fisher is computed in a pass after the training, or from the "
        "gradients of its last epoch (Appendix A.5.1).",
        choices=("extra-pass", "last-epoch"),
    )
    reduction: str = option(
        "sum",
        "Whether it is the sum or the mean of squared batch gradients.",
        choices=("sum", "mean"),
    )
    power: float = option(
        1.0, "Each entry is raised to this power. With 0 all are equal.", low=0, high=1
    )
    balance: float = option(
        0.0, "The Fisher is then divided by this power of its trace.", low=0, high=1
    )

    def scaled(self, mean: Curvature, num_batches: int) -> Curvature:
        """Return a client's Fisher from the mean of its squared batch gradients."""
        fisher = mean
        if self.reduction == "sum" and self.balance < 1:  # balancing removes any factor
            fisher = fisher.scaled(num_batches)
        if self.power != 1:
            fisher = Diagonal({k: v**self.power for k, v in fisher.diagonal().items()})
        if self.balance and (trace := fisher.trace()):
            fisher = fisher.scaled(trace**-self.balance)
        return fisher


def fedfish_average(
    deltas: Sequence[Params], fishers: Sequence[Params], weights: Sequence[float]
) -> dict[str, Tensor]:
    r"""Return FedFish's pseudo-gradient, a Fisher-weighted mean of updates.

    Elementwise,

    .. math:: g = \frac{\sum_i w_i F_i \Delta_i}{\sum_i w_i F_i}

    (Dhawan, Mitchell, Charles, Garrett & Dziugaite, "Leveraging Function Space
    Aggregation for Federated Learning at Scale", TMLR 2024, Algorithm 1, line 8; with
    parameters for updates it is the minimiser of its eq. 4). Where all clients' Fishers
    are equal, also where they are all zero, it is FedAvg's
    :math:`\sum_i w_i \Delta_i / \sum_i w_i`, bit for bit what
    :func:`~flwr_fisher.params.weighted_mean` gives; where only one client's is not
    zero, it is that client's update.

    Parameters
    ----------
    deltas : Sequence[Mapping[str, Tensor]]
        A client's :math:`\Delta_i = \theta_G - \theta_i`, all with the same keys and
        shapes. They may be parameters :math:`\theta_i` instead.
    fishers : Sequence[Mapping[str, Tensor]]
        A client's diagonal :math:`F_i \ge 0`, shaped like its update. For a key that
        they lack (a buffer), the result is FedAvg's value.
    weights : Sequence[float]
        A client's :math:`w_i \ge 0`, not all zero; the paper's are :math:`|D_i|`.

    Returns
    -------
    dict[str, Tensor]
        The pseudo-gradient, in the first client's order and dtypes.

    Raises
    ------
    ParamsError
        If layouts differ; it names the client and the key. Also if there is no client
        or weights are unusable.

    Notes
    -----
    Sums are computed in float64. First, the Fishers of each entry are divided by the
    largest of them. Their common scale does not matter, and so no product overflows or
    vanishes.

    Examples
    --------
    The first entry matters to the second client alone, the last to neither:

    >>> deltas = [{"w": torch.ones(3)}, {"w": torch.zeros(3)}]
    >>> fishers = [[0.0, 3.0, 0.0], [2.0, 1.0, 0.0]]
    >>> fishers = [{"w": torch.tensor(fisher)} for fisher in fishers]
    >>> fedfish_average(deltas, fishers, weights=[10, 10])
    {'w': tensor([0.0000, 0.7500, 0.5000])}
    """
    mean = weighted_mean(deltas, weights)
    covered = {key: v for key, v in deltas[0].items() if key in fishers[0]}
    for index, fisher in enumerate(fishers):
        check_same_layout(covered, fisher, f"client {index}'s Fisher")
    clients = zip(deltas, fishers, shares_of(weights), strict=True)
    # A client of weight 0 does not count for the largest Fisher either.
    weighted = [client for client in clients if client[2] > 0]
    return mean | {key: _weighted_mean(weighted, key, mean[key]) for key in covered}


def fedfish_quotient(
    product: Params, fisher: Params, deltas: Params
) -> dict[str, Tensor]:
    r"""Return the same pseudo-gradient from sums over the clients.

    Parameters
    ----------
    product : Mapping[str, Tensor]
        :math:`\sum_i w_i F_i \Delta_i`, at any scale.
    fisher : Mapping[str, Tensor]
        :math:`\sum_i w_i F_i`, at the same scale.
    deltas : Mapping[str, Tensor]
        :math:`\sum_i w_i \Delta_i / \sum_i w_i`, for entries without a Fisher.

    Raises
    ------
    ParamsError
        If layouts differ.

    Examples
    --------
    >>> sums = {"w": torch.tensor([6.0, 0.0])}, {"w": torch.tensor([8.0, 0.0])}
    >>> fedfish_quotient(*sums, {"w": torch.tensor([0.5, 0.5])})
    {'w': tensor([0.7500, 0.5000])}
    """
    for what, part in (("the product", product), ("the Fisher", fisher)):
        check_same_layout(deltas, part, what)
    # Where no client has a Fisher, rounding may give a small negative sum.
    return {
        key: torch.where(
            fisher[key] > 0,
            product[key].double() / fisher[key].double().clamp_min(_TINY),
            deltas[key].double(),
        ).to(deltas[key].dtype)
        for key in deltas
    }


def _weighted_mean(
    clients: list[tuple[Params, Params, float]], key: str, mean: Tensor
) -> Tensor:
    # A few clients at once, so that few are in memory: of a large parameter, one.
    step = max(1, _AT_ONCE // max(1, mean.numel()))
    some = [clients[start : start + step] for start in range(0, len(clients), step)]

    def wide(tensors: Iterable[Tensor]) -> Tensor:  # [clients, entries]
        rows = torch.stack([tensor.reshape(-1) for tensor in tensors])
        return rows.to(mean.device, torch.float64)

    def fishers() -> Iterator[Tensor]:
        return (wide(fisher[key] for _, fisher, _ in few) for few in some)

    def parts() -> Iterator[Tensor]:
        for few, fisher in zip(some, fishers(), strict=True):
            shares = fisher.new_tensor([share for _, _, share in few])
            yield shares.unsqueeze(1) * (fisher / scale)

    lowest = reduce(torch.minimum, (fisher.amin(0) for fisher in fishers()))
    highest = reduce(torch.maximum, (fisher.amax(0) for fisher in fishers()))
    scale = torch.where(highest > 0, highest, 1.0)
    total = reduce(torch.add, (part.sum(0) for part in parts()))
    average = torch.zeros_like(total)
    for few, part in zip(some, parts(), strict=True):
        average += (part / total * wide(delta[key] for delta, _, _ in few)).sum(0)
    flat = torch.where(lowest == highest, mean.reshape(-1), average.to(mean.dtype))
    return flat.view(mean.shape)
