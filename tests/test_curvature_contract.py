"""What `fisher` leaves alone, and what it refuses."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from nets import VECTORS, CalledTwice, RawParameter
from oracles import (
    SMALL_SHAPE,
    dense_fisher,
    kinds,
    randn,
    relative,
    seeded,
    small_net,
)
from torch import Tensor, nn

from flwr_fisher import curvature
from flwr_fisher.curvature import (
    ENGINES,
    EXPECTATIONS,
    STRUCTURES,
    BlockDiagonal,
    Diagonal,
    Kronecker,
)
from flwr_fisher.errors import (
    ConfigurationError,
    DataError,
    StructureError,
    UnknownNameError,
)

# Every class, so that only rounding separates it from the oracles.
fisher = partial(curvature.fisher, tolerance=0)

# --- the model is left as it was ------------------------------------------------------


class Fragile(nn.Module):
    """A model of every kind of parameter that fails in its third forward pass."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.net = small_net()
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.ones(3))
        self.net[0].requires_grad_(False)
        self.limit, self.calls = limit, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.limit is not None and self.calls > self.limit:
            raise ZeroDivisionError("the model broke")
        return self.dropout(self.norm(self.net(x))) * self.scale


def snapshot(model: nn.Module) -> dict[str, Any]:
    hooks = {
        f"{name}.{kind}": len(getattr(module, kind))
        for name, module in model.named_modules()
        for kind in vars(module)
        if kind.endswith("_hooks") and getattr(module, kind) is not None
    }
    return {
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": hooks,
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "ids": {k: id(v) for k, v in model.state_dict(keep_vars=True).items()},
        "grads": {
            k: None if p.grad is None else (id(p.grad), p.grad.clone())
            for k, p in model.named_parameters()
        },
        "requires": {k: p.requires_grad for k, p in model.named_parameters()},
        "random": torch.get_rng_state(),
        "enabled": torch.is_grad_enabled(),
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(
            same(left[k], right[k]) for k in left
        )
    if isinstance(left, tuple):
        return all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def prepared(limit: int | None = None) -> nn.Module:
    """Return a model in mixed modes, with some gradients and a user's hook."""
    model = seeded(lambda: Fragile(limit)).train()
    model.net[2].eval()
    model.net[7].weight.grad = torch.full_like(model.net[7].weight, 3.0)
    model.net[5].register_forward_hook(lambda module, args, output: None)
    return model


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_model_is_left_as_it_was(structure: str, enabled: bool) -> None:
    model, x = prepared(), randn(1, 5, *SMALL_SHAPE)
    with torch.set_grad_enabled(enabled):
        before, data = snapshot(model), x.clone()
        fisher(model, x.split(2), structure=structure)
        assert same(snapshot(model), before)
        assert torch.equal(x, data)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_nngeometry_engine_leaves_the_model_as_it_was(structure: str) -> None:
    model = seeded(small_net).train()
    model[2].eval()
    before = snapshot(model)
    fisher(
        model,
        randn(1, 5, *SMALL_SHAPE).split(2),
        structure=structure,
        engine="nngeometry",
    )
    assert same(snapshot(model), before)


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_model_is_left_as_it_was_after_its_own_error(
    structure: str, limit: int
) -> None:
    model = prepared(limit)
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError, match="the model broke"):
        fisher(model, randn(1, 6, *SMALL_SHAPE).split(2), structure=structure)
    assert same(snapshot(model), before)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_model_is_left_as_it_was_after_the_loaders_error(structure: str) -> None:
    class Broken:
        def __iter__(self) -> Iterator[Tensor]:
            yield randn(1, 2, *SMALL_SHAPE)
            raise OSError("the disk is gone")

    model = prepared()
    before = snapshot(model)
    with pytest.raises(OSError, match="the disk is gone"):
        fisher(model, Broken(), structure=structure)
    assert same(snapshot(model), before)


def test_a_callers_no_grad_changes_nothing() -> None:
    model, x = seeded(small_net), randn(1, 5, *SMALL_SHAPE)
    for structure in STRUCTURES:
        want = fisher(model, [x], structure=structure)
        with torch.no_grad():
            got = fisher(model, [x], structure=structure)
        assert kinds(got) == kinds(want)
        assert torch.equal(got.to_dense(), want.to_dense())


def test_the_curvature_is_detached() -> None:
    model, x = seeded(RawParameter), VECTORS
    for structure in STRUCTURES:
        found = fisher(model, [x], structure=structure)
        assert not any(d.requires_grad for d in found.diagonal().values())


