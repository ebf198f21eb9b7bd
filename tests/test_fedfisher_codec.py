"""FedFisher with packed uploads: asked for, obeyed, checked, and refused in time."""

import pytest
from virtual import Watched, ask, fedfisher_with, start, tiny_arrays, tiny_client

from flwr_fisher.errors import ConfigurationError
from flwr_fisher.strategies import FedFisherOneShot
from flwr_fisher.testing import LocalGrid
from flwr_fisher.wire import Codec, FisherUpload, arrays_to_tensors
from flwr_fisher.wire.options import split_not_sent

LIKE = arrays_to_tensors(tiny_arrays())
FINE = Codec(budget=6.0)


def run(app=None, **options):
    begin = {k: options.pop(k) for k in ("checkpoint_dir", "resume") if k in options}
    return start(fedfisher_with(**{"fraction_evaluate": 0.0, **options}), app, **begin)


def distance(left, right):
    a, b = (arrays_to_tensors(r.arrays) for r in (left, right))
    return max(float((a[k] - b[k]).abs().max()) for k in a if a[k].is_floating_point())


@pytest.mark.parametrize("structure", ["kfac", "diagonal"])
def test_at_many_bits_the_model_is_the_lossless_one(structure):
    options = {"structure": structure, "anchor": 0.1}
    exact = run(codec="lossless", **options)
    assert distance(exact, run(codec=FINE, **options)) < 3e-3
    assert distance(exact, run(codec=Codec(budget=1.5), **options)) > 0


def test_another_codec_than_the_one_that_was_asked_for_is_refused(caplog):
    caplog.set_level("WARNING", logger="flwr")

    def lossless(content):
        reply = ask(tiny_client(1), config={"structure": "kfac"})
        content["arrays"] = reply.content["arrays"]

    def small(content):
        read = FisherUpload.from_arrays(
            split_not_sent(content["arrays"])[0], LIKE, FINE
        )
        content["arrays"] = read.to_arrays(Codec(budget=3.0))

    result = run(Watched(tamper={0: lossless, 1: small}), codec=FINE, min_train_nodes=1)
    assert [upload.client for upload in result.uploads] == ["partition-2"]
    assert "partition-0" in caplog.text
    assert "requested another codec: {'budget': 6.0" in caplog.text


def test_a_budget_that_is_too_small_is_refused_before_any_client_trains():
    app = Watched()
    grid = LocalGrid(app, 3)
    strategy = FedFisherOneShot(codec=Codec(budget=0.05))
    with pytest.raises(ConfigurationError, match=r"budget must be >= [\d.]+") as caught:
        strategy.start(grid, tiny_arrays())
    assert not app.trained
    run(codec=Codec(budget=float(str(caught.value).split(">= ")[1].split()[0])))
