"""FedExP as a strategy: a round by hand, its two results, and what it owes users."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch.utils.data import DataLoader, TensorDataset
from virtual import (
    Watched,
    change_array,
    close,
    half_square,
    plane,
    same_bits,
    start,
    tiny_model,
)

from flwr_fisher.client import FisherClient, LocalSGD, make_client_app
from flwr_fisher.errors import ConfigurationError
from flwr_fisher.params import shared_state, trainable_names
from flwr_fisher.rounds import last_two_mean
from flwr_fisher.strategies import FedExP
from flwr_fisher.wire import arrays_to_tensors


def run(app=None, clients=3, *, num_rounds=1, **own):
    return start(
        FedExP(fraction_evaluate=0.0, **own), app, clients, num_rounds=num_rounds
    )


# A round by hand

# y = w x with the loss (w x - y)^2 / 2, one step of rate 1 from w = (0, 0): a client
# with the one example (x, 1) ends at w = x, and Delta = -x. Client 0 has one example,
# client 1 has x = (1, 2) twice: p = 1/3, 2/3.
# x = (1, 0): mean Delta = -(1, 4/3), its square 25/9; the mean of squares is
# 1/3 + 2/3 · 5 = 11/3, less than 2 · 25/9.
# x = (1, -4): mean Delta = -(1, 0); the mean of squares is 17/3 + 10/3 = 9, so that
# lr = 9 / (2 (1 + epsilon)).


@pytest.mark.parametrize(
    ("first", "epsilon", "lr", "mean"),
    [
        ([1, 0], 1e-3, 1.0, [1, 4 / 3]),
        ([1, -4], 0.0, 4.5, [1, 0]),
        ([1, -4], 0.5, 3.0, [1, 0]),
        ([1, -4], 9.0, 1.0, [1, 0]),
    ],
)
def test_one_round_is_what_a_pencil_gives(first, epsilon, lr, mean):
    def client_fn(context):
        x = [[first], [[1, 2], [1, 2]]][int(context.node_config["partition-id"])]
        data = TensorDataset(torch.tensor(x).float(), torch.ones(len(x), 1))
        train = LocalSGD(lr=1.0, momentum=0.0, loss_fn=half_square)
        return FisherClient(plane(), DataLoader(data, batch_size=2), train_fn=train)

    begin, app = ArrayRecord(shared_state(plane())), make_client_app(client_fn)
    strategy = FedExP(fraction_evaluate=0.0, epsilon=epsilon)
    result = start(strategy, app, 2, begin)
    got = arrays_to_tensors(result.arrays)["weight"]
    torch.testing.assert_close(got, lr * torch.tensor([mean]))
    assert result.train_metrics_clientapp[1]["server-lr"] == pytest.approx(lr)


# The mean of the last two


def test_their_mean_is_reported_and_training_goes_on_from_the_last():
    plain = [run(num_rounds=n) for n in (1, 2, 3)]
    iterates = [arrays_to_tensors(result.arrays) for result in plain]
    seen = []

    def evaluate(server_round, arrays):
        seen.append(arrays)
        return None

    strategy = FedExP(fraction_evaluate=0.0, average_last_two=True)
    result = start(strategy, num_rounds=3, evaluate_fn=evaluate)
    assert same_bits(seen[1], plain[0].arrays)  # there are no two after the first
    for index in (1, 2):
        mean = last_two_mean(iterates[index], iterates[index - 1])
        got = arrays_to_tensors(seen[index + 1])
        assert all(torch.equal(got[key], value) for key, value in mean.items())
    assert same_bits(seen[3], result.arrays)
    for n, alone in enumerate(plain, start=1):
        lr = result.train_metrics_clientapp[n]["server-lr"]
        assert lr == alone.train_metrics_clientapp[n]["server-lr"]


# Which entries are trained


def test_norms_are_over_trained_parameters_alone():
    names = trainable_names(tiny_model())
    assert same_bits(run(trained=names).arrays, run().arrays)
    # Far from each other, and with the same mean: 8, 10 and 12 are the weights.
    apart = {
        i: change_array("1.running_mean", lambda a, by=by: a + np.float32(by))
        for i, by in enumerate((1000.0, -800.0, 0.0))
    }
    plain, shifted = run(), run(Watched(tamper=apart))
    lrs = [r.train_metrics_clientapp[1]["server-lr"] for r in (plain, shifted)]
    assert lrs[0] == lrs[1]
    assert close(plain.arrays, shifted.arrays, 1e-3)


def test_names_that_the_model_lacks_are_refused_before_training():
    app = Watched()
    with pytest.raises(ConfigurationError, match=r"trained names \['x'\]"):
        run(app, trained=["x", "0.weight"])
    assert not app.trained