# --- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "known"),
    [("structure", STRUCTURES), ("expectation", EXPECTATIONS), ("engine", ENGINES)],
)
def test_an_unknown_name_comes_with_the_known_ones(
    what: str, known: tuple[str, ...]
) -> None:
    keywords: dict[str, Any] = {what: "kfca"}
    listed = ", ".join(known)
    with pytest.raises(
        UnknownNameError, match=f"unknown {what} 'kfca'; known: {listed}"
    ):
        fisher(nn.Linear(3, 3), [VECTORS], **keywords)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_without_trainable_parameters(engine: str) -> None:
    for model in (nn.Linear(3, 3).requires_grad_(False), nn.ReLU()):
        with pytest.raises(ConfigurationError, match="no trainable parameter"):
            fisher(model, [VECTORS], engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_loader_without_examples(structure: str, engine: str) -> None:
    for loader in ([], [VECTORS[:0]]):
        with pytest.raises(DataError, match="no examples"):
            fisher(nn.Linear(3, 3), loader, structure=structure, engine=engine)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"x": VECTORS}, "a mapping of 'x', .* batch_fn"),
        ([], "inputs as tensors, got a list of 0"),
        (("x", 1), "inputs as tensors, got a tuple of 2: str, int"),
        ("text", "inputs as tensors, got a str"),
    ],
)
def test_a_loader_of_something_else(batch: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        fisher(nn.Linear(3, 3), [batch])


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    ("tail", "shape"),
    [
        (nn.Flatten(0), "(15,)"),
        (nn.Unflatten(1, (3, 1)), "(5, 3, 1)"),
        (nn.Linear(3, 1), "(5, 1)"),
    ],
)
def test_an_output_that_is_not_logits(
    structure: str, tail: nn.Module, shape: str
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), tail)
    with pytest.raises(StructureError) as caught:
        fisher(model, [VECTORS], structure=structure)
    assert "logits of shape [batch, classes]" in str(caught.value)
    assert shape in str(caught.value)


def test_a_device_that_is_not_the_models() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(ConfigurationError, match=r"device=cuda.*on cpu: move it first"):
        fisher(model, [VECTORS], device="cuda")
    with pytest.raises(ConfigurationError, match="device=meta"):
        fisher(model, [VECTORS], device=torch.device("meta"))
    fisher(model, [VECTORS], device="cpu")
    fisher(model, [VECTORS], device=torch.device("cpu", 0))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_parameters_without_per_example_gradients_are_named(structure: str) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.odd = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            sign = 1 if x.sum().item() > 0 else 2
            return self.fc(x) * self.odd.mean() * sign

    with pytest.raises(StructureError, match=r"no per-example gradients for .*'odd'"):
        fisher(Branches(), [VECTORS], structure=structure)


@pytest.mark.parametrize("structure", ["kfac", "diagonal"])
def test_calls_that_depend_on_the_data_are_named(structure: str) -> None:
    class Sometimes(CalledTwice):
        def forward(self, x: Tensor) -> Tensor:
            x = self.fc(x)
            return self.head(self.fc(x) if len(x) == 1 else x)

    with pytest.raises(StructureError, match=r"layer 'fc' was called 2 times in one"):
        fisher(Sometimes(), VECTORS.split([4, 1]), structure=structure)

    class Folds(CalledTwice):
        def forward(self, x: Tensor) -> Tensor:
            rows = x.repeat(2, 1) if len(x) == 1 else x
            return self.head(self.fc(rows))[: len(x)]

    with pytest.raises(StructureError, match="'fc' was called with 2 rows for a batch"):
        fisher(Folds(), VECTORS.split([4, 1]), structure=structure)


@pytest.mark.parametrize("classes", [2, 3, len(VECTORS)])
@pytest.mark.parametrize("slopes", [1, 4])
def test_slopes_that_are_learnt_are_exact(slopes: int, classes: int) -> None:
    layers = nn.Linear(3, 4), nn.PReLU(slopes), nn.Linear(4, classes)
    model = seeded(lambda: nn.Sequential(*layers))
    found = fisher(model, [VECTORS], structure="dense").to_dense()
    assert relative(found, dense_fisher(model, VECTORS)) <= 1e-5


def test_every_layer_has_its_own_block() -> None:
    model = seeded(lambda: nn.Sequential(small_net(), nn.LayerNorm(3), nn.Linear(3, 3)))
    found = fisher(model, [randn(1, 3, *SMALL_SHAPE)])
    assert isinstance(found, BlockDiagonal)
    layouts = [(type(child), list(child.shapes)) for child in found.children]
    assert layouts == [
        (Kronecker, ["0.0.weight", "0.0.bias"]),
        (Kronecker, ["0.2.weight"]),
        (Kronecker, ["0.5.weight"]),
        (Kronecker, ["0.7.weight", "0.7.bias"]),
        (Kronecker, ["2.weight", "2.bias"]),
        (Diagonal, ["1.weight", "1.bias"]),
    ]
    assert Counter(kinds(found).values()) == {Kronecker: 8, Diagonal: 2}
