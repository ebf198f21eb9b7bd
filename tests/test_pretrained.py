"""Published weights: the head comes first, and training keeps what is known."""

import math
from collections import Counter
from functools import cache, partial

import pytest
import torch
from flwr.app import ConfigRecord
from test_refinement import SUMS, loss_of, run, untrained_app
from test_secure_sums import secure_app
from torch import nn
from torch.utils.data import DataLoader
from virtual import (
    Watched,
    app_by_partition,
    close,
    killing_app,
    same_bits,
    tiny_arrays,
    tiny_client,
    tiny_data,
    tiny_model,
)

from flwr_fisher.client import FisherClient, LocalSGD
from flwr_fisher.errors import ConfigurationError, RoundError
from flwr_fisher.report import report_rounds
from flwr_fisher.secure import SecureSums
from flwr_fisher.strategies import FedAvg, FedFisherOneShot, Refinement, Waiting
from flwr_fisher.wire import arrays_to_tensors

KNOWN = {"pretrained": True, "refine": Refinement()}
HEAD = {"3.weight", "3.bias"}
MAKES = [
    pytest.param(FedAvg, {}, id="fedavg"),
    pytest.param(FedFisherOneShot, {"codec": "lossless"}, id="fedfisher"),
    pytest.param(FedFisherOneShot, SUMS, id="diagonal sums"),
    pytest.param(FedFisherOneShot, {"aggregate": "sums"}, id="K-FAC sums"),
]


def app_of(train_fn):
    return app_by_partition(lambda i: tiny_client(i, train_fn=train_fn))


@pytest.mark.parametrize(("make", "own"), MAKES)
def test_training_keeps_the_norms_and_the_first_head(make, own):
    heads = []

    def looks(model, loader, device, config):
        metrics = LocalSGD(epochs=2)(model, loader, device, config)
        heads.append(model[3].weight.detach().clone())
        return metrics

    result = run(make, app_of(looks), **KNOWN, **own)
    start, merged = (arrays_to_tensors(a) for a in (tiny_arrays(), result.unrefined))
    changed = {k for k in start if not torch.equal(start[k], merged[k])}
    assert changed == {"0.weight", "0.bias", "1.weight", "1.bias", *HEAD}
    head, *others = heads
    assert not torch.equal(head, start["3.weight"])
    assert all(torch.equal(head, other) for other in others)
    torch.testing.assert_close(merged["3.weight"], head, rtol=1e-5, atol=1e-6)
    assert loss_of(result.arrays) < result.train_metrics_clientapp[1]["first-head-loss"]


def scales(factor):
    """A loop that spoils a network, as far too high a rate does. It reads no data."""

    def loop(model, loader, device, config):
        with torch.no_grad():
            model[0].weight.mul_(factor)
            model[0].bias.mul_(factor)
            model[1].weight.mul_(factor)
        return {}

    return loop


@pytest.mark.parametrize(
    ("make", "own", "factor"),
    [
        *(pytest.param(*each.values, 1e-3, id=each.id) for each in MAKES),
        pytest.param(FedAvg, {}, 1e12, id="features too large to send sums of"),
    ],
)
def test_a_training_that_spoils_the_features_is_not_taken(
    make, own, factor, tmp_path, caplog
):
    result = run(make, app_of(scales(factor)), **KNOWN, **own)
    head_alone = run(FedAvg, untrained_app(), refine=Refinement())
    assert close(result.arrays, head_alone.arrays, 1e-6)
    assert result.train_metrics_clientapp[1]["start-taken"] == 1
    assert "Try a lower learning rate" in caplog.text
    report_rounds(
        tmp_path, tiny_model(), DataLoader(tiny_data(0), 8), result, method="ours"
    )
    assert "The final model is the published network" in caplog.text
    assert "refining the last model adds" not in caplog.text


def test_first_and_last_model_are_compared_on_the_same_clients():
    clients = {"fraction_train": 0.5, "num_rounds": 2, "clients": 4}
    uploads = run(**clients, **KNOWN).exchange_uploads
    asked = [{u.client for u in uploads[f"{n} losses"]} for n in ("head", "start")]
    assert asked[0] == asked[1]
    assert len(asked[0]) == 4  # a head needs the others' classes, too


def test_a_run_that_goes_on_has_its_first_model_still(tmp_path):
    kept = {"checkpoint_dir": tmp_path, **KNOWN}
    run(FedAvg, **kept)
    more = run(FedAvg, app_of(scales(0)), resume=True, num_rounds=2, **kept)
    assert more.train_metrics_clientapp[2]["start-taken"] == 1


def test_a_loop_that_reads_no_data_counts_for_all_of_them():
    weights = [u.num_examples for u in run(app=app_of(scales(1)), **KNOWN).uploads]
    assert weights == [8, 10, 12]


@pytest.mark.parametrize("name", ["3.weight", "1.running_var"])
def test_a_loop_that_changes_what_is_kept_is_refused(name):
    """As one that trains a network of its own, in which nothing is frozen."""

    def loop(model, loader, device, config):
        model.state_dict()[name].add_(1.0)
        return LocalSGD()(model, loader, device, config)

    with pytest.raises(RoundError, match=f"changed '{name}', which pretrained=True"):
        run(FedAvg, app_of(loop), **KNOWN)


