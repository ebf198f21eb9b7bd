import math

import pytest
import torch
from oracles import randn
from torch import nn

from flwr_fisher.client import FisherClient
from flwr_fisher.errors import ParamsError
from flwr_fisher.params import (
    NORM_STATISTICS,
    add,
    check_finite,
    check_same_layout,
    dot,
    flatten,
    load_state,
    norm,
    scale,
    select,
    shared_state,
    subtract,
    unflatten,
    weighted_mean,
)


def pair():
    left = {"w": randn(0, 2, 3), "b": randn(1, 2), "s": randn(2)}
    return left, {"b": randn(3, 2), "w": randn(4, 2, 3), "s": randn(5)}


def test_add_subtract_and_scale_work_by_key_and_keep_the_left_order():
    left, right = pair()
    for got, want in (
        (add(left, right), {k: left[k] + right[k] for k in left}),
        (add(left, right, -0.5), {k: left[k] - 0.5 * right[k] for k in left}),
        (subtract(left, right), {k: left[k] - right[k] for k in left}),
        (scale(left, 3), {k: 3 * left[k] for k in left}),
    ):
        assert list(got) == ["w", "b", "s"]
        for key, value in want.items():
            torch.testing.assert_close(got[key], value)


def test_dot_and_norm_are_those_of_the_flat_vectors():
    left, right = pair()
    ordered = {k: right[k] for k in left}
    torch.testing.assert_close(dot(left, right), flatten(left) @ flatten(ordered))
    torch.testing.assert_close(norm(left), flatten(left).norm())
    assert dot(left, right).shape == ()
    assert dot({}, {}) == 0
    assert norm({}) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_norm_is_finite_where_its_square_is_not(dtype):
    large = {"w": torch.full((90_000,), 2.0, dtype=dtype) * 2.0**6}
    assert float(norm(large)) == pytest.approx(128 * 300, rel=1e-2)
    assert norm(large).dtype == dtype


@pytest.mark.parametrize("function", [add, dot, check_same_layout])
def test_differing_layouts_are_named(function):
    left, right = pair()
    function(left, right)
    for wrong, culprit in (
        ({"w": right["w"]}, r"lacks the keys \['b', 's'\]$"),
        ({f"m.{k}": v for k, v in right.items()}, r"lacks .* and has .*'m.b', 'm.s'"),
        (right | {"extra": randn(0, 1)}, r"unexpected keys \['extra'\]"),
        (right | {"w": randn(0, 3, 2)}, r"'w' has shape \(3, 2\), expected \(2, 3\)"),
    ):
        with pytest.raises(ParamsError, match=culprit):
            function(left, wrong)
    with pytest.raises(ParamsError, match=r"^the upload: 's'"):
        check_same_layout(left, right | {"s": randn(0, 1)}, "the upload")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named(value):
    params = {"n": torch.tensor([3]), "w": torch.ones(2), "b": torch.tensor([value])}
    with pytest.raises(ParamsError, match="client 2: 'b' holds NaN or infinity"):
        check_finite(params, "client 2")
    check_finite({"n": params["n"], "w": params["w"]}, "client 2")


def test_select_returns_the_same_tensors_in_the_names_order():
    left, _ = pair()
    got = select(left, iter(["s", "w"]))
    assert list(got) == ["s", "w"]
    assert got["w"] is left["w"]
    with pytest.raises(ParamsError, match=r"lack the keys \['a', 'z'\]"):
        select(left, ["a", "w", "z"])


@pytest.mark.parametrize("shape", [(8,), (10,), (9, 1), (1, 9)])
def test_unflatten_names_sizes_that_do_not_fit(shape):
    shapes = {k: v.shape for k, v in pair()[0].items()}
    sizes = rf"shape \({', '.join(map(str, shape))},?\) into 9"
    with pytest.raises(ParamsError, match=sizes):
        unflatten(torch.zeros(shape), shapes)


# --- weighted_mean --------------------------------------------------------------------


def test_the_weighted_mean_is_the_weighted_sum():
    clients = [{"w": randn(i, 4, 5, dtype=torch.float64)} for i in range(3)]
    got = weighted_mean(clients, [1, 2, 5])["w"]
    want = (clients[0]["w"] + 2 * clients[1]["w"] + 5 * clients[2]["w"]) / 8
    torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)
    assert got.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weights", [[3, 7, 1], [0.1, 0.2, 0.7], [1e-9, 1, 1e9]])
