"""The adapters of examples/: what is trained, and that a run tells every model."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import lora_adapters as example

from flwr_fisher.params import shared_state


def test_adapters_begin_as_the_model_and_are_all_that_is_trained() -> None:
    torch.manual_seed(0)
    base = example.transformer()
    model = example.adapted(shared_state(base), seed=1)
    tokens = torch.randint(90, (2, example.LENGTH))
    assert torch.equal(model(tokens), base(tokens))
    trained = shared_state(model)
    assert len(trained) == 8  # four layers in each of two blocks
    assert all(name.endswith("second.weight") for name in trained)
    other = example.adapted(shared_state(base), seed=1)
    assert torch.equal(model.blocks[0].up.first.weight, other.blocks[0].up.first.weight)


def test_a_run_tells_the_loss_of_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "MOST", 20_000)
    losses = example.run(seed=0, epochs=1, kinds=example.texts())
    assert list(losses) == [
        "no adapters",
        *(name for name in losses if name.startswith("adapters for")),
        "their mean (FedAvg)",
        "merged by FedFisher",
    ]
    assert len(losses) == 5
    start = sum(losses["no adapters"])
    for name, (reference, code) in losses.items():
        assert math.isfinite(reference + code)
        assert name == "no adapters" or reference + code < start, name
