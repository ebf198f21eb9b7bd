"""Differential privacy of sums: what is clipped, what noise there is, what it costs."""

import math
from statistics import NormalDist

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from test_secure_sums import merged, secure_app
from virtual import tiny_arrays

from flwr_fisher.client import identify
from flwr_fisher.client.request import config_of
from flwr_fisher.errors import ClientError, ConfigurationError, RoundError
from flwr_fisher.secure import SecureSums, SecureSumsMod
from flwr_fisher.server.privacy import with_noise
from flwr_fisher.strategies import FedAvg, Privacy
from flwr_fisher.testing import LocalGrid

QUIET = 1e-9  # a noise multiplier that leaves the clipping to be seen


def private(privacy):
    return FedAvg(fraction_evaluate=0.0, privacy=privacy, secure=SecureSums())


def stepping_app(folder, step, **options):
    """Clients of which number i adds i times a step to each number."""
    app = ClientApp()

    @app.train(mods=[SecureSumsMod(state_dir=folder, **options)])
    def train(message, context):
        arrays = message.content.array_records["arrays"].to_torch_state_dict()
        own = step * int(context.node_config["partition-id"])
        trained = {
            k: v + own if v.is_floating_point() else v + 7 for k, v in arrays.items()
        }
        metrics = MetricRecord({"num-examples": 1 + int(own)})
        content = RecordDict({"arrays": ArrayRecord(trained), "metrics": metrics})
        return Message(content, reply_to=message)

    app.query()(identify)
    return app


def change(strategy, app, clients):
    """Return by how much a round changes the model, as one vector."""
    start, new = tiny_arrays().to_torch_state_dict(), merged(strategy, app, clients)
    assert all(
        torch.equal(start[k], new[k]) for k in start if not start[k].is_floating_point()
    )
    moved = [new[k] - v for k, v in start.items() if v.is_floating_point()]
    return torch.cat([value.double().flatten() for value in moved])


# The accountant


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("releases", [1, 10])
def test_epsilon_is_above_the_exact_one_and_near_it(multiplier, releases):
    """Of Gaussian mechanisms together there is a closed form (Balle & Wang 2018)."""
    cdf, mu, delta = NormalDist().cdf, math.sqrt(releases) / multiplier, 1e-5

    def delta_of(epsilon):
        above = cdf(mu / 2 - epsilon / mu)
        return above - math.exp(epsilon) * cdf(-mu / 2 - epsilon / mu)

    privacy = Privacy(noise_multiplier=multiplier, clipping_norm=1.0)
    epsilon = privacy.epsilon(releases, delta)
    assert delta_of(epsilon) <= delta
    assert delta_of(epsilon / 1.15) > delta


def test_what_is_out_of_range_is_refused():
    good = {"noise_multiplier": 1.0, "clipping_norm": 1.0}
    assert Privacy(**good, honest=0.55).fewest(100) == 55  # 0.55 * 100 is above 55
    numbers = ("noise_multiplier", 0.0), ("clipping_norm", -1.0), ("honest", 0.0)
    for wrong in ({name: value} for name, value in (*numbers, ("honest", 1.5))):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            Privacy(**good | wrong)
    privacy = Privacy(**good)
    with pytest.raises(ConfigurationError, match="releases"):
        privacy.epsilon(0, 1e-5)
    with pytest.raises(ConfigurationError, match="privacy must be"):
        FedAvg(privacy=1.0, secure=SecureSums())
    with pytest.raises(ConfigurationError, match="min_noise"):
        SecureSumsMod(min_noise=-1.0)


# Noise


def test_noise_is_normal_and_new_each_time():
    zeros = {"w": torch.zeros(200_000)}
    one, two = with_noise(zeros, 2.0)["w"], with_noise(zeros, 2.0)["w"]
    assert abs(float(one.std()) / 2 - 1) < 0.01
    assert abs(float(one.mean())) < 0.03
    assert abs(float((one * two).mean())) < 0.05
    below = [(one / 2 < x).double().mean().item() for x in (-2, -1, 0, 1, 2)]
    for share, x in zip(below, (-2, -1, 0, 1, 2), strict=True):
        assert abs(share - NormalDist().cdf(x)) < 0.01


