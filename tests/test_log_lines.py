"""Lines of the log: they end where the terminal does, and say each thing once."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.app import ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flowers
from torch.utils.data import DataLoader
from virtual import tiny_arrays, tiny_client, tiny_data, tiny_model

import flwr_fisher
from flwr_fisher import log_lines
from flwr_fisher.client import FisherClient, make_client_app
from flwr_fisher.errors import ClientError, RoundError
from flwr_fisher.log_lines import Failures
from flwr_fisher.strategies import TCT, FedAvg, Waiting
from flwr_fisher.testing import LocalGrid

PREFIX = "INFO :      "  # as Flower's handler writes it


@pytest.fixture
def narrow(monkeypatch):
    """A terminal of 80 columns."""
    monkeypatch.setattr(log_lines, "width", lambda: 80 - len(PREFIX))


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    monkeypatch.setattr("flwr_fisher.client.messages._failures", Failures())


def messages(caplog, level=logging.INFO):
    return [r.getMessage() for r in caplog.records if r.levelno >= level]


def columns(message):
    first, *others = message.expandtabs(4).split("\n")
    return max(map(len, [PREFIX + first, *others]))


# Where they end


def test_the_width_is_the_terminals():
    code = "from flwr_fisher.log_lines import wrapped; print(wrapped('x ' * 40 + 'y'))"
    for columns, lines in (("200", 1), ("60", 2), ("0", 2)):  # 0: not known, so 80
        shown = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "COLUMNS": columns},
            capture_output=True,
            text=True,
            check=True,
        )
        assert len(shown.stdout.splitlines()) == lines


def test_long_lines_are_wrapped_and_nothing_is_cut(narrow):
    text = "\t└──> Aggregated MetricRecord: " + " ".join(
        f"'m{i}': {i}," for i in range(40)
    )
    wrapped = log_lines.wrapped(text)
    assert columns(wrapped) <= 80
    assert wrapped.split() == text.split()
    path = "/a/" + "folder-with-a-name/" * 9
    assert path in log_lines.wrapped(f"Results of all the rounds are in {path}")


def test_short_lines_stay_as_they_are(narrow):
    assert log_lines.wrapped("\t├──> a  b") == "\t├──> a  b"


def test_a_whole_runs_lines_fit(narrow, caplog):
    caplog.set_level("INFO", logger="flwr")

    def broken(context):
        partition = context.node_config["partition-id"]
        if partition > 2:
            raise ClientError("this client " + "cannot do it at all, " * 12)
        return tiny_client(int(partition))

    FedAvg(min_train_nodes=3).start(
        LocalGrid(make_client_app(broken), 6), tiny_arrays(), num_rounds=2
    )
    library = Path(flwr_fisher.__file__).parent
    own = [r for r in caplog.records if Path(r.pathname).is_relative_to(library)]
    assert any("\n" in r.getMessage() for r in own)
    long = [r.getMessage() for r in own if columns(r.getMessage()) > 80]
    assert long == []
    assert "cannot do it at all, cannot" in caplog.text.replace("\n", " ")


# Who has nothing to evaluate on


def without_valloader(*partitions):
    def client_fn(context):
        partition = int(context.node_config["partition-id"])
        batches = DataLoader(tiny_data(partition), batch_size=4)
        held_out = None if partition in partitions else batches
        return FisherClient(tiny_model(), batches, held_out, device="cpu")

    return make_client_app(client_fn)


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


def test_where_no_client_evaluates_the_run_has_no_metrics_of_it(caplog):
    result = FedAvg().start(
        LocalGrid(without_valloader(0, 1), 2), tiny_arrays(), num_rounds=2
    )
    assert result.evaluate_metrics_clientapp == {}
    assert [m for m in messages(caplog, logging.WARNING) if "evaluate" in m] == []


def test_the_means_are_of_those_who_evaluate():
    def loss(app):
        result = FedAvg(min_evaluate_nodes=1).start(LocalGrid(app, 3), tiny_arrays())
        return result.evaluate_metrics_clientapp[1]["loss"]

    both, first = loss(without_valloader(2)), loss(without_valloader(1, 2))
    assert both != first
    assert loss(without_valloader(0, 2)) != first


def test_enough_replies_are_of_those_who_evaluate():
    # In a second round the last client might still be busy with the first.
    result = FedAvg(waiting=Waiting(enough_fraction=0.5)).start(
        LocalGrid(without_valloader(0, 1, 2), 4), tiny_arrays(), num_rounds=1
    )
    assert "loss" in result.evaluate_metrics_clientapp[1]


def test_both_stages_of_tct_leave_it_out(caplog):
    strategy = TCT(stage1_rounds=1, num_features=8, local_steps=2)
    result = strategy.start(
        LocalGrid(without_valloader(0), 3), tiny_arrays(), num_rounds=3
    )
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2, 3]
    assert "left out" not in caplog.text


def test_evaluation_on_the_training_data_asks_all():
    result = FedAvg().start(
        LocalGrid(without_valloader(0, 1), 2),
        tiny_arrays(),
        evaluate_config=ConfigRecord({"fisher.evaluate-on": "train"}),
    )
    assert "loss" in result.evaluate_metrics_clientapp[1]


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

    def client_fn(context):
        if at == "build":
            raise error
        return tiny_client(int(context.node_config["partition-id"]), train_fn=loop)

    return make_client_app(client_fn)


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


def test_a_client_that_cannot_be_built_answers_all_the_same(caplog):
    with pytest.raises(RoundError, match="OSError: no data"):
        FedAvg().start(
            LocalGrid(failing(OSError("no data"), at="build"), 3), tiny_arrays()
        )
    assert caplog.text.count("Traceback") == 1


def test_local_grid_tells_a_foreign_apps_exception_once(caplog):
    app = ClientApp()

    @app.train()
    def train(message, context):
        raise ValueError("foreign")

    flowers.FedAvg(fraction_evaluate=0.0).start(
        LocalGrid(app, 4), ArrayRecord(), num_rounds=2
    )
    assert caplog.text.count("Traceback (most recent call last)") == 1
