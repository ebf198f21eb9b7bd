"""The server's optimiser, stopped and restored at every step, against torch's own."""

from functools import partial

import pytest
import torch
from oracles import randn
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flwr_fisher.errors import ConfigurationError, ParamsError
from flwr_fisher.rounds import make_optimizer, server_step

FACTORIES = {
    "sgd": make_optimizer("sgd", 0.1),
    "sgd momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": make_optimizer("Adam", 0.1),
    "amsgrad": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "adagrad": make_optimizer("adagrad", 0.1),
    "rmsprop centred": partial(
        torch.optim.RMSprop, lr=0.1, momentum=0.5, centered=True, weight_decay=0.01
    ),
    **{name: make_optimizer(name, 0.1) for name in ("adafactor", "asgd", "radam")},
}


def start(dtype=torch.float32):
    return {
        "a.w": randn(0, 3, 4, dtype=dtype),
        "count": torch.tensor(7),
        "b": randn(1, 3, dtype=dtype),
        "scale": randn(2, dtype=dtype),
    }


def gradients(dtype=torch.float32, count=6):
    shapes = {"scale": (), "b": (3,), "a.w": (3, 4)}  # in another order
    return [
        {k: randn(100 * t + len(s), *s, dtype=dtype) for k, s in shapes.items()}
        for t in range(count)
    ]


def uninterrupted(factory, dtype=torch.float32):
    """Return where torch's optimiser gets, kept alive over all steps."""
    params = start(dtype)
    trained = {k: nn.Parameter(v) for k, v in params.items() if k != "count"}
    optimizer = factory(list(trained.values()))
    for gradient in gradients(dtype):
        for name, parameter in trained.items():
            parameter.grad = gradient[name].clone()
        optimizer.step()
    return {k: trained[k].detach() if k in trained else v for k, v in params.items()}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in FACTORIES),
        *((name, torch.bfloat16) for name in FACTORIES),
        ("adam", torch.float64),
    ],
)
def test_saved_and_restored_it_is_one_optimiser_bit_for_bit(name, dtype, tmp_path):
    factory, params = FACTORIES[name], start(dtype)
    state = {}
    for t, gradient in enumerate(gradients(dtype)):
        params, state = server_step(params, gradient, state, factory)
        assert all(isinstance(value, Tensor) for value in state.values())
        if state:
            save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / f"{t}")
            state = load_file(tmp_path / f"{t}")
    want = uninterrupted(factory, dtype)
    assert list(params) == list(want)
    for key, value in want.items():
        assert params[key].dtype == value.dtype
        assert torch.equal(params[key], value), key


def test_only_what_has_a_floating_gradient_is_stepped():
    params, gradient = start(), {"b": torch.ones(3), "count": torch.tensor(2)}
    factory = make_optimizer("adam", 0.1)
    got, state = server_step(params, gradient, {}, factory)
    assert all(torch.equal(got[k], params[k]) for k in ("a.w", "count", "scale"))
    assert not torch.equal(got["b"], params["b"])
    assert {key.split("/")[0] for key in state} == {"b"}
    # State of a parameter that has no gradient this time is kept.
    kept, state_2 = server_step(got, {"scale": torch.tensor(1.0)}, state, factory)
    assert torch.equal(kept["b"], got["b"])
    assert all(torch.equal(state_2[k], v) for k, v in state.items())
    assert {key.split("/")[0] for key in state_2} == {"b", "scale"}
    same, state_3 = server_step(got, {}, state_2, factory)
    assert all(same[k] is v for k, v in got.items())
    assert list(state_3) == list(state_2)
    assert all(torch.equal(state_3[k], v) for k, v in state_2.items())


@pytest.mark.parametrize("name", ["sgd momentum", "amsgrad", "adagrad"])
def test_the_arguments_are_left_alone(name):
    factory, first, second = FACTORIES[name], *gradients()[:2]
    params, state = server_step(start(), first, {}, factory)
    before = [{k: v.clone() for k, v in t.items()} for t in (params, second, state)]
    once = server_step(params, second, state, factory)
    for old, new in zip(before, (params, second, state), strict=True):
        assert all(torch.equal(old[k], new[k]) for k in old)
    again = server_step(params, second, state, factory)
    for left, right in zip(once, again, strict=True):
        assert all(torch.equal(left[k], right[k]) for k in left)


def test_a_gradient_of_another_precision_takes_the_parameters():
    gradient = {k: v.double() for k, v in gradients()[0].items()}
    got, _ = server_step(start(), gradient, {}, make_optimizer("sgd", 1.0))
    assert torch.equal(got["b"], start()["b"] - gradients()[0]["b"])


@pytest.mark.parametrize(
    ("optimizer", "lr", "message"),
    [
        ("LBFGS", 1.0, "unknown optimizer 'lbfgs'; known: adadelta"),
        (torch.optim.LBFGS, None, "closure"),
        (torch.optim.SparseAdam, None, "dense gradients"),
        ("sgd", float("nan"), "lr must be >= 0"),
        (partial(torch.optim.SGD, lr=-1.0), None, "Invalid learning rate"),
        (lambda parameters: None, None, "'NoneType' .* a factory such as"),
    ],
)
def test_what_cannot_be_a_servers_optimiser(optimizer, lr, message):
    with pytest.raises(ConfigurationError, match=message):
        make_optimizer(optimizer, lr)


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        ({"c": torch.ones(1)}, r"lack the keys \['c'\]"),
        ({"b": torch.tensor([0.0, float("nan"), 0.0])}, "'b' holds NaN or infinity"),
    ],
)
def test_an_unusable_gradient_is_named(gradient, message):
    with pytest.raises(ParamsError, match=message):
        server_step(start(), gradient, {}, make_optimizer("sgd", 1.0))
