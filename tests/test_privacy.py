"""Differential privacy of sums: what is clipped, what noise there is, what it costs."""

import math
from statistics import NormalDist

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from test_secure_sums import merged, secure_app
from virtual import LIFTED, Remembering, fedfisher_with, tiny_arrays

from flwr_fisher.client import identify
from flwr_fisher.errors import (
    ClientError,
    ConfigurationError,
    ParamsError,
    RoundError,
    WireError,
)
from flwr_fisher.merge import contribution, private_sums
from flwr_fisher.merge.private_sums import _PRODUCT, VECTORS
from flwr_fisher.secure import SecureSums, SecureSumsMod
from flwr_fisher.secure.payload import Contribution
from flwr_fisher.server.privacy import with_noise
from flwr_fisher.strategies import FedAvg, Privacy
from flwr_fisher.strategies.exchanges.private_sums import _read
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import Additive

QUIET = 1e-9  # a noise multiplier that leaves the clipping to be seen


def fisher(**options):
    own = {"structure": "diagonal", "aggregate": "sums"}
    own |= {"fraction_evaluate": 0.0, "solver": "closed-form", "anchor": 1.0}
    return fedfisher_with(**own | options)


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
    for wrong in (
        {"noise_multiplier": 0.0},
        {"clipping_norm": -1.0},
        {"honest": 0.0},
        {"honest": 1.5},
    ):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            Privacy(**good | wrong)
    privacy = Privacy(**good)
    with pytest.raises(ConfigurationError, match="releases"):
        privacy.epsilon(0, 1e-5)
    with pytest.raises(ConfigurationError, match="privacy must be"):
        FedAvg(privacy=1.0, secure=SecureSums())
    for other in ({"structure": "kfac"}, {"aggregate": "parts"}):
        with pytest.raises(ConfigurationError, match="privacy= needs"):
            fedfisher_with(**{"structure": "diagonal", **other, "privacy": privacy})
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


def test_the_servers_noise_is_that_of_the_sum(tmp_path):
    loud = Privacy(noise_multiplier=50.0, clipping_norm=0.01)
    start, spread = tiny_arrays().to_torch_state_dict(), []
    app = Remembering(secure_app(tmp_path), lambda partition: tmp_path)
    for _ in range(8):
        new = merged(fisher(privacy=loud, policy=LIFTED, anchor=1e9), app)
        moved = [new[k] - v for k, v in start.items() if "running" not in k]
        spread += [v.double().flatten() for v in moved]
    seen = torch.cat(spread)
    assert abs(float(seen.std()) / (50 * 0.01 * math.sqrt(3) / 4) - 1) < 0.2


# Clipping


def test_steps_are_clipped_and_count_once(tmp_path):
    """Client i moves each number by 10 i, and weighs 1 + 10 i."""
    privacy = Privacy(noise_multiplier=QUIET, clipping_norm=0.3)
    strategy = FedAvg(fraction_evaluate=0.0, privacy=privacy, secure=SecureSums())
    moved = change(strategy, stepping_app(tmp_path, 10.0), clients=4)
    expected = 0.3 / math.sqrt(len(moved)) * 3 / 4  # client 0 has not moved
    assert float((moved - expected).abs().max()) < 1e-6


def test_steps_that_are_short_are_left_as_they_are(tmp_path):
    privacy = Privacy(noise_multiplier=QUIET, clipping_norm=1e3)
    strategy = FedAvg(fraction_evaluate=0.0, privacy=privacy, secure=SecureSums())
    moved = change(strategy, stepping_app(tmp_path, 0.5), clients=4)
    assert float((moved - 0.5 * 6 / 4).abs().max()) < 1e-4


def test_a_contributions_norm_is_one_at_most_and_its_sums_are_the_fishers():
    generator = torch.Generator().manual_seed(0)
    start = {"w": torch.randn(50, generator=generator), "b": torch.zeros(3)}
    for scale, size in ((1e-3, 1e-9), (1.0, 1e-9), (1e3, 1e-9), (1.0, 1e-41)):
        step = torch.randn(50, generator=generator) * scale
        params = {"w": start["w"] + step, "b": torch.ones(3)}
        entries = {"w": torch.rand(50, generator=generator) * size}
        vectors = contribution(start, params, entries, clipping_norm=0.1)
        assert list(vectors) == list(VECTORS)
        flat = torch.cat([v["w"] for v in vectors.values()]).double()
        assert float(flat.norm()) <= 1 + 1e-6
        mean = {f"{k}/w": v["w"] for k, v in vectors.items()}
        sums = private_sums(mean, start, 0.1)
        assert torch.equal(sums.params["b"], start["b"])
        moved = sums.params["w"] - start["w"].double()
        clipped = step.double() * min(1.0, 0.1 / float(step.norm()))
        assert torch.allclose(moved, clipped, atol=1e-6)
        unit = entries["w"].double() / entries["w"].double().norm()
        assert torch.allclose(sums.fisher["w"], unit, atol=1e-6)
        product = unit * clipped
        product *= min(1.0, 0.1 * _PRODUCT / float(product.norm()))
        pull = sums.fisher_params["w"] - sums.fisher["w"] * start["w"].double()
        torch.testing.assert_close(pull, product, rtol=1e-3, atol=1e-7)
    still = contribution(start, start, {"w": torch.zeros(50)}, clipping_norm=1.0)
    assert not any(v["w"].any() for v in still.values())