def test_features_far_from_zero_have_a_good_first_head():
    class Shifted(nn.Sequential):
        def forward(self, x):
            first, norm, relu, head = self
            return head(10 + relu(norm(first(x))))

    def shifted(partition):
        loader = DataLoader(tiny_data(partition), 4)
        return FisherClient(Shifted(*tiny_model()), loader, train_fn=LocalSGD())

    losses = [
        run(app=app, **KNOWN).train_metrics_clientapp[1]["first-head-loss"]
        for app in (app_by_partition(shifted), app_of(LocalSGD()))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def test_the_default_rate_is_a_tenth_from_published_weights():
    assert (LocalSGD().rate({}), LocalSGD().rate({"pretrained": True})) == (0.01, 0.001)
    assert LocalSGD(lr=0.3).rate({"pretrained": True}) == 0.3
    assert LocalSGD().rate({"pretrained": True, "lr": 0.2}) == 0.2
    assert LocalSGD().rate({"pretrained": "resnet18.pt"}) == 0.01  # the user's own key


KFAC_SUMS = {"aggregate": "sums"}


@cache
def known(**own):
    return run(**KNOWN, **own)


@pytest.mark.parametrize(
    ("own", "asked"),
    [
        *(({}, n) for n in (2, 6, 10, 14)),
        *(({"aggregate": "sums"}, n) for n in (6, 14)),
    ],
)
def test_a_run_that_stops_anywhere_ends_in_the_same_bits(own, asked, tmp_path):
    whole = known(**own)
    with pytest.raises(KeyboardInterrupt):
        run(app=killing_app(asked, 3), **KNOWN, **own, checkpoint_dir=tmp_path)
    resumed = run(**KNOWN, **own, checkpoint_dir=tmp_path, resume=True)
    assert same_bits(resumed.arrays, whole.arrays)
    assert same_bits(resumed.unrefined, whole.unrefined)


def test_secure_sums_give_the_same_model(tmp_path):
    plain = run(app=secure_app(tmp_path / "a"), **KNOWN, **SUMS)
    secure = {"policy": None, "secure": SecureSums()}
    summed = run(app=secure_app(tmp_path / "b"), **KNOWN, **SUMS, **secure)
    assert close(summed.arrays, plain.arrays, 1e-4)


def test_a_client_that_leaves_the_last_sum_spares_no_spoilt_training(tmp_path):
    """Sums of unlike clients were not compared, and nobody said so."""
    requests = []

    def leaves(message, context, stage):
        if context.node_config["partition-id"] == 2:
            requests.append(stage)
            if len(requests) > stays:
                raise ValueError("gone")

    taken, stays = [], math.inf
    for folder in ("all", "one leaves"):
        app = secure_app(tmp_path / folder, leaves)
        result = run(
            FedAvg, app, 4, **KNOWN, policy=None, secure=SecureSums(),
            train_config=ConfigRecord({"lr": 3.0}),
        )  # fmt: skip
        taken.append(result.train_metrics_clientapp[1]["start-taken"])
        stays = len(requests) - 5  # the stages of one sum
        requests.clear()
    assert taken == [1, 1]
    assert len(result.exchange_uploads["start losses"][0].members) == 3


def test_without_the_trained_networks_loss_the_published_one_is_taken(caplog):
    """A warning gave its loss as infinite, and called it spoilt."""
    losses = Counter()

    def away(partition, content):
        (record,) = content.array_records.values()
        losses[partition] += "losses" in record
        if "losses" in record and losses[partition] == 2:  # of the trained one
            raise ValueError("away")

    app = Watched(tamper={n: partial(away, n) for n in range(3)})
    assert run(FedAvg, app, **KNOWN).train_metrics_clientapp[1]["start-taken"] == 1
    assert "nobody knows the loss of the trained network" in caplog.text


def test_only_the_first_round_begins_with_a_head():
    result = run(num_rounds=2, **KNOWN)
    metrics = result.train_metrics_clientapp
    assert [n for n in metrics if "first-head-loss" in metrics[n]] == [1]
    assert [n for n in metrics if "head-loss" in metrics[n]] == [2]
    assert loss_of(result.arrays) < metrics[1]["first-head-loss"]


def test_a_model_without_such_a_head_is_refused_before_training():
    class Squashed(nn.Sequential):
        def forward(self, x):
            return super().forward(x).tanh()

    def squashed(partition):
        loader = DataLoader(tiny_data(partition), 4)
        return FisherClient(Squashed(*tiny_model()), loader, train_fn=lambda *_: 1 / 0)

    with pytest.raises(RoundError, match=r"not those of an nn\.Linear"):
        run(app=app_by_partition(squashed), **KNOWN)


def test_where_only_the_head_is_trained_afl_is_named():
    def frozen(partition):
        client = tiny_client(partition)
        client.problem.model[:3].requires_grad_(False)
        return client

    with pytest.raises(RoundError, match=r"use AFL\(\)"):
        run(app=app_by_partition(frozen), **KNOWN)


def test_the_round_that_begins_with_a_head_is_not_skipped():
    skipping = Waiting(on_failed_round="skip")
    with pytest.raises(RoundError):
        run(app=app_of(lambda *_: 1 / 0), num_rounds=2, waiting=skipping, **KNOWN)


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"weighted_by_key": "w"}, "weighted_by_key='num-examples'"),
        ({"refine": None}, r"needs refine=Refinement\(\)"),
        ({"refine": Refinement(head=False)}, r"needs refine=Refinement\(\)"),
        ({"waiting": Waiting(window=9.0)}, "Waiting"),
    ],
)
def test_what_does_not_fit_is_refused(own, says):
    with pytest.raises(ConfigurationError, match=says):
        FedFisherOneShot(pretrained=True, **own)
