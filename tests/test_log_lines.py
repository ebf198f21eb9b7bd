"""Lines of the log: they end where the terminal does, and say each thing once."""

import logging
import re

import pytest
from flwr.serverapp import strategy as flowers
from torch.utils.data import DataLoader
from virtual import app_by_partition, tiny_arrays, tiny_client, tiny_data, tiny_model

from flwr_fisher.client import FisherClient
from flwr_fisher.errors import ClientError, RoundError
from flwr_fisher.log_lines import Failures
from flwr_fisher.strategies import FedAvg, FedFisherOneShot
from flwr_fisher.testing import LocalGrid


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    monkeypatch.setattr("flwr_fisher.client.messages._failures", Failures())


def messages(caplog, level=logging.INFO):
    return [r.getMessage() for r in caplog.records if r.levelno >= level]


def test_options_are_told_as_they_are_for_the_model(caplog):
    """With batch norms, `shrink` is 0.9 and not 0.3."""
    strategy = FedFisherOneShot(fraction_evaluate=0.0, refine=None)
    strategy.start(LocalGrid(app_by_partition(tiny_client), 2), tiny_arrays())
    assert "shrink=0.9" in caplog.text


# Who has nothing to evaluate on


def without_valloader(*partitions):
    def make(partition):
        batches = DataLoader(tiny_data(partition), batch_size=4)
        held_out = None if partition in partitions else batches
        return FisherClient(tiny_model(), batches, held_out, device="cpu")

    return app_by_partition(make)


def test_a_client_without_valloader_is_left_out_quietly(caplog):
    caplog.set_level("INFO", logger="flwr")
    result = FedAvg().start(
        LocalGrid(without_valloader(0, 3), 4), tiny_arrays(), num_rounds=3
    )
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2, 3]
    said = [m for m in messages(caplog) if "without data for" in m]
    assert said == [
        "configure_evaluate: without data for evaluation: partition-0, partition-3"
    ]
    assert "Traceback" not in caplog.text
    assert [m for m in messages(caplog, logging.WARNING) if "evaluate" in m] == []


def test_the_means_are_of_those_who_evaluate():
    def loss(app):
        result = FedAvg(min_evaluate_nodes=1).start(LocalGrid(app, 3), tiny_arrays())
        return result.evaluate_metrics_clientapp[1]["loss"]

    both, first = loss(without_valloader(2)), loss(without_valloader(1, 2))
    assert both != first
    assert loss(without_valloader(0, 2)) != first


def test_with_flowers_fedavg_it_is_an_error_that_explains_itself(caplog):
    flowers.FedAvg().start(
        LocalGrid(without_valloader(0), 2), tiny_arrays(), num_rounds=1
    )
    assert (
        "partition-0 failed: ClientError: this client has no valloader" in caplog.text
    )
    assert "Traceback" not in caplog.text


# Exceptions of clients


def failing(error, *, at="train"):
    def loop(model, loader, device, config):
        raise error

    def make(partition):
        if at == "build":
            raise error
        return tiny_client(partition, train_fn=loop)

    return app_by_partition(make)


def test_one_exception_of_many_clients_has_one_traceback(caplog):
    with pytest.raises(RoundError, match="ZeroDivisionError: by nothing"):
        FedAvg().start(
            LocalGrid(failing(ZeroDivisionError("by nothing")), 6), tiny_arrays()
        )
    assert caplog.text.count("Traceback (most recent call last)") == 1
    errors = messages(caplog, logging.ERROR)
    assert len(errors) == 6
    assert sum("failed with the same error" in line for line in errors) == 5
    assert re.search(r"left out partition-\d, partition-\d.*, too", caplog.text)


def test_another_exception_has_its_own_traceback(caplog):
    failures = Failures()
    for error in (ValueError("a"), KeyError("b"), ValueError("a")):
        try:
            raise error
        except (ValueError, KeyError) as caught:
            reason = failures.tell("partition-1", caught)
    assert reason == "ValueError: a"
    assert caplog.text.count("Traceback") == 2


def test_an_error_that_explains_itself_needs_no_traceback(caplog):
    with pytest.raises(RoundError, match="ClientError: no such job"):
        FedAvg().start(LocalGrid(failing(ClientError("no such job")), 3), tiny_arrays())
    assert "Traceback" not in caplog.text
    assert "failed: ClientError: no such job" in caplog.text
