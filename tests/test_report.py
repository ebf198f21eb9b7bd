"""The report of a run: its accuracies, its numbers by hand, its pictures."""

import json
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from flwr.serverapp.strategy import Result
from matplotlib.figure import Figure
from oracles import randn, rng, seeded
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from virtual import app_by_partition, start, tiny_app, tiny_data, tiny_model

from flwr_fisher.client import FisherClient
from flwr_fisher.curvature import Diagonal
from flwr_fisher.errors import (
    ConfigurationError,
    DataError,
    ParamsError,
    StructureError,
)
from flwr_fisher.merge import MergeResult, fedfisher
from flwr_fisher.params import shared_state, weighted_mean
from flwr_fisher.report import (
    accuracies,
    ensemble_accuracy,
    evaluate_on_test,
    plot_rounds,
    report_one_shot,
    report_rounds,
    resolve_output_dir,
)
from flwr_fisher.report.accuracy import accuracy_of
from flwr_fisher.report.diagnosis import one_shot_sentences
from flwr_fisher.strategies import (
    CurvatureResult,
    FedAvg,
    FedFish,
    FedFisherOneShot,
    Refinement,
    Upload,
)
from flwr_fisher.wire import FisherUpload

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


def test_batches_without_labels_are_refused():
    with pytest.raises(DataError, match="must hold a tensor of labels"):
        ensemble_accuracy(net(), members(1), [1.0], [X])


@pytest.mark.parametrize("shuffle", [False, True])
def test_members_vote_on_the_same_examples(shuffle):
    loader = DataLoader(TensorDataset(X, Y), 7, shuffle=shuffle, generator=rng(3))
    for weights in ([0.2, 0.5, 0.3], [9.0, 1.0, 0.5]):
        got = ensemble_accuracy(seeded(net), members(), weights, loader)
        assert got == pytest.approx(by_hand(weights))
    assert by_hand([0.2, 0.5, 0.3]) != by_hand([9.0, 1.0, 0.5])


def test_members_of_half_precision_may_have_many_examples():
    model, data = nn.Linear(3, 4).half(), [(X.half(), Y)]
    halves = [
        dict(seeded(lambda: nn.Linear(3, 4).half(), s).state_dict()) for s in (1, 2)
    ]
    got = [ensemble_accuracy(model, halves, [n, 2 * n], data) for n in (1.0, 1e6)]
    assert got[0] == got[1]


def test_missing_keys_stay_the_models():
    model = seeded(net)
    part = {k: v for k, v in members()[0].items() if k.startswith("3.")}
    whole = {**model.state_dict(), **part}
    # The member before it must leave nothing behind.
    pair = [members()[1], part], [1e-6, 1.0]
    want = accuracies(model, {"whole": whole}, [(X, Y)])["whole"]
    assert accuracies(model, {"part": part}, [(X, Y)])["part"] == want
    assert ensemble_accuracy(model, *pair, [(X, Y)]) == want


def test_what_is_no_class_has_no_accuracy():
    for outputs, labels in ((1, Y % 2), (2, Y * 1.0)):
        got = accuracies(nn.Linear(3, outputs), {"own": {}}, [(X, labels)])
        assert math.isnan(got["own"])


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"3.wieght": torch.ones(4, 5)}, "3.wieght"),
        ({"3.bias": torch.ones(5)}, "3.bias"),
    ],
)
def test_what_does_not_fit_is_named(wrong, named):
    model, good = seeded(net), members()[0]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises((ParamsError, RuntimeError), match=named):
        ensemble_accuracy(model, [good, good | wrong], [1, 1], [(X, Y)])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_there_must_be_examples():
    with pytest.raises(DataError, match="no examples"):
        ensemble_accuracy(net(), members(), [1, 1, 1], [])


# One shot

EXAMPLES = (70, 20, 10)
HELD_OUT = DataLoader(tiny_data(9, n=50), batch_size=25)
TEST = [(randn(5, 90, 6), torch.randint(3, (90,), generator=rng(6)))]


def linear():
    return nn.Linear(6, 3)


