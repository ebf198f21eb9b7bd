"""The report of several rounds: of this library's strategies, and of Flower's."""

import json
import logging

import pytest
import rivals_path  # noqa: F401
import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import FedAvg, Result
from measures import ClientServerBarrier, MeasuredGrid, Personalisation, combine
from safetensors.torch import load_file
from tasks import cohort_from_run_config, load_task

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.errors import ConfigurationError
from flwr_fisher.params import shared_state
from flwr_fisher.report import evaluate_on_test, report_rounds
from flwr_fisher.strategies import FedFish
from flwr_fisher.testing import LocalGrid

CLIENTS = 4
SECONDS = {"total": 1.5}
CONFIG = {"seed": 3, "alpha": 0.1}


def digits():
    return load_task(
        dataset="digits", model="logistic", partition="iid", num_partitions=CLIENTS
    )


def app_of(task):
    def client_fn(context):
        loader = task.train_loader(int(context.node_config["partition-id"]), 64)
        train = LocalSGD(lr=0.05)
        return FisherClient(task.make_model(), loader, train_fn=train, device="cpu")

    return make_client_app(client_fn)


def outcome(make, num_rounds=3, every=1):
    task = digits()
    measured = MeasuredGrid(LocalGrid(app_of(task), CLIENTS), held_out=1)
    return task, make(fraction_evaluate=0.0).start(
        measured,
        ArrayRecord(shared_state(task.make_model())),
        num_rounds=num_rounds,
        evaluate_fn=combine(
            evaluate_on_test(task, every=every),
            ClientServerBarrier(measured, every=every),
            Personalisation(measured, every=every),
        ),
    )


def report(path, task, result, **options):
    told = {"method": "FedFish", "seconds": SECONDS, "config": CONFIG, **options}
    returned = report_rounds(str(path), task=task, result=result, **told)
    metrics = json.loads((path / "metrics.json").read_text())
    assert metrics["accuracy"] == returned
    return metrics


def files(path):
    return {p.name for p in path.iterdir()}


def test_everything_is_written(tmp_path, caplog):
    task, result = outcome(FedFish)
    with caplog.at_level(logging.INFO, logger="flwr"):
        metrics = report(tmp_path, task, result)
    assert files(tmp_path) == {
        "metrics.json",
        "model.safetensors",
        "rounds.png",
        "labels.png",
    }
    last = result.evaluate_metrics_serverapp[3]
    assert metrics["accuracy"] == {
        "fedfish": last["accuracy"],
        "zero_shot": last["zero-shot-accuracy"],
        "personalised": last["personalised-accuracy"],
    }
    assert metrics["accuracy"]["fedfish"] > 0.7
    assert list(metrics["rounds"]) == ["0", "1", "2", "3"]
    assert (
        metrics["rounds"]["2"]["server"]["barrier-loss"]
        == (result.evaluate_metrics_serverapp[2]["barrier-loss"])
    )
    assert metrics["rounds"]["1"]["train"]["num-replies"] == 3
    assert metrics["seconds"] == SECONDS
    assert (metrics["config"], metrics["seed"]) == (CONFIG, 3)
    sizes = metrics["bytes"]
    assert sizes["upload_per_client"] <= sizes["fedavg_per_client"]
    model = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(v, model[k]) for k, v in torch_state(result).items())
    text = caplog.text
    assert "FedFish, 3 rounds" in text
    assert f"{last['accuracy']:.1%} (round 3)" in text
    assert f"{last['barrier-loss']:.3f} (round 3)" in text
    assert "accuracy fine-tuned" in text
    assert "kB a client (FedAvg" in text
    assert f"Results are in {tmp_path}" in text


def torch_state(result):
    return dict(result.arrays.to_torch_state_dict())