def test_clients_noise_adds_up_to_the_noise_that_was_asked_for(tmp_path):
    privacy = Privacy(noise_multiplier=2.0, clipping_norm=0.5, honest=0.8)
    strategy = FedAvg(fraction_evaluate=0.0, privacy=privacy, secure=SecureSums())
    app = stepping_app(tmp_path, 0.0)
    seen = torch.cat([change(strategy, app, clients=5) for _ in range(6)])
    # Of the sum: z C / sqrt(honest), since all are.
    wanted = 2.0 * 0.5 / math.sqrt(0.8) / 5
    assert abs(float(seen.std()) / wanted - 1) < 5 / math.sqrt(2 * len(seen))


# Clipping


def test_steps_are_clipped_and_count_once(tmp_path):
    """Client i moves each number by 10 i, and weighs 1 + 10 i."""
    privacy = Privacy(noise_multiplier=QUIET, clipping_norm=0.3)
    strategy = FedAvg(fraction_evaluate=0.0, privacy=privacy, secure=SecureSums())
    moved = change(strategy, stepping_app(tmp_path, 10.0), clients=4)
    expected = 0.3 / math.sqrt(len(moved)) * 3 / 4  # client 0 has not moved
    assert float((moved - expected).abs().max()) < 1e-6


def test_the_upload_of_a_round_is_a_model_as_without_privacy(tmp_path):
    """A report compared the method with the mean step, taken for a model."""
    privacy = Privacy(noise_multiplier=QUIET, clipping_norm=0.3)
    grid = LocalGrid(stepping_app(tmp_path, 1.0), 4)
    result = private(privacy).start(grid, tiny_arrays())
    (upload,) = result.uploads
    mean, model = upload.payload.part("params"), result.arrays.to_torch_state_dict()
    assert all(torch.equal(mean[name], value) for name, value in model.items())


def test_noise_leaves_no_variance_of_a_norm_below_zero(tmp_path):
    privacy = Privacy(noise_multiplier=3.0, clipping_norm=9.0)
    model = merged(private(privacy), stepping_app(tmp_path, 0.1), 4)
    assert (model["1.running_var"] > 0).all()


# What is refused, and what is told


def test_a_client_may_ask_for_noise(tmp_path):
    app = stepping_app(tmp_path, 1.0, min_noise=0.5)
    for privacy in (None, Privacy(noise_multiplier=0.5, clipping_norm=1.0)):
        strategy = FedAvg(fraction_evaluate=0.0, privacy=privacy, secure=SecureSums())
        with pytest.raises(RoundError, match=r"SecureSumsMod\(min_noise"):
            merged(strategy, app)
    enough = Privacy(noise_multiplier=1.0, clipping_norm=1.0)
    merged(FedAvg(fraction_evaluate=0.0, privacy=enough, secure=SecureSums()), app)


def test_it_asks_for_it_also_of_what_it_has_begun(tmp_path):
    """Whoever raises it after a crash sends no values that have less."""
    quiet, loud = (stepping_app(tmp_path, 1.0, min_noise=z) for z in (0.5, 5.0))

    def raised(message, context):
        stage = config_of(message)[0].get("secure")
        return (loud if stage == "values" else quiet)(message, context)

    privacy = Privacy(noise_multiplier=1.0, clipping_norm=1.0)
    with pytest.raises(RoundError, match=r"SecureSumsMod\(min_noise"):
        merged(private(privacy), raised)


def test_a_sum_with_too_little_noise_is_not_opened(tmp_path):
    opened = []

    def leaves(message, context, now):
        if now == "values" and context.node_config["partition-id"] == 2:
            raise ClientError("gone")
        if now == "open":
            opened.append(1)

    privacy = Privacy(noise_multiplier=1.0, clipping_norm=1.0, honest=1.0)
    strategy = FedAvg(fraction_evaluate=0.0, privacy=privacy, secure=SecureSums())
    with pytest.raises(RoundError, match="4 of 5 clients are left"):
        merged(strategy, secure_app(tmp_path, leaves), clients=5)
    assert len(opened) == 5  # the exponents, which are constants


def test_who_resumes_must_ask_for_the_same_privacy(tmp_path):
    privacy = Privacy(noise_multiplier=1.0, clipping_norm=1.0)
    grid = LocalGrid(secure_app(tmp_path / "a"), 4)
    folder = tmp_path / "run"
    private(privacy).start(grid, tiny_arrays(), checkpoint_dir=folder)
    other = private(Privacy(noise_multiplier=0.1, clipping_norm=1.0))
    with pytest.raises(Exception, match="noise_multiplier"):
        other.start(grid, tiny_arrays(), 2, checkpoint_dir=folder, resume=True)