def test_a_contribution_that_is_too_long_is_clipped_by_the_server():
    like = {"w": torch.zeros(4)}
    long = {f"contribution/{name}": {"w": torch.full((4,), 100.0)} for name in VECTORS}
    read = _read(Additive(long).to_arrays(), like)
    flat = torch.cat(list(read.tensors.values()))
    assert abs(float(flat.norm()) - 1) < 1e-6
    with pytest.raises(WireError):
        _read(Additive({}).to_arrays(), like)


def test_private_sums_merge_alike_with_the_servers_noise_and_with_the_clients(tmp_path):
    privacy = Privacy(noise_multiplier=QUIET, clipping_norm=0.2)
    app = secure_app(tmp_path)
    plain = merged(fisher(privacy=privacy, policy=LIFTED), app)
    secure = merged(fisher(privacy=privacy, secure=SecureSums()), app)
    for name, value in plain.items():
        assert torch.allclose(secure[name].double(), value.double(), atol=1e-4), name
    start = tiny_arrays().to_torch_state_dict()
    assert torch.equal(plain["1.running_mean"], start["1.running_mean"])
    assert not torch.equal(plain["0.weight"], start["0.weight"])


# What is refused, and what is told


def test_exponents_tell_nothing():
    sent = {"w": torch.zeros(3)}
    small, large = (
        Contribution({"w": torch.full((3,), size)}).bounded(sent, 1.0, 0.1)
        for size in (0.0, 1e6)
    )
    assert small.exponents() == large.exponents()
    assert [small.weight, large.weight] == [1.0, 1.0]


def test_a_client_may_ask_for_noise(tmp_path):
    app = stepping_app(tmp_path, 1.0, min_noise=0.5)
    for privacy in (None, Privacy(noise_multiplier=0.5, clipping_norm=1.0)):
        strategy = FedAvg(fraction_evaluate=0.0, privacy=privacy, secure=SecureSums())
        with pytest.raises(RoundError, match=r"SecureSumsMod\(min_noise"):
            merged(strategy, app)
    enough = Privacy(noise_multiplier=1.0, clipping_norm=1.0)
    merged(FedAvg(fraction_evaluate=0.0, privacy=enough, secure=SecureSums()), app)


def test_a_sum_with_too_little_noise_is_not_opened(tmp_path):
    opened = []

    def leaves(message, context, now):
        if now == "values" and context.node_config["partition-id"] == 2:
            raise ClientError("gone")
        if now == "open":
            opened.append(1)

    privacy = Privacy(noise_multiplier=1.0, clipping_norm=1.0, honest=1.0)
    strategy = fisher(privacy=privacy, secure=SecureSums())
    with pytest.raises(RoundError, match="4 of 5 clients are left"):
        merged(strategy, secure_app(tmp_path, leaves), clients=5)
    assert len(opened) == 5  # the exponents, which are constants


def test_who_resumes_must_ask_for_the_same_privacy(tmp_path):
    privacy = Privacy(noise_multiplier=1.0, clipping_norm=1.0)
    grid = LocalGrid(secure_app(tmp_path / "a"), 4)
    folder = tmp_path / "run"
    fisher(privacy=privacy).start(grid, tiny_arrays(), checkpoint_dir=folder)
    other = fisher(privacy=Privacy(noise_multiplier=0.1, clipping_norm=1.0))
    with pytest.raises(Exception, match="noise_multiplier"):
        other.start(grid, tiny_arrays(), 2, checkpoint_dir=folder, resume=True)


def test_noise_makes_no_curvature_negative():
    start = {"w": torch.zeros(50)}
    noisy = {f"{k}/w": torch.full((50,), -0.1) for k in VECTORS}
    assert not private_sums(noisy, start, 0.1).fisher["w"].any()
    fewer = {k: v for k, v in noisy.items() if "product" not in k}
    with pytest.raises(ParamsError, match="same parameters"):
        private_sums(fewer, start, 0.1)


def test_a_tiny_fisher_is_none_the_less_sent():
    start = {"w": torch.zeros(50)}
    entries = {"w": torch.full((50,), 1e-30)}
    vectors = contribution(start, {"w": torch.ones(50)}, entries, 1.0)
    assert vectors["fisher"]["w"].any()