def uploads():
    """Three clients' models, each trained on another third of the test set."""
    (x, y), made = TEST[0], []
    for i, count in enumerate(EXAMPLES):
        model = seeded(linear, i)
        nn.functional.cross_entropy(model(x[i::3]), y[i::3]).backward()
        params = {k: p.detach() - p.grad for k, p in model.named_parameters()}
        curvature = Diagonal(
            {k: torch.full_like(p, 1.0 + i) for k, p in params.items()}
        )
        payload = FisherUpload(params, curvature)
        made.append(Upload(i, f"node-{i}", count, payload, MetricRecord({}), 1))
    return made


@pytest.mark.usefixtures("empty_pictures")
def test_every_methods_accuracy_is_as_by_hand(tmp_path, caplog):
    replies, (x, y) = uploads(), TEST[0]
    posteriors = [u.payload.posterior(u.num_examples) for u in replies]
    merged = fedfisher(posteriors, balance=0.0)
    result = CurvatureResult(uploads=replies, details=merged)
    config = {"seed": 3}
    with caplog.at_level("INFO", logger="flwr"):
        got = report_one_shot(
            tmp_path, linear(), TEST, result, config=config, seconds=1.5
        )

    def logits(params):
        return x @ params["weight"].T + params["bias"]

    def accuracy(outputs):
        return float((outputs.argmax(1) == y).double().mean())

    members = [u.payload.params for u in replies]
    pairs = list(zip([n / 100 for n in EXAMPLES], members, strict=True))
    mean = {k: sum(w * params[k] for w, params in pairs) for k in merged.params}
    each = [accuracy(logits(params)) for params in members]
    want = {
        "fedavg": accuracy(logits(mean)),
        "best_client": max(each),
        "fedfisher": accuracy(logits(merged.params)),
        "ensemble": accuracy(sum(w * logits(p).softmax(1) for w, p in pairs)),
    }
    assert got == pytest.approx(want)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["accuracy"] == got
    assert metrics["config"] == config
    assert metrics["seconds"] == 1.5
    rows = metrics["clients"]
    assert [row["client"] for row in rows] == ["node-0", "node-1", "node-2"]
    assert [row["examples"] for row in rows] == list(EXAMPLES)
    assert [row["accuracy"] for row in rows] == pytest.approx(each)
    assert [row["share"] for row in rows] == pytest.approx(merged.shares)
    for text in ("node-1: 20 examples", "FedFisher", "Upload, all", f"in {tmp_path}"):
        assert text in caplog.text
    assert (tmp_path / "accuracy.png").exists()


@pytest.mark.usefixtures("empty_pictures")
def test_with_batch_norm_the_model_is_the_runs_result(tmp_path):
    result = start(FedFisherOneShot(fraction_evaluate=0.0))
    found = report_one_shot(str(tmp_path), tiny_model(), HELD_OUT, result)
    models = {
        "fedfisher": result.arrays.to_torch_state_dict(),
        "fedfisher_averaged": result.details.params,
    }
    expected = accuracies(tiny_model(), models, HELD_OUT)
    assert {name: found[name] for name in expected} == expected
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[k], v) for k, v in models["fedfisher"].items())
    assert not torch.equal(
        saved["1.running_var"], result.details.params["1.running_var"]
    )


def test_the_log_has_the_reports_numbers(tmp_path, caplog):
    result = start(FedFisherOneShot(fraction_evaluate=0.0))
    where = tmp_path / "a" / "new"  # neither folder is there
    with caplog.at_level("INFO", "flwr"):
        report_one_shot(where, tiny_model(), HELD_OUT, result)
        report_one_shot(where, tiny_model(), HELD_OUT, result)  # written again
    metrics = json.loads((where / "metrics.json").read_text())
    assert metrics["rounds"]["1"]["train"]["num-replies"] == 3
    for row in metrics["clients"]:
        share, accuracy = 100 * row["share"], 100 * row["accuracy"]
        text = f"{row['client']}: {row['examples']} examples, {share:.1f} % of the "
        assert f"{text}curvature, test accuracy {accuracy:.1f} %" in caplog.text
    sent, fedavg = (
        metrics["bytes"][f"{name}_per_client"] / 1000 for name in ("upload", "fedavg")
    )
    assert (
        f"all requests: {sent:.0f} kB a client (FedAvg: {fedavg:.0f} kB)" in caplog.text
    )


