"""Which of a model's tensors a step moves."""

from flwr_fisher.params import NORM_STATISTICS, Params


def stepped_names(params: Params) -> list[str]:
    """Return the names to step, where uploads do not say which parameters are trained.

    A model that a client uploads also has buffers, which a server only averages.

    Parameters
    ----------
    params : Mapping[str, Tensor]
        The model: parameters and buffers.
    trained : Collection[str], optional
        The names of the trained parameters (``trainable_names(model)``). By default,
        these are all floating-point tensors except those that are named like the
        statistics of torch's batch norm.

    Examples
    --------
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    >>> stepped_names(model.state_dict())
    ['0.weight', '1.weight', '1.bias']
    """
    return [
        key
        for key, value in params.items()
        if value.is_floating_point() and key.rpartition(".")[2] not in NORM_STATISTICS
    ]
