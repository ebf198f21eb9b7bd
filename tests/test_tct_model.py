"""`TCTModel`: what it predicts, and how it travels and is kept."""

import copy

import pytest
import torch
from nets import IMAGES, VECTORS, freeze, with_statistics
from oracles import randn, seeded
from safetensors.torch import save_file
from torch import nn

from flwr_fisher.errors import CheckpointError, ParamsError, UnknownNameError
from flwr_fisher.params import shared_state
from flwr_fisher.tangent import TangentFeatures, TCTModel
from flwr_fisher.tangent import model as tct_model

P, C = 20, 3


def net():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, C))


def normed():
    norm = with_statistics(nn.BatchNorm2d(4))
    head = nn.Flatten(), nn.Linear(16, C)
    return nn.Sequential(nn.Conv2d(2, 4, 2), norm, nn.Tanh(), *head)


def parts(seed=0, features=P):
    """Return weights, means and standard deviations."""
    std = randn(seed + 2, features).exp()
    return randn(seed, features, C), randn(seed + 1, features), std


def tct(model=None, seed=7):
    return TCTModel(model or seeded(net), *parts(), seed=seed)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "tct.safetensors"
    tct().save(path)
    return path


# --- predictions ----------------------------------------------------------------------


def test_predictions_are_features_times_weights():
    weight, mean, std = parts()
    z = (TangentFeatures(seeded(net), P, seed=7)(VECTORS) - mean) / std
    got = tct()(VECTORS)
    assert got.shape == (5, C)
    assert torch.allclose(got, z @ weight, rtol=1e-5)
    by_hand = [sum(float(z[0, j] * weight[j, c]) for j in range(P)) for c in range(C)]
    assert torch.allclose(got[0], torch.tensor(by_hand), rtol=1e-4, atol=1e-5)


def test_another_layer_as_head():
    body = nn.Linear(3, 5), nn.Linear(3, 3)  # defined in the order of their last use

    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.classifier, self.body = copy.deepcopy(body)

        def forward(self, x):
            return self.classifier(self.body(x).tanh())

    weight = randn(4, 16, 5)
    _, mean, std = parts(features=16)
    model = TCTModel(Backwards(), weight, mean, std, seed=7, head="classifier")
    assert (model.head, model.num_features, model.num_classes) == ("classifier", 16, 5)
    back = TCTModel.from_tensors(Backwards(), model.to_tensors())
    assert torch.equal(back(VECTORS), model(VECTORS))


def test_parts_of_a_batch_change_nothing(monkeypatch):
    want = tct()(VECTORS)
    monkeypatch.setattr(tct_model, "_AT_ONCE", 2 * P)
    assert torch.allclose(tct()(VECTORS), want, rtol=1e-5)
    assert tct()(VECTORS[:0]).shape == (0, C)


def test_any_mode_predicts_the_same():
    model = TCTModel(seeded(normed), *parts(), seed=7)
    want = model(IMAGES)
    assert not want.requires_grad
    assert torch.equal(model.train()(IMAGES), want)
    assert torch.equal(model.eval()(IMAGES), want)
    with torch.no_grad():
        assert torch.equal(model(IMAGES), want)
    with torch.inference_mode():
        x = IMAGES.clone()
        assert torch.equal(model(x), want)
        fresh = TCTModel(seeded(normed), *parts(), seed=7)
        assert torch.equal(fresh(x), want)
    assert torch.equal(fresh(IMAGES), want)


def test_it_moves_as_a_module():
    model = tct()
    want = model(VECTORS)
    double = copy.deepcopy(model).double()
    assert double(VECTORS.double()).dtype == torch.float64
    assert torch.allclose(double(VECTORS.double()).float(), want, rtol=1e-4)
    assert torch.equal(model(VECTORS), want)
    assert torch.equal(model.to("cpu")(VECTORS), want)
    assert torch.equal(copy.deepcopy(model)(VECTORS), want)


def test_loading_a_state_takes_effect():
    model, other = tct(), TCTModel(seeded(net, 1), *parts(3), seed=7)
    model(VECTORS)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(VECTORS), other(VECTORS))
    twin = copy.deepcopy(model)
    twin.load_state_dict(tct().state_dict())
    assert torch.equal(twin(VECTORS), tct()(VECTORS))
    assert torch.equal(model(VECTORS), other(VECTORS))


