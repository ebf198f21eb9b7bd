"""How far long work is: lines at most every so often, none where it is quick."""

import pytest
import torch
from flwr.app import ArrayRecord
from torch.utils.data import DataLoader
from virtual import Clock, tiny_app, tiny_data, tiny_model

from flwr_fisher import log_lines as progress
from flwr_fisher.client import LocalSGD
from flwr_fisher.log_lines import EVERY, advance, watching
from flwr_fisher.strategies import FedFisherOneShot
from flwr_fisher.testing import LocalGrid

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    stopped = Clock()
    monkeypatch.setattr(progress, "time", stopped)
    return stopped


@pytest.fixture
def lines(caplog):
    caplog.set_level("INFO", logger="flwr")
    return lambda: [record.getMessage() for record in caplog.records]


def slow(clock, loader, seconds):
    """Each batch takes so long."""

    class Slow(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                clock.now += seconds
                yield batch

    return Slow(loader.dataset, batch_size=4)


def loader():
    return DataLoader(tiny_data(0, n=16), batch_size=4)


def test_a_line_comes_at_most_every_so_often(clock, lines):
    with watching("curvature", total=2000) as work:
        for _ in range(20):
            clock.now += EVERY / 3
            work.advance(100)
    assert lines()[:2] == [
        f"curvature, 15 % of 2 000 examples, {EVERY:.0f} s so far",
        f"curvature, 30 % of 2 000 examples, {2 * EVERY:.0f} s so far",
    ]
    assert len(lines()) == 6


def test_work_within_work_is_named_after_both(clock, lines):
    with watching("partition-3"), watching("packing", unit="steps"):
        clock.now += EVERY
        advance(1200)
    assert lines() == [f"partition-3: packing, 1 200 steps, {EVERY:.0f} s so far"]
    clock.now += EVERY
    advance(5)  # nobody watches any more
    assert len(lines()) == 1


def test_training_tells_epoch_and_loss(clock, lines):
    train = LocalSGD(epochs=30)
    with watching("partition-3"):
        train(tiny_model(), slow(clock, loader(), 3.0), CPU, {})
    assert lines()[0].startswith("partition-3: training, epoch 2 of 30, loss ")
    assert len(lines()) == 30 * 4 * 3 // EVERY


def test_a_clients_lines_say_whose_they_are(monkeypatch, clock, lines):
    monkeypatch.setattr(progress, "EVERY", 0.0)  # every step is due
    FedFisherOneShot(fraction_evaluate=1.0).start(
        LocalGrid(tiny_app(), 2), ArrayRecord(tiny_model().state_dict())
    )
    text = "\n".join(lines())
    assert not any(line.startswith("partition-1, ") for line in lines())
    for work in (
        "training, epoch 1 of 1",
        "curvature, ",
        "scoring, ",
        "norm statistics, ",
    ):
        assert f"partition-1: {work}" in text
