"""Local training with other optimisers, schedules and mixed precision."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from oracles import seeded
from torch import nn
from torch.optim.lr_scheduler import StepLR

from flwr_fisher.client import LocalSGD
from flwr_fisher.errors import ConfigurationError

CPU = torch.device("cpu")
BATCHES = [(torch.randn(8, 3), torch.arange(8) % 2) for _ in range(3)]


def net():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def trained(config=None, **options):
    model = seeded(net)
    LocalSGD(**options)(model, BATCHES, CPU, config or {})
    return model.state_dict()


def same(got, want):
    return all(torch.equal(got[key], value) for key, value in want.items())


@pytest.mark.parametrize(("config", "lr"), [({}, 0.05), ({"lr": 0.02}, 0.02)])
def test_any_optimiser_is_the_loop_one_would_write(config, lr):
    model = seeded(net)
    adam = torch.optim.AdamW(model.parameters(), lr=lr)
    for x, y in BATCHES * 2:
        adam.zero_grad()
        F.cross_entropy(model(x), y).backward()
        adam.step()
    own = partial(torch.optim.AdamW, lr=0.05)
    assert same(trained(config, epochs=2, optimizer=own), model.state_dict())


def test_a_loss_that_rises_is_told(caplog):
    """It ended at a loss of 1e10, and the log had no word of it."""
    for lr, told in ((0.1, False), (1e4, True)):
        caplog.clear()
        trained(epochs=3, lr=lr)
        assert ("lower its learning rate" in caplog.text) == told


def below_zero(outputs, labels):
    return F.cross_entropy(outputs, labels) - 1.5


def test_nor_has_one_risen_that_is_below_zero(caplog):
    trained(epochs=3, lr=0.01, loss_fn=below_zero)
    assert "lower its learning rate" not in caplog.text


def test_a_large_batch_in_half_precision_has_a_finite_loss():
    batch = torch.zeros(10**4, 1).half(), torch.zeros(10**4).long()
    model, loss = nn.Linear(1, 2).half(), lambda outputs, labels: 0 * outputs.sum() + 10
    assert LocalSGD(loss_fn=loss)(model, [batch], CPU, {}) == {"train_loss": 10}


def test_a_schedule_takes_a_step_after_each_epoch():
    model = seeded(net)
    for lr in (0.4, 0.4, 0.2):
        LocalSGD(lr=lr, momentum=0.0)(model, BATCHES, CPU, {})
    halved = partial(StepLR, step_size=2, gamma=0.5)
    got = trained(epochs=3, lr=0.4, momentum=0.0, scheduler=halved)
    assert same(got, model.state_dict())
    got = trained({"lr": 0.4}, epochs=3, lr=0.1, momentum=0.0, scheduler=halved)
    assert same(got, model.state_dict())  # the schedule starts at the server's rate


def test_mixed_precision_is_the_models_forward_pass_in_half():
    seen = set()

    class Watched(nn.Linear):
        def forward(self, x):
            seen.add(super().forward(x).dtype)
            return super().forward(x)

    model = seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), Watched(5, 2)))
    loop = LocalSGD(epochs=20, lr=0.1, autocast=torch.bfloat16)
    metrics = loop(model, BATCHES, CPU, {})
    assert seen == {torch.bfloat16}
    assert 0 < metrics["train_loss"] < 0.69
    full = trained(epochs=20, lr=0.1)
    for key, value in model.state_dict().items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, full[key], rtol=0, atol=0.1)
        assert not torch.equal(value, full[key])


def test_gradients_are_told_by_epoch_and_step():
    loop, noted = LocalSGD(autocast=torch.bfloat16), list[tuple[int, int]]()
    loop(net(), BATCHES, CPU, {}, on_gradients=lambda *args: noted.append(args))
    assert noted == [(1, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"autocast": torch.int8}, "torch.bfloat16 or None, got torch.int8"),
        (
            {"optimizer": torch.optim.Adam, "lr": 0.1},
            "lr, momentum and weight_decay are for",
        ),
    ],
)
def test_mistakes_are_named(options, reason):
    with pytest.raises(ConfigurationError, match=reason):
        LocalSGD(**options)
