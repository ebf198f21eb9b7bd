"""FedFisher with K-FAC sums as a strategy: two exchanges, and one an iteration."""

import pytest
import torch
from flwr.app import ArrayRecord
from virtual import (
    LIFTED,
    Watched,
    app_by_partition,
    fedfisher_with,
    quick_app,
    tiny_arrays,
    tiny_client,
    tiny_model,
)

from flwr_fisher.client import LocalSGD
from flwr_fisher.errors import ClientError, ConfigurationError
from flwr_fisher.secure import SecureSums
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire.options import split_config

# With these the parts are weighted as sums are.
ALIKE = {"robust": 0.0, "max_share": 1.0}
EXACT = {"codec": "lossless", "policy": LIFTED, "fraction_evaluate": 0.0}


def app_of(folder, lost=None, **options):
    """Clients that keep their state in a folder; `lost` fail from a job on."""

    def mod(message, context, call_next):
        partition = int(context.node_config["partition-id"])
        config = next(iter(message.content.config_records.values()))
        job = str(split_config(config)[0].get("job"))
        names = {job, f"{job} {split_config(config)[0].get('iteration')}"}
        if any((lost or {}).get(name) == partition for name in names):
            raise ClientError("gone")
        return call_next(message, context)

    return app_by_partition(
        lambda i: tiny_client(i, state_dir=folder, **options), mods=[mod]
    )


def merged(app, clients=4, rounds=1, **options):
    strategy = fedfisher_with(**{**EXACT, **options})
    return strategy.start(LocalGrid(app, clients), tiny_arrays(), num_rounds=rounds)


def distance(a, b):
    a, b = (r.arrays.to_torch_state_dict() for r in (a, b))
    assert list(a) == list(b)
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a)


@pytest.mark.parametrize(("iterations", "balance"), [(1, 1.0), (3, 0.0)])
def test_the_model_is_that_of_the_parts(iterations, balance, tmp_path):
    options = {"iterations": iterations, "balance": balance}
    parts = merged(quick_app(), **options, **ALIKE)
    sums = merged(app_of(tmp_path), aggregate="sums", **options)
    assert distance(parts, sums) < 1e-4
    assert sums.details.iterations == iterations


def test_rounds_follow_one_another_and_leave_one_file_a_client(tmp_path):
    result = merged(app_of(tmp_path), aggregate="sums", rounds=2, iterations=2)
    assert len(list(tmp_path.glob("state/partition-*/kfac-sums-*"))) == 4
    assert len(result.train_metrics_clientapp) == 2


@pytest.mark.parametrize("secure", [None, SecureSums()])
def test_k_fac_sums_of_a_float16_model_are_refused_before_training(secure):
    """Its regularised factors would be refused after the training, or by chance not."""
    app, half = Watched(), ArrayRecord(tiny_model().half().state_dict())
    strategy = fedfisher_with(aggregate="sums", secure=secure)
    with pytest.raises(ConfigurationError, match=r"'0.weight' is float16.*diagonal"):
        strategy.start(LocalGrid(app, 3), half)
    assert not app.trained


