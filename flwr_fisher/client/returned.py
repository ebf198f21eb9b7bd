"""What a client's own loops return, checked."""

from collections.abc import Mapping

import torch

from flwr_fisher.errors import ClientError


def checked_metrics(returned: object, loop: str) -> dict[str, float]:
    """Return metrics as numbers; a tensor of one entry is one, and so is a bool.

    Parameters
    ----------
    returned : object
        What came.
    loop : str
        What returned it, for the error.

    Raises
    ------
    ClientError
        If it is anything else than numbers by name.

    Examples
    --------
    >>> checked_metrics({"loss": torch.tensor(0.5), "late": True}, "train_fn")
    {'loss': 0.5, 'late': 1}
    """
    if not isinstance(returned, Mapping):
        raise ClientError(
            f"{loop} must return a dict of metrics, {{}} for none; got {returned!r}"
        )
    metrics = {}
    for key, value in returned.items():
        number = value.item() if isinstance(value, torch.Tensor) else value
        if not isinstance(key, str) or not isinstance(number, int | float):
            raise ClientError(
                f"{loop} returned {key!r}: {value!r}; metrics are numbers by name"
            )
        metrics[key] = int(number) if isinstance(number, bool) else number
    return metrics
