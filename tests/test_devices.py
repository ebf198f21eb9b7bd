"""Curvature, merges and tangent features on every device there is, and in TF32.

Needs PyTorch alone, not Flower, so that ``make gpu`` can run it anywhere.
"""

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
from devices import DEVICES, pretended
from nets import IMAGES, SERIES, Attention
from oracles import EXACT, randn, relative, seeded
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from flwr_fisher.curvature import STRUCTURES, Kronecker, fisher
from flwr_fisher.merge import refresh_norms
from flwr_fisher.tangent import TangentFeatures, closed_form_head, head_sums
from flwr_fisher.tangent.frozen_head import head_losses

pytestmark = pytest.mark.parametrize("device", DEVICES)


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 2, stride=2),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


class Recurrent(nn.Module):
    """What cuDNN refuses to take back in eval mode."""

    def __init__(self):
        super().__init__()
        self.cells = nn.GRU(SERIES.shape[-1], 5, batch_first=True)
        self.head = nn.Linear(5, 3)
        self.cells.requires_grad_(False)

    def forward(self, x):
        return self.head(self.cells(x)[0].mean(1))


CASES = {
    "convolutions": (convolutions, IMAGES),
    "attention": (Attention, randn(1, 5, 6, 4)),
    "recurrent": (Recurrent, SERIES),
}


def case(name):
    make, inputs = CASES[name]
    model = seeded(make)
    model(inputs)
    return model, inputs


class TF32(TorchDispatchMode):
    """Rounds what is multiplied to ten bits, as a GPU's tensor cores may."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("mm", "bmm", "convolution", "convolution_backward"):
            args = tree_map(_ten_bits, args)
        elif name.rstrip("_") in ("addmm", "baddbmm"):
            args = (args[0], *tree_map(_ten_bits, args[1:]))
        return function(*args, **(kwargs or {}))


def _ten_bits(value):
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return value
    bits = value.contiguous().view(torch.int32)
    return ((bits + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32).view_as(value)


@contextmanager
def tf32(device):
    """Let matrices be multiplied in TF32; on a CPU it is acted out."""
    if device == "cpu":
        with TF32():
            yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def waits_of(device):
    """Yield a list, which in the end has an entry for every wait for the device."""
    found = []
    if pretended:
        with pretended.watch() as seen:
            yield found
        found.extend(seen.waits())
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # which warns of itself, once
        caught.clear()
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found.extend(each for each in caught if "synchroniz" in str(each.message))


def layers(curvature):
    return {b.weight for b in curvature.blocks() if isinstance(b, Kronecker)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_it_is_that_of_double_precision_on_the_cpu(name, structure, device):
    model, inputs = case(name)
    exact = fisher(copy.deepcopy(model).double(), [inputs.double()], structure)
    model, inputs = model.to(device), inputs.to(device)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = fisher(model, inputs.split(3), structure)
    assert next(iter(found.diagonal().values())).device.type == device
    assert found.shapes == exact.shapes
    assert relative(found.to("cpu").to_dense(), exact.to_dense()) < 1e-4


@pytest.mark.parametrize("name", CASES)
def test_tf32_costs_three_digits_and_no_structure(name, device):
    model, inputs = case(name)
    exact = fisher(copy.deepcopy(model).double(), [inputs.double()])
    model, inputs = model.to(device), inputs.to(device)
    with tf32(device):
        found = fisher(model, [inputs])
    assert layers(found) == layers(exact)
    error = relative(found.to("cpu").to_dense(), exact.to_dense())
    assert (1e-6 if device == "cpu" else 0) < error < 5e-3


@pytest.mark.parametrize("how", ["autocast", "parameters"])
@pytest.mark.parametrize("name", ["convolutions", "attention"])
def test_bfloat16_costs_two_digits_and_no_structure(name, how, device):
    model, inputs = case(name)
    exact = fisher(copy.deepcopy(model).double(), [inputs.double()], options=EXACT)
    model, inputs = model.to(device), inputs.to(device)
    if how == "parameters":
        model, inputs = model.bfloat16(), inputs.bfloat16()
    with torch.autocast(device, torch.bfloat16, enabled=how == "autocast"):
        found = fisher(model, [inputs], options=EXACT)
    assert layers(found) == layers(exact)
    assert relative(found.to("cpu").to_dense(), exact.to_dense()) < 0.05


def test_recurrent_layers_go_back_in_eval_mode_and_the_setting_is_left(device):
    model, inputs = case("recurrent")
    model, inputs = model.to(device), inputs.to(device)
    seen = []
    model.register_forward_hook(
        lambda *_: seen.append(torch.backends.cudnn.enabled and not model.training)
    )
    before = torch.backends.cudnn.enabled
    fisher(model, [inputs])
    assert not any(seen)
    assert torch.backends.cudnn.enabled == before
    assert model.training


def test_statistics_of_norms_are_those_of_the_cpu(device):
    model = nn.Sequential(
        *(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten()),
        nn.BatchNorm1d(4, momentum=None),
    )
    here, there = model, copy.deepcopy(model).to(device)
    batches = IMAGES[:3], IMAGES + 1
    refresh_norms(here, batches)
    refresh_norms(there, [batch.to(device) for batch in batches])
    for name, value in here.state_dict().items():
        assert there.state_dict()[name].device.type == device
        got = there.state_dict()[name].cpu()  # of normalised inputs a mean is near 0
        torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-6)
    assert here[1].running_mean.any()


def test_tangent_features_are_those_of_the_cpu(device):
    model, inputs = case("convolutions")
    here = TangentFeatures(model, 100)(inputs)
    there = TangentFeatures(copy.deepcopy(model).to(device), 100)(inputs.to(device))
    assert there.device.type == device
    assert relative(there.cpu(), here) < 1e-4


def test_a_heads_sums_and_losses_are_those_of_the_cpu(device):
    model, inputs = case("convolutions")
    y = torch.arange(len(inputs)) % 3
    found = []
    for where in ("cpu", device):
        there = copy.deepcopy(model).to(where)
        batches = [(inputs.to(where), y.to(where))]
        sums = head_sums(there, batches, "5")
        solved = closed_form_head(sums, bias=True, ridge=0.1)
        asked = there, batches, "5", solved, [0.5, 1.0], nn.functional.cross_entropy
        found.append((sums.gram, sums.cross, *head_losses(*asked)))
    for here, other in zip(*found, strict=True):
        assert other.device.type == "cpu"
        assert relative(other, here) < 1e-5


def test_the_loop_waits_for_the_device_once_a_batch(device):
    if device not in ("cuda", "pretended"):
        pytest.skip("nothing tells of waits")
    model, inputs = case("convolutions")
    model, inputs = model.to(device), inputs.to(device)

    def waits(batches):
        with waits_of(device) as seen:
            fisher(model, [inputs] * batches)
        return len(seen)

    assert waits(6) - waits(1) <= 5
