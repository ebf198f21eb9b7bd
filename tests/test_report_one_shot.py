"""The report of a one-shot run: its numbers, by hand from the uploads."""

import json
from types import SimpleNamespace

import pytest
import rivals_path  # noqa: F401
import torch
from flwr.app import MetricRecord
from oracles import randn
from safetensors.torch import load_file
from tasks import load_task
from torch.utils.data import DataLoader, TensorDataset
from virtual import start, tiny_data, tiny_model

from flwr_fisher.curvature import Diagonal
from flwr_fisher.errors import ConfigurationError
from flwr_fisher.merge import fedfisher
from flwr_fisher.report import accuracies, report_one_shot
from flwr_fisher.strategies import (
    CurvatureResult,
    FedAvg,
    FedFisherOneShot,
    Upload,
)
from flwr_fisher.wire import FisherUpload

EXAMPLES = (70, 20, 10)


def uploads(task):
    """Return three clients that each learned the digits in another way, or none."""
    x, y = examples(task)
    found = []
    for i, n in enumerate(EXAMPLES):
        model = task.make_model()
        for _ in range(5 * i + 1):
            torch.nn.functional.cross_entropy(model(x[i::9]), y[i::9]).backward()
        params = {
            k: p.detach() - 0.3 * p.grad + 0.2 * randn(10 * i + j, *p.shape)
            for j, (k, p) in enumerate(model.named_parameters())
        }
        curvature = Diagonal(
            {k: torch.full_like(p, 1.0 + i) for k, p in params.items()}
        )
        payload = FisherUpload(params, curvature)
        found.append(Upload(i, f"partition-{i}", n, payload, MetricRecord({}), 1))
    return found


def examples(task):
    batches = list(task.test_loader())
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


@pytest.mark.usefixtures("empty_pictures")
def test_every_methods_accuracy_is_as_by_hand(tmp_path):
    task = load_task(
        dataset="digits", model="logistic", partition="iid", num_partitions=3, seed=0
    )
    replies = uploads(task)
    posteriors = [u.payload.posterior(u.num_examples) for u in replies]
    merged = fedfisher(posteriors, balance=0.0)
    result = CurvatureResult(uploads=replies, details=merged)
    got = report_one_shot(tmp_path, task=task, result=result, seconds={}, config={})

    x, y = examples(task)

    def probabilities(params):
        model = task.make_model().eval()
        model.load_state_dict(params)
        return model(x).detach().softmax(1)

    def accuracy(p):
        return float((p.argmax(1) == y).double().mean())

    each = [probabilities(u.payload.params) for u in replies]
    weighted = sum(n * p for n, p in zip(EXAMPLES, each, strict=True))
    mean = {
        k: sum(
            n / 100 * u.payload.params[k]
            for n, u in zip(EXAMPLES, replies, strict=True)
        )
        for k in merged.params
    }
    want = {
        "fedavg": accuracy(probabilities(mean)),
        "best_client": max(accuracy(p) for p in each),
        "fedfisher": accuracy(probabilities(merged.params)),
        "ensemble": accuracy(weighted),
    }
    assert got == pytest.approx(want)
    assert json.loads((tmp_path / "metrics.json").read_text())["accuracy"] == got
    # What the numbers would be mistaken for is another number here.
    assert accuracy(sum(each)) != want["ensemble"]
    assert accuracy(each[0]) != want["best_client"] != accuracy(each[-1])
    assert len(set(want.values())) == 4


def test_a_model_and_a_test_set_of_ones_own_are_enough(tmp_path):
    task = load_task(
        dataset="digits", model="logistic", partition="iid", num_partitions=3, seed=0
    )
    replies = uploads(task)
    merged = fedfisher([u.payload.posterior(u.num_examples) for u in replies])
    result = CurvatureResult(uploads=replies, details=merged)
    own = SimpleNamespace(make_model=task.make_model, test_loader=task.test_loader)
    got = report_one_shot(tmp_path / "own", task=own, result=result)
    assert got == report_one_shot(tmp_path / "task", task=task, result=result)
    written = {path.name for path in (tmp_path / "own").iterdir()}
    assert {"metrics.json", "model.safetensors", "accuracy.png"} <= written
    assert "labels.png" not in written


def test_with_batch_norm_the_model_is_the_runs_result(tmp_path):
    data = TensorDataset(*tiny_data(9, n=50).tensors)
    task = SimpleNamespace(
        make_model=tiny_model, test_loader=lambda: DataLoader(data, batch_size=25)
    )
    result = start(FedFisherOneShot(fraction_evaluate=0.0))
    found = report_one_shot(str(tmp_path), task=task, result=result)
    models = {
        "fedfisher": result.arrays.to_torch_state_dict(),
        "fedfisher_averaged": result.details.params,
    }
    expected = accuracies(tiny_model(), models, task.test_loader())
    assert {name: found[name] for name in expected} == expected
    # Nobody has measured the norms of merges without a client.
    rows = json.loads((tmp_path / "metrics.json").read_text())["influence"]
    assert rows
    assert all("distance" in row and "accuracy_without" not in row for row in rows)
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[k], v) for k, v in models["fedfisher"].items())
    assert not torch.equal(
        saved["1.running_var"], result.details.params["1.running_var"]
    )


def test_a_result_without_a_merge_is_refused(tmp_path):
    for result in (start(FedAvg(fraction_evaluate=0.0)), CurvatureResult()):
        with pytest.raises(ConfigurationError, match=r"reopen=True.* report_rounds"):
            report_one_shot(tmp_path, task=None, result=result)
