"""Whether a model treats each example of a batch by itself."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_fisher.errors import StructureError


def check_examples_are_independent(model: nn.Module, consequence: str) -> None:
    """Raise unless every batch norm of the model has running statistics.

    Parameters
    ----------
    model : nn.Module
        The model, which is used in eval mode.
    consequence : str
        What cannot be computed otherwise; a clause for the error message.

    Raises
    ------
    StructureError
        If a batch norm uses its batch's own statistics.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise StructureError(
                f"layer '{name}' normalises by the batch's own statistics, so "
                f"{consequence}: use track_running_stats=True, or group norm"
            )