def test_equal_inputs_come_back_bit_for_bit(dtype, weights):
    value = randn(0, 1000).mul(1e3).to(dtype)
    got = weighted_mean([{"w": value}] * 3, weights)["w"]
    assert got.dtype == dtype
    assert torch.equal(got, value)


def test_integers_are_rounded_to_the_nearest():
    clients = [{"n": torch.tensor([0, 10, 100])}, {"n": torch.tensor([3, 11, 100])}]
    got = weighted_mean(clients, [1, 3])["n"]
    assert got.dtype == torch.int64
    assert got.tolist() == [2, 11, 100]


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [1, math.nan], [1, math.inf]])
def test_unusable_weights_are_named(weights):
    with pytest.raises(ParamsError, match="weights must be >= 0") as caught:
        weighted_mean([*pair()], weights)
    assert str(weights) in str(caught.value)


def test_a_mean_needs_clients_one_weight_each_and_one_layout():
    left, right = pair()
    with pytest.raises(ParamsError, match="0 sets of params and 0 weights"):
        weighted_mean([], [])
    with pytest.raises(ParamsError, match="2 sets of params and 1 weights"):
        weighted_mean([left, right], [1])
    with pytest.raises(ParamsError, match=r"^client 2: 'b' has shape \(1, 2\)"):
        weighted_mean([left, right, left | {"b": randn(0, 1, 2)}], [1, 1, 1])


# --- what a model shares --------------------------------------------------------------


class Partly(nn.Module):
    """A frozen body, a buffer that is saved, one that is not, and a trained head."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.head = nn.Linear(4, 2)
        self.head.bias.requires_grad_(False)


def test_shared_state_is_what_is_trained_and_the_saved_buffers():
    model = Partly()
    assert list(shared_state(model)) == [
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "head.weight",
    ]


def test_shared_state_of_a_fully_trained_model_is_its_state_dict():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    shared, state = shared_state(model), model.state_dict()
    assert list(shared) == list(state)
    assert all(torch.equal(shared[k], state[k]) for k in state)
    assert not any(tensor.requires_grad for tensor in shared.values())


def test_a_tied_weight_is_shared_under_one_name_and_frozen_under_none():
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    assert list(shared_state(model)) == ["0.weight"]
    model[0].weight.requires_grad_(False)
    assert shared_state(model) == {}


def permuted(module, state, prefix, _):
    state[f"{prefix}weight"] = state[f"{prefix}weight"].flip(0)


def transposed(module, state, prefix, _):
    state[f"{prefix}weight"] = state[f"{prefix}weight"].T


def halved(module, state, prefix, _):
    state[f"{prefix}weight"] = state[f"{prefix}weight"].half()


def renamed(module, state, prefix, _):
    state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")


@pytest.mark.parametrize("hook", [permuted, transposed, halved, renamed])
def test_a_model_that_is_saved_as_another_is_refused_before_it_trains(hook):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1]._register_state_dict_hook(hook)
    for use in (
        shared_state,
        lambda model: FisherClient(model, [(randn(0, 2, 3), torch.arange(2))]),
    ):
        with pytest.raises(ParamsError, match=r"another tensor .* '1\.weight'"):
            use(model)


class Quantised(nn.Linear):
    """Its frozen weight is saved with how it is quantised, and loaded with it."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scale"] = torch.ones(3)

    def _load_from_state_dict(self, state, prefix, *args):
        raise RuntimeError("no version")


def test_what_is_neither_parameter_nor_buffer_stays_where_it_is():
    model = nn.Sequential(Quantised(3, 3).requires_grad_(False), nn.BatchNorm1d(3))
    names = ["weight", "bias", *NORM_STATISTICS]
    assert list(shared_state(model)) == [f"1.{name}" for name in names]
    load_state(model, {"1.weight": torch.full((3,), 2.0)})
    assert model[1].weight.tolist() == [2.0] * 3
    assert model[1].weight.requires_grad
    with pytest.raises(ParamsError, match=r"'1.weight' has shape \(1,\), expected"):
        load_state(model, {"1.weight": torch.ones(1)})
    with pytest.raises(ParamsError, match=r"unexpected keys .*'2\.weight'"):
        load_state(model, {"2.weight": torch.ones(1)})
