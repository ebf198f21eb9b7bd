"""The device on which a client trains its model."""

import torch
from torch import nn

from flwr_fisher.client.training import EvaluateFn, LocalSGD, TrainFn
from flwr_fisher.client.trial import log_once
from flwr_fisher.curvature.models import place_of
from flwr_fisher.devices import CPU, check_float64, default_device, has_float64


def chosen_device(
    device: torch.device | str | None,
    model: nn.Module,
    train_fn: TrainFn | None,
    evaluate_fn: EvaluateFn | None,
) -> torch.device:
    """Return the given device, or the default one for this client.

    ``LocalSGD`` moves batches to the model's device, so the model goes to the
    accelerator. The user's own loop may not move batches, so its model stays where it
    was, and the log says so.

    Raises
    ------
    ConfigurationError
        If the given device has no float64.
    """
    if device is not None:
        chosen = torch.device(device)
        check_float64(
            chosen,
            "train on the CPU, FisherClient(device='cpu'). Your own train_fn may move "
            "the model to that device, and leave it there",
        )
        return chosen
    found = default_device()
    plain = train_fn is None or isinstance(train_fn, LocalSGD)
    if (plain and evaluate_fn is None) or not isinstance(model, nn.Module):
        return found
    here = place_of(model)
    if here is None or not has_float64(here):
        return CPU
    if here.type != found.type:
        hint = f"the model stays on {here}, for your own loop; for {found}, pass "
        hint += f"FisherClient(device='{found}'), and move batches to the `device` that"
        log_once([f"{hint} the loop is called with"])
    return here
