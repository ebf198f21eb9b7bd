from collections import Counter
from functools import partial

import pytest
import rivals_path  # noqa: F401
import torch
from tasks import MODELS, make_model
from torch import nn

from flwr_fisher.errors import ConfigurationError, UnknownNameError

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]
FOR_IMAGES = [name for name in MODELS if name != "transformer"]


def num_parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]])
@pytest.mark.parametrize("name", FOR_IMAGES)
def test_every_model_fits_every_shape(name, shape):
    model = make_model(name, shape=shape, num_classes=7)
    calls = Counter[str]()
    kinds = (nn.Conv2d, nn.Linear)
    layers = {key: m for key, m in model.named_modules() if isinstance(m, kinds)}
    for key, layer in layers.items():
        layer.register_forward_hook(lambda *_, key=key: calls.update([key]))
    out = model(torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)))
    assert out.shape == (2, 7)
    assert calls == dict.fromkeys(layers, 1)
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [
        ("logistic", (1, 28, 28), 784 * 10 + 10),
        ("mlp", (1, 28, 28), 784 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10),
        ("lenet", (1, 28, 28), 150 + 2400 + 256 * 120 + 120 * 84 + 840),
        ("lenet", (1, 8, 8), 150 + 2400 + 64 * 120 + 120 * 84 + 840),
        ("lenet-bias", (3, 32, 32), 62006),
        ("cnn", (3, 32, 32), 2400 + 51200 + 1600 * 512 + 512 * 128 + 1280),
        ("cnn-bias", (3, 32, 32), 2400 + 51200 + 1600 * 512 + 512 * 128 + 1280 + 746),
        ("resnet18", (3, 32, 32), 11173962),
    ],
)
def test_sizes_are_the_papers(name, shape, count):
    assert num_parameters(make_model(name, shape=shape, num_classes=10)) == count


@pytest.mark.parametrize("name", ["lenet", "cnn"])
def test_models_without_biases_have_none(name):
    keys = list(make_model(name, shape=(1, 28, 28), num_classes=10).state_dict())
    assert keys == [f"{n}.weight" for n in ("conv1", "conv2", "fc1", "fc2", "fc3")]


def test_lenet_computes_what_its_weights_say():
    from torch.nn.functional import conv2d, max_pool2d

    model = make_model("lenet", shape=(1, 28, 28), num_classes=10)
    x = torch.randn(3, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    w = model.state_dict()
    h = max_pool2d(conv2d(x, w["conv1.weight"]).relu(), 2)
    h = max_pool2d(conv2d(h, w["conv2.weight"]).relu(), 2).flatten(1)
    h = (h @ w["fc1.weight"].T).relu()
    h = (h @ w["fc2.weight"].T).relu() @ w["fc3.weight"].T
    torch.testing.assert_close(model(x), h)


def test_resnets_keep_small_images_large_and_differ_in_norms():
    seen = {}
    for name, kind in (("resnet18", nn.BatchNorm2d), ("resnet18-gn", nn.GroupNorm)):
        model = make_model(name, shape=(3, 16, 16), num_classes=10)
        norms = [m for m in model.modules() if "Norm" in type(m).__name__]
        assert len(norms) == 20
        assert all(isinstance(m, kind) for m in norms)
        layer1 = model.get_submodule("layer1")
        layer1.register_forward_hook(lambda _, __, out: seen.update(shape=out.shape))
        model(torch.zeros(2, 3, 16, 16))
        assert seen["shape"] == (2, 64, 16, 16)
    assert not list(model.buffers())  # group norm keeps no statistics


@pytest.mark.parametrize("name", MODELS)
def test_only_the_seed_decides_and_the_global_generator_is_left_alone(name):
    shape = (1, 28, 28) if name in FOR_IMAGES else (28,)
    make = partial(make_model, name, shape=shape, num_classes=10)
    first = make(seed=4).state_dict()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        before = torch.get_rng_state()
        again, other = make(seed=4).state_dict(), make(seed=5).state_dict()
        assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(again[k], v) for k, v in first.items())
    assert not all(torch.equal(other[k], v) for k, v in first.items())


def test_unknown_name():
    with pytest.raises(UnknownNameError, match=r"unknown model 'lenet5'; known: .*mlp"):
        make_model("lenet5", shape=(1, 28, 28), num_classes=10)


@pytest.mark.parametrize("name", ["lenet", "lenet-bias", "cnn", "cnn-bias"])
def test_images_that_are_too_small(name):
    with pytest.raises(ConfigurationError, match=rf"\(1, 3, 8\).*'{name}'.* 4 pixels"):
        make_model(name, shape=(1, 3, 8), num_classes=10)
    make_model(name, shape=(1, 4, 4), num_classes=10)


def test_no_classes_or_no_pixels():
    with pytest.raises(ConfigurationError, match="0 classes"):
        make_model("mlp", shape=(1, 8, 8), num_classes=0)
    with pytest.raises(ConfigurationError, match=r"\(1, 0, 8\)"):
        make_model("mlp", shape=(1, 0, 8), num_classes=2)
