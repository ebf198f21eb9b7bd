"""The accuracy of parameters at hand: of one set, and of an ensemble of several."""

import math

import pytest
import torch
from oracles import randn, rng, seeded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_fisher.errors import DataError, ParamsError
from flwr_fisher.report import accuracies, ensemble_accuracy

X, Y = randn(1, 30, 3), torch.randint(4, (30,), generator=rng(2))


def net():
    """A model that trains but for its batch norm, which is frozen in either mode."""
    return nn.Sequential(
        nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 4)
    )


def members(count=3):
    return [dict(seeded(net, 10 + i).state_dict()) for i in range(count)]


def by_hand(weights):
    model, total = net().eval(), torch.zeros(30, 4)
    for params, weight in zip(members(len(weights)), weights, strict=True):
        model.load_state_dict(params)
        total += weight * model(X).softmax(1).detach()
    return float((total.argmax(1) == Y).double().mean())


@pytest.mark.parametrize("shuffle", [False, True])
def test_members_vote_on_the_same_examples(shuffle):
    loader = DataLoader(TensorDataset(X, Y), 7, shuffle=shuffle, generator=rng(3))
    for weights in ([0.2, 0.5, 0.3], [9.0, 1.0, 0.5]):
        got = ensemble_accuracy(seeded(net), members(), weights, loader)
        assert got == pytest.approx(by_hand(weights))
    assert by_hand([0.2, 0.5, 0.3]) != by_hand([9.0, 1.0, 0.5])


def test_a_loader_is_read_once():
    got = ensemble_accuracy(net(), members(), [1, 1, 1], iter([(X, Y)]))
    assert got == pytest.approx(by_hand([1, 1, 1]))


def test_missing_keys_stay_the_models():
    model = seeded(net)
    part = {k: v for k, v in members()[0].items() if k.startswith("3.")}
    whole = {**model.state_dict(), **part}
    # The member before it must leave nothing behind.
    pair = [members()[1], part], [1e-6, 1.0]
    want = accuracies(model, {"whole": whole}, [(X, Y)])["whole"]
    assert accuracies(model, {"part": part}, [(X, Y)])["part"] == want
    assert ensemble_accuracy(model, *pair, [(X, Y)]) == want


def test_a_tied_parameter_needs_one_of_its_names():
    def tied():
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        model[1].weight = model[0].weight
        return model

    other = {"0.weight": seeded(tied, 5)[0].weight.detach()}
    labels = seeded(tied, 5)(X).argmax(1)
    assert accuracies(seeded(tied), {"x": other}, [(X, labels)]) == {"x": 1.0}


class Told(nn.Flatten):
    """Has a state that is no tensor, and no parameter."""

    def get_extra_state(self):
        return "told"

    def set_extra_state(self, state):
        assert state == "told"


def test_a_model_may_have_any_state():
    assert accuracies(Told(), {"own": {}}, [(X, X.argmax(1))]) == {"own": 1.0}


def test_one_logit_has_no_accuracy():
    got = accuracies(nn.Linear(3, 1), {"own": {}}, [(X, Y % 2)])
    assert math.isnan(got["own"])


def test_what_does_not_fit_is_named():
    model, good = seeded(net), members()[0]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for wrong, text in (
        ({"3.wieght": good["3.weight"]}, r"'3.wieght' of shape \(4, 5\).*no such key"),
        (
            {"3.bias": torch.ones(5)},
            r"'3.bias' of shape \(5,\), but the model has \(4,\)",
        ),
    ):
        with pytest.raises(ParamsError, match=text):
            accuracies(model, {"good": good, "wrong": wrong}, [(X, Y)])
        with pytest.raises(ParamsError, match=text):
            ensemble_accuracy(model, [good, wrong], [1, 1], [(X, Y)])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_there_must_be_examples_and_members():
    with pytest.raises(DataError, match="no examples"):
        ensemble_accuracy(net(), members(), [1, 1, 1], [])
    with pytest.raises(ParamsError, match="needs at least one member"):
        ensemble_accuracy(net(), [], [], [(X, Y)])