def test_each_client_trains_once_a_round(tmp_path):
    app = Watched(app_of(tmp_path))
    merged(app, aggregate="sums", iterations=3)
    jobs = [config["job"] for config in app.configs]
    assert jobs == [
        job
        for job in ("kfac-train", "kfac-traces", *["kfac-product"] * 3)
        for _ in range(4)
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What two iterations give where nobody is lost."""
    folder = tmp_path_factory.mktemp("whole")
    return merged(app_of(folder), aggregate="sums", iterations=2)


@pytest.mark.parametrize("job", ["kfac-traces", "kfac-product"])
def test_who_leaves_stays_in_the_mean(job, whole, tmp_path):
    left = merged(app_of(tmp_path / "b", lost={job: 1}), aggregate="sums", iterations=2)
    for name, value in whole.details.mean.items():
        assert torch.equal(left.details.mean[name], value)
    assert distance(whole, left) > 1e-4
    assert left.train_metrics_clientapp[1]["num-replies"] == 3


@pytest.mark.parametrize("iteration", [1, 8])
def test_the_merge_is_that_of_the_clients_that_are_left(iteration, tmp_path, caplog):
    """Their products are with another matrix than that of the traces."""
    options = {"aggregate": "sums", "iterations": 8, "anchor": 0.01}
    job = f"kfac-product {iteration}"
    result = merged(app_of(tmp_path / "a", lost={job: 1}), **options).details
    if iteration < 7:
        app = app_of(tmp_path / "b", lost={"kfac-traces": 1})
    else:  # there is no time for a new right-hand side: the merge is that of all
        app, options["iterations"] = app_of(tmp_path / "b"), iteration - 1
    expected = merged(app, **options).details
    for layer in ("0.weight", "3.weight", "3.bias"):
        moved = expected.params[layer] - expected.mean[layer]
        error = expected.params[layer] - result.params[layer]
        assert error.norm() < 0.02 * moved.norm(), layer
    assert "only 3 clients are left" in caplog.text


def test_who_was_not_there_at_first_is_not_asked_later(tmp_path):
    app = Watched(app_of(tmp_path, lost={"kfac-train": 2}))
    merged(app, aggregate="sums", iterations=1)
    later = [p for (_, p), c in zip(app.trained, app.configs, strict=True)
             if c["job"] != "kfac-train"]  # fmt: skip
    assert sorted(set(later)) == [0, 1, 3]


def test_a_lost_file_is_named_and_costs_one_client(tmp_path, caplog):
    class Losing(Watched):
        def __call__(self, message, context):
            reply = super().__call__(message, context)
            if self.configs and self.configs[-1].get("job") == "kfac-train":
                for path in tmp_path.glob("state/partition-1/kfac-sums-*"):
                    path.unlink()
            return reply

    merged(Losing(app_of(tmp_path)), aggregate="sums", iterations=1)
    assert "round 1's model and Fisher are not in" in caplog.text


def test_who_had_left_before_a_restart_is_left_out_still(tmp_path):
    class Dying(Watched):
        def __call__(self, message, context):
            if len(self.configs) == 5:  # of three that are asked for traces
                raise KeyboardInterrupt
            return super().__call__(message, context)

    class Leaving(LocalGrid):
        def get_node_ids(self):
            there = self.restarted or len(self.client_app.configs) >= 4
            return [
                n for n in super().get_node_ids() if not there or self.nodes[n] != 2
            ]

    def go(app, restarted):
        grid = Leaving(app(app_of(tmp_path)), 4)
        grid.restarted = restarted
        strategy = fedfisher_with(aggregate="sums", fraction_evaluate=0.0)
        options = {"checkpoint_dir": tmp_path / "run", "resume": restarted}
        return strategy.start(grid, tiny_arrays(), **options)

    with pytest.raises(KeyboardInterrupt):
        go(Dying, restarted=False)
    assert list(go(Watched, restarted=True).left_out) == ["partition-2"]


def test_a_killed_server_ends_with_the_same_bits(whole, tmp_path):
    for stop in range(1, 5):
        folder = tmp_path / f"clients-{stop}"

        class Dying(Watched):
            def __call__(self, message, context):
                if len(self.configs) == 4 * at - 2:  # noqa: B023
                    self.configs.append({})
                    raise KeyboardInterrupt
                return super().__call__(message, context)

        at, app = stop, Dying(app_of(folder))
        grid, run = LocalGrid(app, 4), {"checkpoint_dir": tmp_path / f"run-{stop}"}

        def strategy():
            return fedfisher_with(**EXACT, aggregate="sums", iterations=2)

        with pytest.raises(KeyboardInterrupt):
            strategy().start(grid, tiny_arrays(), **run)
        result = strategy().start(grid, tiny_arrays(), resume=True, **run)
        assert distance(whole, result) == 0


def test_what_sums_cannot_do_is_refused():
    for options, reason in (
        ({"solver": "adam"}, "solver='pcg'"),
        ({"robust": 1.0}, "robust must be 0"),
        ({"codec": "fedavg"}, "codec='lossless'"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            fedfisher_with(aggregate="sums", **options)


def test_own_loops_weights_count(tmp_path):
    """A metric ``num-examples`` of a `train_fn` is the weight in every exchange."""

    def train(model, loader, device, config):
        return {**LocalSGD(lr=0.1)(model, loader, device, config), "num-examples": 7}

    app = app_of(tmp_path, train_fn=train)
    options = {"iterations": 2, "balance": 0.0}
    parts = merged(app, **options, **ALIKE)
    assert distance(parts, merged(app, aggregate="sums", **options)) < 1e-4
