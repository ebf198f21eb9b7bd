"""Payloads that declare their parts: what is read, refused, limited and scaled."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from flwr_fisher.errors import WireError
from flwr_fisher.wire.arrays import FORMAT_VERSION, tensors_to_arrays
from flwr_fisher.wire.schema import Payload, description, part
from flwr_fisher.wire.tct_upload import WeightUpload

WIDE = torch.float64


@dataclass(frozen=True)
class Example(Payload):
    """A vector, its second moments, a number of examples and a description."""

    about: dict = description("x/format")
    mean: Tensor = part("x/mean", WIDE, ("p",), limit="step")
    moment: Tensor = part("x/m", WIDE, ("p", "p"), limit="curvature")
    spread: Tensor = part("x/spread", WIDE, ("p", 2), low=0)
    count: Tensor = part("x/count", torch.int64, above=0, counts=True)

    @classmethod
    def lengths(cls, like):
        return {"p": 4}


def example():
    about = {"version": FORMAT_VERSION, "head": "fc"}
    spread = torch.zeros(3, 2, dtype=WIDE)
    matrix = 2 * torch.eye(3, dtype=WIDE)
    return Example(
        about, 2 * torch.ones(3, dtype=WIDE), matrix, spread, torch.tensor(5)
    )


def tensors(**changed):
    sent = example()
    named = {p.key: getattr(sent, n) for n, p in Example.declared().items()}
    named["x/format"] = torch.tensor(list(b'{"version":2}'), dtype=torch.uint8)
    named |= {f"x/{k}": v for k, v in changed.items()}
    return {k: v for k, v in named.items() if v is not None}


def test_what_is_sent_is_read():
    read = Example.read(example().to_arrays(), {})
    assert read.about == example().about
    assert read.layout() == example().layout()
    assert all(torch.equal(v, getattr(example(), n)) for n, _, v in read._tensors())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"mean": None}, "'x/mean': missing"),
        ({"more": torch.ones(1)}, "'x/more': unexpected"),
        ({"mean": torch.ones(3)}, "'x/mean': dtype"),
        ({"mean": torch.ones(3, 1, dtype=WIDE)}, "'x/mean': shape"),
        ({"mean": torch.ones(5, dtype=WIDE)}, "'x/mean': length 5, expected 1 to 4"),
        ({"mean": torch.ones(0, dtype=WIDE)}, "'x/mean': length 0"),
        (
            {"mean": torch.ones(2, dtype=WIDE)},
            r"'x/m': shape \(3, 3\), expected \(2, 2\)",
        ),
        ({"mean": torch.full((3,), torch.nan, dtype=WIDE)}, "'x/mean': holds NaN"),
        ({"m": torch.ones(3, 4, dtype=WIDE)}, r"'x/m': shape \(3, 4\)"),
        ({"spread": -torch.ones(3, 2, dtype=WIDE)}, "'x/spread': must not be neg"),
        ({"spread": torch.ones(3, 3, dtype=WIDE)}, "'x/spread': shape"),
        ({"count": torch.tensor(0)}, "'x/count': must be above 0"),
        ({"format": torch.ones(2000, dtype=torch.uint8)}, "'x/format'"),
        ({"format": torch.tensor(list(b"{}"), dtype=torch.uint8)}, "'x/format'"),
    ],
)
def test_anything_else_is_refused_by_name(changed, says):
    with pytest.raises(WireError, match=says):
        Example.read(tensors_to_arrays(tensors(**changed)), {})


def test_a_longer_length_may_be_allowed_for_one_reading():
    with pytest.raises(WireError, match="expected 1 to 2"):
        Example.read(example().to_arrays(), {}, p=2)
    assert len(Example.read(example().to_arrays(), {}, p=3).mean) == 3


def test_a_part_that_is_too_long_is_refused_before_any_is_read(monkeypatch):
    huge = tensors_to_arrays(tensors(mean=torch.ones(100_000, dtype=WIDE)))
    monkeypatch.setattr("flwr_fisher.wire.arrays._read", pytest.fail)
    with pytest.raises(WireError, match=r"'x/mean': length 100000, expected 1 to 4"):
        Example.read(huge, {})


def test_a_policy_limits_the_parts_that_say_so():
    sent = example()
    assert sent.step_norms({}) == {"x/mean": pytest.approx(12**0.5)}
    assert sent.curvature_norms() == {"x/m": pytest.approx(12**0.5)}
    half = sent.scaled({"x/mean": 0.5, "x/m": 0.25, "x/count": 0.1}, {})
    assert half.mean.tolist() == [1, 1, 1]
    assert half.moment.diagonal().tolist() == [0.5] * 3
    assert half.count == sent.count
    sent.check_weight(5)
    with pytest.raises(WireError, match="'x/count': 5 examples, but the metrics say 4"):
        sent.check_weight(4)


@dataclass(frozen=True)
class Trained(Payload):
    """A model's weight, and a sum over the examples."""

    weight: Tensor = part("fc.weight", limit="model")
    total: Tensor = part("total", WIDE, ("p",), limit="step", summed=True)
    count: Tensor = part("count", WIDE, above=0, counts=True, summed=True)


def test_a_models_part_has_its_layout_and_is_measured_from_it():
    like = {"fc.weight": torch.zeros(2, 3)}
    total, count = torch.full((4,), 6.0, dtype=WIDE), torch.tensor(3.0, dtype=WIDE)
    sent = Trained(torch.ones(2, 3), total, count)
    read = Trained.read(sent.to_arrays(), like, p=4)
    assert read.step_norms(like) == {
        "total": pytest.approx(4.0),  # per example
        "fc.weight": pytest.approx(6**0.5),
    }
    half = read.scaled({"fc.weight": 0.5}, like)
    assert torch.equal(half.weight, torch.full((2, 3), 0.5))
    assert torch.equal(half.total, total)
    double = read.reweighted(2.0)
    assert torch.equal(double.total, 2 * total)
    assert double.count == 6
    assert torch.equal(double.weight, sent.weight)
    for wrong in (torch.ones(3, 2), torch.ones(2, 3, dtype=WIDE)):
        with pytest.raises(WireError, match=r"'fc.weight': (shape|dtype)"):
            Trained.read(Trained(wrong, total, count).to_arrays(), like, p=4)


def test_a_part_of_another_model_than_the_network_has_limits_of_its_own():
    """Else the steps of TCT's network would limit those of its regression."""
    start = {"tct/weight": torch.zeros(2, 3)}
    upload = WeightUpload({}, torch.ones(2, 3))
    assert upload.step_norms(start) == {"tct/weight": pytest.approx(6**0.5)}
    half = upload.scaled({"tct/weight": 0.5}, start)
    assert torch.equal(half.weight, upload.weight / 2)