# --- tensors and files ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "x"),
    [(net, VECTORS), (normed, IMAGES), (lambda: nn.Linear(3, C), VECTORS)],
)
def test_a_round_trip_is_exact(make, x, tmp_path):
    base = seeded(make)
    features = TangentFeatures(base, P).num_features
    model = TCTModel(base, *parts(features=features), seed=-3)
    model.save(tmp_path / "m.safetensors")
    back = TCTModel.load(tmp_path / "m.safetensors", seeded(make, 5))
    assert (back.head, back.seed) == (model.head, -3)
    found = back.to_tensors()
    for key, value in model.to_tensors().items():
        assert torch.equal(found[key], value)
        assert found[key].dtype == value.dtype
    assert torch.equal(back(x), model(x))
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_buffers_travel_and_frozen_parameters_stay():
    base = freeze(seeded(normed), "0.weight")
    model = TCTModel(base, *parts(), seed=7)
    tensors = model.to_tensors()
    assert "1.running_mean" in tensors
    assert "0.weight" not in tensors
    other = freeze(seeded(normed, 1), "0.weight")
    with torch.no_grad():
        other[0].weight.copy_(base[0].weight)
    other[1].running_mean.zero_()
    assert torch.equal(TCTModel.from_tensors(other, tensors)(IMAGES), model(IMAGES))
    assert not other[1].running_mean.any()


# --- mistakes -------------------------------------------------------------------------


def test_shapes_that_do_not_fit():
    weight, mean, std = parts()
    with pytest.raises(ParamsError, match=r"mean has shape \(19,\), expected \(20,\)"):
        TCTModel(net(), weight, mean[1:], std, seed=0)
    with pytest.raises(ParamsError, match=r"weight has shape \(20,\), expected \(20, "):
        TCTModel(net(), weight[:, 0], mean, std, seed=0)
    with pytest.raises(ParamsError, match=r"\(20, 2\).* 20 features and 3 classes"):
        TCTModel(net(), weight[:, 1:], mean, std, seed=0)
    with pytest.raises(ParamsError, match=r"\(90, 3\).* 26 features"):
        TCTModel(net(), *parts(features=90), seed=0)
    with pytest.raises(UnknownNameError, match="linear layer for head 'fc'"):
        TCTModel(net(), weight, mean, std, seed=0, head="fc")


def test_tensors_that_do_not_fit():
    tensors = tct().to_tensors()
    missing = {k: v for k, v in tensors.items() if k != "tct/mean"}
    with pytest.raises(ParamsError, match="'tct/mean'"):
        TCTModel.from_tensors(net(), missing)
    with pytest.raises(ParamsError, match="'tct/x'"):
        TCTModel.from_tensors(net(), tensors | {"tct/x": torch.ones(1)})
    with pytest.raises(ParamsError, match=r"unexpected keys \['9'\]"):
        TCTModel.from_tensors(net(), tensors | {"9": torch.ones(1)})
    with pytest.raises(ParamsError, match=r"lacks the keys \['0.bias'\]"):
        TCTModel.from_tensors(
            net(), {k: v for k, v in tensors.items() if k != "0.bias"}
        )


def test_files_that_cannot_be_read(saved):
    whole = saved.read_bytes()
    for content in (whole[:-10], b"garbage" * 20, b"", whole[:6]):
        saved.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"tct\.safetensors has no TCT"):
            TCTModel.load(saved, net())
    with pytest.raises(CheckpointError, match=r"no\.safetensors .* No such file"):
        TCTModel.load(saved.with_name("no.safetensors"), net())


def test_files_of_something_else(saved):
    wider = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, C))
    with pytest.raises(CheckpointError, match=r"tct\.safetensors has no .*'0\.weight'"):
        TCTModel.load(saved, wider)
    save_file(shared_state(net()), saved)
    with pytest.raises(CheckpointError, match=r"tct\.safetensors has no .*tct/weight"):
        TCTModel.load(saved, net())


def test_a_disk_that_refuses(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot write .*nowhere"):
        tct().save(tmp_path / "nowhere" / "m.safetensors")