def test_a_result_without_a_merge_is_refused(tmp_path):
    arrays = ArrayRecord(linear().state_dict())
    of_flower = Result(arrays=arrays)  # of one of its own strategies
    fedavg = start(FedAvg(fraction_evaluate=0.0))
    for result in (fedavg, CurvatureResult(), of_flower):
        with pytest.raises(ConfigurationError, match=r"call report_rounds; .*reopen"):
            report_one_shot(tmp_path, linear(), TEST, result)


def test_an_error_in_a_score_does_not_cost_the_model(tmp_path):
    weight = torch.ones(2)
    arrays = ArrayRecord({"w": weight})
    merged = CurvatureResult(arrays=arrays, details=MergeResult({"w": weight}, [], 0))
    with pytest.raises(ParamsError):
        report_one_shot(tmp_path / "one", linear(), TEST, merged)
    with pytest.raises(ParamsError):
        report_rounds(
            tmp_path / "many", linear(), TEST, Result(arrays=arrays), method="x"
        )
    for name in "one", "many":
        assert load_file(tmp_path / name / "model.safetensors")["w"].equal(weight)


def test_the_output_folder_is_an_absolute_path(tmp_path):
    assert resolve_output_dir(str(tmp_path / "new"), 7).is_dir()
    assert resolve_output_dir("", 7).parts[-2:] == ("outputs", "7")
    with pytest.raises(ConfigurationError, match="PWD/some"):
        resolve_output_dir("some", 7)


# Several rounds


