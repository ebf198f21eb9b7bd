"""What a Fisher on an accelerator waits for, holds and never reads."""

import copy

import pytest
import torch
from devices import pretended
from oracles import randn, relative, seeded
from test_devices import case
from torch import nn

from flwr_fisher.curvature import STRUCTURES, FisherOptions, Likelihood, fisher

DEVICE = pretended.NAME


@pytest.fixture(autouse=True)
def nothing_out_of_range():
    """On a GPU an index out of range ends the process, whatever is caught."""
    pretended.asserts.clear()
    yield
    assert pretended.asserts == []


class RelativeBias(nn.Module):
    """Swin's: a table that is indexed, once for all examples."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.table = nn.Parameter(torch.randn(9, 2))
        self.register_buffer("index", torch.arange(25) % 9)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.embed(x)
        bias = self.table[self.index].view(5, 5, 2).movedim(-1, 0)
        scores = (x @ x.mT).unsqueeze(1) + bias
        return self.head((scores.softmax(-1) @ x.unsqueeze(1)).mean((1, 2)))


class Positions(nn.Module):
    """A table of positions, of which the first few are taken; and a class token."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.places = nn.Parameter(torch.randn(8, 6))
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1)
        x = x + self.places[torch.arange(2, 2 + x.shape[1], device=x.device)]
        return self.head(x.tanh().mean(1))


@pytest.mark.parametrize("make", [RelativeBias, Positions])
def test_a_table_that_is_indexed_is_not_read_out_of_range(make):
    model, x = seeded(make), randn(1, 7, 5, 4)
    want = fisher(copy.deepcopy(model), [x], "diagonal")
    got = fisher(model.to(DEVICE), [x], "diagonal").to("cpu")
    for name, value in want.diagonal().items():
        assert relative(got.diagonal()[name], value) < 1e-4, name


class Patches(nn.Module):
    """A ViT's: a class token and positions, and nothing that is looked up."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.places = nn.Parameter(torch.randn(1, 6, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1)
        return self.head((x + self.places).tanh()[:, 0])


def test_a_model_that_looks_nothing_up_is_not_copied_to_the_host():
    model, x = seeded(Patches), randn(1, 7, 5, 4)
    want = fisher(copy.deepcopy(model), [x])
    with pretended.watch() as seen:
        got = fisher(model.to(DEVICE), [x]).to("cpu")
    of_got = sum(tensor.nbytes for tensor in got.tensors())
    assert seen.bytes_down() < of_got + 200, seen.where(["down"])
    assert relative(got.to_dense(), want.to_dense()) < 1e-4


def waits(model, batches, structure="kfac", **options):
    with pretended.watch() as seen:
        fisher(model, batches, structure, options=FisherOptions.full(**options))
    return seen


def more_waits(model, batch, *args, **options):
    """Return for what is waited four batches after the first, and how often."""
    one, five = (waits(model, [batch] * n, *args, **options) for n in (1, 5))
    return len(five.waits()) - len(one.waits()), five.where()


PASSES = {
    "kfac": {},
    "diagonal": {"structure": "diagonal"},
    "every piece": {"tolerance": 0},
    "sampled": {"expectation": "sampled"},
    "few passes": {"max_passes": 2},
}


@pytest.mark.parametrize("options", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("name", ["convolutions", "attention"])
def test_the_pass_waits_once_a_batch(name, options):
    model, inputs = case(name)
    more, where = more_waits(model.to(DEVICE), inputs, **options)
    assert more <= 4, where


@pytest.mark.parametrize("options", PASSES.values(), ids=PASSES)
def test_labels_that_are_none_cost_no_wait(options):
    """Of tokens, and of whole examples, which are left out."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(DEVICE)
    labels = torch.arange(42).reshape(7, 6) % 3
    labels[:, 1:3] = labels[2] = labels[5] = -100
    more, where = more_waits(model, (randn(3, 7, 6, 4), labels), **options)
    assert more <= 4, where