@pytest.mark.usefixtures("empty_pictures")
def test_the_last_round_is_scored_if_it_was_not(tmp_path):
    task, result = outcome(FedFish, num_rounds=3, every=2)
    metrics = report(tmp_path, task, result)
    scored = [n for n, r in metrics["rounds"].items() if "server" in r]
    assert scored == ["0", "2", "3"]
    last = metrics["rounds"]["3"]["server"]
    assert set(last) == {"accuracy", "loss"}
    expected = evaluate_on_test(task)(3, result.arrays)
    assert last == dict(expected)
    assert metrics["accuracy"]["fedfish"] == expected["accuracy"]
    second = metrics["rounds"]["2"]["server"]
    assert metrics["accuracy"]["personalised"] == second["personalised-accuracy"]
    assert 3 not in result.evaluate_metrics_serverapp


@pytest.mark.usefixtures("empty_pictures")
def test_of_flowers_fedavg_there_are_no_bytes(tmp_path, caplog):
    task, result = outcome(FedAvg, num_rounds=1)
    metrics = report(tmp_path, task, result, method="FedAvg")
    assert metrics["bytes"] == {}
    assert metrics["accuracy"]["fedavg"] > 0.5
    assert "Upload" not in caplog.text


@pytest.mark.usefixtures("empty_pictures")
def test_only_what_was_measured_is_reported(tmp_path, caplog):
    task = digits()
    arrays = ArrayRecord(shared_state(task.make_model()))
    metrics = report(tmp_path, task, Result(arrays=arrays))
    assert list(metrics["accuracy"]) == ["fedfish"]
    assert list(metrics["rounds"]) == ["0"]
    assert "no run has" not in caplog.text
    assert "barrier" not in caplog.text


def test_a_text_has_no_picture_of_its_documents(tmp_path):
    task = load_task(
        dataset="language",
        model="transformer",
        partition="by-document",
        num_partitions=2,
    )
    scored = MetricRecord({"accuracy": 0.25, "loss": 2.5})
    arrays = ArrayRecord(shared_state(task.make_model()))
    result = Result(arrays=arrays, evaluate_metrics_serverapp={2: scored})
    assert report(tmp_path, task, result)["accuracy"] == {"fedfish": 0.25}
    assert files(tmp_path) == {"metrics.json", "model.safetensors", "rounds.png"}


def test_evaluation_leaves_rounds_out():
    task = digits()
    arrays = ArrayRecord(shared_state(task.make_model()))
    evaluate = evaluate_on_test(task, every=3)
    found = [evaluate(n, arrays) for n in range(5)]
    assert [n for n, metrics in enumerate(found) if metrics is not None] == [0, 3]
    assert found[0] == found[3]
    further = evaluate_on_test(task, every=3, also=[2])
    assert [n for n in range(5) if further(n, arrays) is not None] == [0, 2, 3]
    with pytest.raises(ConfigurationError, match="every must be >= 1"):
        evaluate_on_test(task, every=0)


@pytest.mark.parametrize("strategy", [FedAvg, FedFish])
@pytest.mark.parametrize(
    ("wanted", "clients"), [(1, 1), (1, 49), (3, 7), (20, 20), (7, 93), (64, 9)]
)
def test_a_round_has_as_many_clients_as_are_wanted(strategy, wanted, clients):
    options = cohort_from_run_config({"clients-per-round": wanted}, clients)
    size = min(wanted, clients)
    assert options["min_train_nodes"] == max(1, size // 2)
    made = strategy(**options, min_available_nodes=1)
    sampled = max(int(clients * made.fraction_train), made.min_train_nodes)
    assert sampled == size


@pytest.mark.parametrize(
    ("wanted", "clients", "text"),
    [
        (0, 5, "clients-per-round must be >= 1, got 0"),
        (3, 0, "no client is left for training: start more SuperNodes"),
    ],
)
def test_a_round_needs_a_client(wanted, clients, text):
    with pytest.raises(ConfigurationError, match=text):
        cohort_from_run_config({"clients-per-round": wanted}, clients)
