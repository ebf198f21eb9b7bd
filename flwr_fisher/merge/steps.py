"""A step of the parameters that a direction covers."""

from torch import Tensor

from flwr_fisher.errors import ParamsError
from flwr_fisher.params import Params, add

__all__ = ["stepped"]


def stepped(params: Params, direction: Params, factor: float) -> dict[str, Tensor]:
    """Return ``params + factor * direction``; what it lacks comes back as it is.

    Raises
    ------
    ParamsError
        If the direction has a key that the params lack, or another shape.
    """
    if odd := sorted(direction.keys() - params.keys()):
        raise ParamsError(f"the params lack {odd}, which are to be stepped")
    moved = {key: value for key, value in params.items() if key in direction}
    return {**params, **add(moved, direction, factor)}