# A batch's own gradient is divided by the number of its labels, which is read as well.
@pytest.mark.parametrize(
    ("expectation", "most"), [("empirical", 1), ("empirical-batch", 2)]
)
def test_given_labels_are_checked_in_one_wait_a_batch(expectation, most):
    model, inputs = case("convolutions")
    batch = inputs, torch.arange(len(inputs)) % 3
    more, where = more_waits(
        model.to(DEVICE), batch, "diagonal", expectation=expectation
    )
    assert more <= 4 * most, where


def test_examples_are_chosen_without_a_wait():
    model, inputs = case("convolutions")
    model, options = model.to(DEVICE), FisherOptions(examples=3)
    seen = []
    for batches in (2, 6):
        with pretended.watch() as watched:
            fisher(model, [inputs] * batches, options=options, num_examples=24)
        seen.append(len(watched.waits()))
    assert seen[1] <= seen[0] + 1


@pytest.mark.parametrize("structure", STRUCTURES)
def test_what_a_pass_waits_for_beside_its_batches_does_not_grow_with_layers(structure):
    seen = {}
    for depth in (1, 4):
        layers = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(depth)]
        model = nn.Sequential(*layers, nn.Linear(4, 3)).to(DEVICE)
        seen[depth] = waits(model, [randn(0, 6, 4)], structure)
    assert len(seen[4].waits()) <= len(seen[1].waits()), seen[4].where()


def test_what_was_held_is_given_back():
    model, inputs = case("convolutions")
    model = model.to(DEVICE)
    own = [*model.parameters(), *model.buffers()]
    held = pretended.settled(sum(tensor.nbytes for tensor in own))
    for structure in STRUCTURES:
        fisher(model, [inputs] * 2, structure)
        assert pretended.settled(held) <= held, structure


def test_a_batch_is_not_split_where_each_part_costs_a_pass_of_launches():
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2))
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), head)
    x, seen = torch.zeros(128, 3, 32, 32), {}
    model.register_forward_hook(lambda _, args, __: sizes.append(len(args[0])))
    for device in ("cpu", DEVICE):
        sizes = seen[device] = []
        fisher(model.to(device), [x], options=FisherOptions.full(expectation="sampled"))
    assert 1 < seen["cpu"][-1] < 128
    assert seen[DEVICE][-1] == 128


class OtherNumbers(torch.Generator):
    """Draws other numbers on an accelerator, where the pretended one has the CPU's."""

    def manual_seed(self, seed):
        return super().manual_seed(seed + (self.device.type != "cpu"))


class Poisson(Likelihood):
    """Of a user's own, which draws where its outputs are."""

    def columns(self, outputs):
        return outputs.detach().mul(0.5).exp().reshape(1, len(outputs), -1, 1)

    def sample_score(self, outputs, generator):
        return torch.poisson(outputs.exp(), generator) - outputs.exp()

    def score(self, outputs, labels):
        return labels - outputs.exp()


@pytest.mark.parametrize(
    ("likelihood", "options"),
    [
        ("categorical", {"expectation": "sampled"}),
        ("bernoulli", {"expectation": "sampled"}),
        ("gaussian", {"expectation": "sampled"}),
        (Poisson(), {"expectation": "sampled"}),
        ("categorical", {"max_passes": 2}),
    ],
)
@pytest.mark.parametrize("positions", [(), (3,)])
def test_a_seed_draws_the_same_on_every_device(
    likelihood, options, positions, monkeypatch
):
    monkeypatch.setattr(torch, "Generator", OtherNumbers)
    model, x = seeded(lambda: nn.Linear(4, 6)), randn(1, 9, *positions, 4)
    want, got = (
        fisher(
            copy.deepcopy(model).to(device),
            [x],
            likelihood=likelihood,
            options=FisherOptions.full(**options),
            seed=3,
        ).to("cpu")
        for device in ("cpu", DEVICE)
    )
    assert relative(got.to_dense(), want.to_dense()) < 1e-5