def rounds_with(make, num_rounds=3, every=1):
    evaluate_fn = evaluate_on_test(tiny_model(), HELD_OUT, every=every)
    strategy = make(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
    own = {"num_rounds": num_rounds, "evaluate_fn": evaluate_fn}
    return start(strategy, tiny_app(), **own)


@pytest.mark.usefixtures("empty_pictures")
@pytest.mark.parametrize("make", [FedAvg, FlowersFedAvg])
def test_rounds_of_any_strategy_are_reported(make, tmp_path, caplog):
    result = rounds_with(make, every=2)
    assert sorted(result.evaluate_metrics_serverapp) == [0, 2]
    with caplog.at_level("INFO", logger="flwr"):
        got = report_rounds(
            tmp_path,
            tiny_model(),
            HELD_OUT,
            result,
            method="FedAvg",
            marks={2: "middle"},
        )
    model = result.arrays.to_torch_state_dict()
    last = accuracies(tiny_model(), {"last": model}, HELD_OUT)["last"]
    middle = result.evaluate_metrics_serverapp[2]["accuracy"]
    assert got == {"fedavg": pytest.approx(last), "middle": middle}
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert list(metrics["rounds"]) == ["0", "1", "2", "3"]
    assert metrics["rounds"]["3"]["server"]["accuracy"] == got["fedavg"]
    assert ("bytes" in metrics) == (make is FedAvg)
    assert "FedAvg: test accuracy" in caplog.text


def test_several_runs_and_metrics_are_drawn(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **kw: figures.append(self))
    first = {1: {"accuracy": 0.5, "loss": [1]}, 3: {"accuracy": 0.6, "loss": 2.0}}
    second = {1: {"accuracy": 0.25}}
    plot_rounds(
        tmp_path / "new" / "rounds.png",
        {"A": first, "B": second},
        ["accuracy", "loss"],
        marks={2: "stage 2"},
    )
    accuracy, loss = figures[0].axes
    lines = [line.get_xydata().tolist() for line in accuracy.lines[:2]]
    assert lines == [[[1, 50], [3, 60]], [[1, 25]]]
    assert loss.lines[0].get_xydata().tolist() == [[3, 2.0]]
    assert [text.get_text().strip() for text in accuracy.texts] == ["stage 2"]
    assert accuracy.get_ylabel() == "accuracy, %"


# What the log says of the numbers


def hits(*found, of=(50, 50, 50)):
    return torch.tensor([found, of], dtype=torch.float64)


def said(final, clients=None, losses=None, **accuracy):
    """Return the sentences of a run with these accuracies, as one text."""
    accuracy = {"fedfisher": accuracy_of(final), "fedavg": 0.1, **accuracy}
    clients = clients or {}
    losses = dict.fromkeys(clients) | (losses or {})
    return " ".join(one_shot_sentences(accuracy, final, clients, losses))


def test_the_log_says_whether_fedavg_is_as_good():
    final = hits(40, 40, 40)  # 80 % of 150 examples: two standard errors are 9 points
    assert "FedFisher is 70.0 points above FedAvg's mean" in said(final)
    told = said(final, fedavg=0.75)
    assert "80.0 %; less than two standard errors). If the clients have alike" in told
    told = said(final, fedavg=0.95)
    assert "15.0 points above FedFisher (95.0 and 80.0 %). If their" in told
    others = {"fedfisher_merge": 0.85, "best_client": 0.85, "ensemble": 0.85}
    told = said(final, **others)  # within two standard errors
    better = "merge alone is better", "client's model is better", "ensemble"
    assert not [text for text in ("adds", *better) if text in told]
    told = said(final, **dict.fromkeys(others, 0.95))
    assert all(text in told for text in better)


def test_the_merge_is_compared_with_fedavg_and_what_follows_it_stands_apart():
    """FedAvg's mean gains by a head, too."""
    told = said(hits(40, 40, 40), fedfisher_merge=0.5)
    assert "FedFisher's merge is 40.0 points above FedAvg's mean" in told
    assert "What follows the merge adds 30.0 points." in told


def test_a_failed_training_is_no_source_of_a_class():
    one, both = hits(50, 0, 0), hits(0, 50, 40)
    clients = {"a": one, "b": both, "c": hits(0, 50, 40)}
    for losses, failed in (({"a": 1.7}, True), ({"a": 0.01}, False), ({}, False)):
        told = said(hits(40, 40, 40), clients, losses)
        assert ("a's model gives every test example the same class" in told) == failed
        assert ("one client's model finds: 0 by a" in told) != failed
        assert "above FedAvg's mean" in told
    # Of most clients, nothing else is said.
    clients["b"] = one
    assert "above" not in said(hits(40, 40, 40), clients, {"a": 1.7, "b": 0.9})


def test_a_client_of_one_class_has_not_failed(tmp_path, caplog):
    """Its loop returns the mean over epochs, which is high."""

    def loop(model, *_):
        model[-1].bias.data = torch.tensor([9.0, 0.0, 0.0])
        return {"train_loss": 1.4}

    def make(partition):
        x, y = tiny_data(0).tensors
        own = TensorDataset(x, y * (partition != 0))
        return FisherClient(tiny_model(), DataLoader(own, 4), train_fn=loop)

    strategy = FedFisherOneShot(fraction_evaluate=0.0, refine=Refinement(head=True))
    result = start(strategy, app_by_partition(make))
    with caplog.at_level("INFO", logger="flwr"):
        report_one_shot(tmp_path, tiny_model(), HELD_OUT, result, method="Mine")
    assert "partition-0's model gives" not in caplog.text
    assert "partition-1's model gives every test example the same" in caplog.text
    assert "Mine, the merge" in caplog.text


def test_the_log_says_what_to_try_if_the_merge_alone_is_level():
    told = said(hits(50, 50, 50), fedfisher_merge=0.8, fedavg=0.8)
    assert ("alike Fishers" in told, "label_smoothing" in told) == (True, False)


def test_clients_that_number_classes_otherwise_are_suspected():
    accuracy = {"fedfisher": 0.3, "fedavg": 0.1}
    for evaluated, suspected in ((0.85, True), (0.4, False), (math.nan, False)):
        told = one_shot_sentences(accuracy, hits(45, 0, 0), {}, {}, evaluated)
        assert ("the same number on all clients" in " ".join(told)) == suspected


def test_the_log_names_classes_that_depend_on_one_client():
    clients = {"a": hits(50, 50, 0), "b": hits(0, 50, 2), "c": hits(0, 20, 9)}
    told = said(hits(40, 0, 0), clients)
    assert "only one client's model finds: 0 by a, 2 by c." in told
    assert "client's model finds, but not the final: 1, 2." in told
    assert "final model hardly finds: 2." in said(hits(40, 40, 0), {"a": clients["a"]})
    # One class has no test examples; of one client alone nothing is said.
    told = said(hits(40, 40, 0, of=(50, 50, 0)), {"a": hits(50, 50, 0)})
    assert "Classes" not in told


@pytest.mark.parametrize("refine", [None, Refinement(head=True)])
def test_fedavg_of_the_last_rounds_models_stands_beside_any_method(
    refine, tmp_path, caplog
):
    result = rounds_with(partial(FedFish, refine=refine))
    with caplog.at_level("INFO", logger="flwr"):
        got = report_rounds(tmp_path, tiny_model(), HELD_OUT, result, method="FedFish")
    models = [upload.payload.params for upload in result.uploads]
    mean = weighted_mean(models, [upload.num_examples for upload in result.uploads])
    assert got["fedavg"] == accuracies(tiny_model(), {"mean": mean}, HELD_OUT)["mean"]
    assert "FedAvg's mean of the same models" in caplog.text
    assert ("FedFish, before it is refined," in caplog.text) == bool(refine)


@pytest.mark.usefixtures("empty_pictures")
def test_scores_of_other_data_are_not_taken_for_the_test_sets(tmp_path, caplog):
    """Such as those for a BestModel, which are the validation set's."""
    result = rounds_with(FedAvg)
    result.evaluate_metrics_serverapp[3] = MetricRecord({"accuracy": 0.99})
    with caplog.at_level("INFO", logger="flwr"):
        got = report_rounds(tmp_path, tiny_model(), HELD_OUT, result, method="FedAvg")
    model = result.arrays.to_torch_state_dict()
    assert got["fedavg"] == accuracies(tiny_model(), {"it": model}, HELD_OUT)["it"]
    assert "FedAvg: evaluate_fn's accuracy" in caplog.text
    assert "FedAvg: test accuracy" not in caplog.text


def test_outputs_without_classes_are_reported_without_a_word_on_accuracy(
    tmp_path, caplog
):
    model, (x, _) = nn.Linear(6, 1), TEST[0]
    loader = DataLoader(TensorDataset(x, randn(7, len(x), 1)), 30)
    params = {k: v.clone() for k, v in shared_state(model).items()}
    ones = Diagonal({k: torch.ones_like(v) for k, v in params.items()})
    payload = FisherUpload(params, ones)
    replies = [Upload(i, f"c{i}", 5, payload, MetricRecord({}), 1, i) for i in range(3)]
    merged = fedfisher([u.payload.posterior(5) for u in replies], balance=0.0)
    result = CurvatureResult(
        arrays=ArrayRecord(params), uploads=replies, details=merged
    )
    with caplog.at_level("INFO", logger="flwr"):
        got = report_one_shot(tmp_path, model, loader, result)
        assert all(map(math.isnan, got.values()))
        rounds = {"method": "FedFisher", "loss_fn": F.mse_loss}
        got = report_rounds(tmp_path, model, loader, result, **rounds)
    assert math.isnan(got["fedfisher"])
    assert "Accuracy on 90 test examples" in caplog.text
    last = json.loads((tmp_path / "metrics.json").read_text())["rounds"]["0"]["server"]
    (*_, y) = loader.dataset.tensors
    assert last["loss"] == pytest.approx(F.mse_loss(model(x), y).item())
    assert "FedAvg's mean" not in caplog.text
    with pytest.raises(StructureError, match="pass another loss_fn"):
        report_rounds(tmp_path, model, loader, result, method="FedFisher")
