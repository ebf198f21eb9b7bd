"""The adapters of examples/: what is trained, and that a run tells every model."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import lora_adapters as example

from flwr_fisher.params import shared_state


def test_adapters_begin_as_the_model_and_are_all_that_is_trained():
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


def test_the_merge_beats_the_mean_and_each_clients(monkeypatch):
    """Of half of the example's texts: it is the same, in half the time."""
    monkeypatch.setattr(example, "MOST", 30_000)
    losses = example.run(seed=0, epochs=2, kinds=example.texts())
    assert list(losses) == [
        "no adapters",
        "adapters for reference",
        "adapters for capitals",
        "their mean (FedAvg)",
        "merged by FedFisher",
    ]
    both = {name: sum(each) for name, each in losses.items()}
    assert max(both, key=both.__getitem__) == "no adapters"
    assert min(both, key=both.__getitem__) == "merged by FedFisher"
