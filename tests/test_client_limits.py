"""What a server cannot make a client do: work, or store, without end."""

from functools import partial
from typing import Any

import pytest
import torch
import virtual
from flwr.app import ArrayRecord
from torch.utils.data import DataLoader
from virtual import CLASSES, ask, metrics_of, tiny_arrays, tiny_model

from flwr_fisher.client import ClientLimits, FisherClient, LocalSGD
from flwr_fisher.errors import (
    ClientError,
    ConfigurationError,
    FlwrFisherError,
    WireError,
)
from flwr_fisher.wire.options import members_from_tensors

P = 29  # all of the tiny net's features
KB = 1024


class Untouched(DataLoader[Any]):
    """Data that nobody may look at."""

    def __iter__(self):
        raise AssertionError("the data were read")


def client(where, *, untouched=False, **options):
    kind = Untouched if untouched else DataLoader
    return FisherClient(
        tiny_model(),
        kind(virtual.tiny_data(0), batch_size=4),
        train_fn=options.pop("train_fn", LocalSGD(lr=0.1, momentum=0.0)),
        device="cpu",
        state_dir=where,
        **options,
    )


def sent(**facts):
    """The tiny net, and what the server sent beside it; ``a__b`` is in group ``a``."""
    tensors = {
        f"server/{name.replace('__', '/').replace('_', '-')}": torch.as_tensor(value)
        for name, value in facts.items()
    }
    return ArrayRecord({**tiny_arrays(), **ArrayRecord(tensors)})


def for_tct(**changes):
    facts = {
        "run": 1,
        "steps": 0,
        "mean": torch.zeros(P),
        "std": torch.ones(P),
        "weight": torch.zeros(P, CLASSES),
        "control": torch.zeros(P, CLASSES),
        "lr": torch.tensor(1e-3, dtype=torch.float64),
    }
    return sent(**{k: v for k, v in (facts | changes).items() if v is not None})


def nothing_in(folder):
    return not list(folder.rglob("*.*"))


# Caps on work

TCT_STEP = {"job": "tct-step", "num-features": P}
CAPPED = [
    ("train", for_tct, TCT_STEP, "local-steps", "max_steps"),
    ("train", for_tct, TCT_STEP | {"solver": "steps"}, "local-steps", "max_steps"),
]
capped = pytest.mark.parametrize(("kind", "arrays", "config", "name", "cap"), CAPPED)


@capped
def test_more_than_the_cap_is_refused_before_anything_is_done(
    kind, arrays, config, name, cap, tmp_path
):
    for options, count, most in (({}, 2**62, "100"), ({cap: 3}, 4, "3")):
        mine = client(tmp_path, untouched=True, limits=ClientLimits(**options))
        with pytest.raises(ClientError) as caught:
            ask(mine, arrays(), {**config, name: count}, kind=kind)
        assert f"requests fisher.{name}={count}" in str(caught.value)
        assert f"limit is {most}" in str(caught.value)
        assert f"FisherClient(limits=ClientLimits({cap}={count}))" in str(caught.value)
    assert nothing_in(tmp_path)


def test_a_cap_is_a_positive_integer(tmp_path):
    with pytest.raises(ConfigurationError, match=r"^state_bytes must be"):
        client(tmp_path, state_bytes=0)


# Numbers that are none

NAN, INF = float("nan"), float("inf")
SCAFFOLD = {"job": "scaffold"}
PROBE = {"job": "probe", "probe": "random"}
OF_RUN = partial(sent, run=1, steps=0)
CODEC = {"codec": "fedavg", "codec-version": 2}
NO_NUMBERS = [
    *[("train", for_tct, TCT_STEP | {"local-steps": v}) for v in (0, [5], 2.0)],
    *[("train", for_tct, TCT_STEP | {"num-features": v}) for v in ("x", 0)],
    *[("train", for_tct, TCT_STEP | {"seed": v}) for v in ("x", 0.5)],
    *[("train", tiny_arrays, {"seed": v}) for v in ("x", NAN, INF, [1])],
    *[("train", tiny_arrays, {"server-round": v}) for v in ("x", NAN, [1, 2])],
    *[("train", tiny_arrays, {"lr": v}) for v in ("x", NAN, INF, -1.0, [1.0])],
    *[("train", tiny_arrays, {"proximal-mu": v}) for v in ("x", INF, -1.0)],
    *[("train", tiny_arrays, {"tolerance": v}) for v in ("x", NAN)],
    ("train", tiny_arrays, CODEC | {"codec-budget": "x"}),
    *[("train", OF_RUN, SCAFFOLD | {"lr": v}) for v in (NAN, INF, -1.0)],
    *[("train", tiny_arrays, PROBE | {"probe-seed": v}) for v in ("x", 0.5, [1])],
]


@pytest.mark.parametrize(("kind", "arrays", "config"), NO_NUMBERS)
def test_what_is_no_such_number_is_refused_by_name(kind, arrays, config, tmp_path):
    with pytest.raises(FlwrFisherError) as caught:
        ask(client(tmp_path), arrays(), config, kind=kind)
    name = list(config)[-1]
    said = str(caught.value).replace("_", "-")
    assert name in said or (name, "learning rate" in said) == ("lr", True)
    assert nothing_in(tmp_path)


def test_a_long_text_for_a_number_does_not_fill_a_log(tmp_path):
    for config in ({"seed": "\n" * 10**6}, {"job": "\n" * 10**6}, {"lr": "x" * 10**6}):
        with pytest.raises(FlwrFisherError) as caught:
            ask(client(tmp_path), config=config)
        assert len(str(caught.value)) < 400
        assert "\n" not in str(caught.value)


# Tensors that are none of those expected

WRONG_FACTS = {
    "run": (None, -1, 0.5, [1, 2]),
    "steps": (None, -1, [[1]]),
    "lr": (None, [0.1, 0.1], 1),
    "mean": (None, torch.zeros(1)),
    "std": (torch.ones(P, 1),),
    "weight": (None, torch.zeros(P, CLASSES, dtype=torch.int64)),
    "control": (torch.zeros(CLASSES),),
    "digest": ([300, 1], [0.5], torch.tensor([255], dtype=torch.uint8)),
    "clients": (5, [1, 2, 3], [[1.0, 2.0]], [[0, -2]], torch.ones(1, 2, 1).long()),
}


@pytest.mark.parametrize(
    ("name", "value"), [(k, v) for k, values in WRONG_FACTS.items() for v in values]
)
def test_a_tensor_of_another_kind_is_refused_by_name(name, value, tmp_path):
    mine = client(tmp_path, untouched=True)
    with pytest.raises((ClientError, WireError), match=name):
        ask(mine, for_tct(**{name: value}), TCT_STEP)
    assert nothing_in(tmp_path)


@pytest.mark.parametrize("parts", [[0.5], [[0.5, 0.5]], [0.5, 2.0]])
def test_each_client_has_one_part_of_its_change(parts):
    tensors = {
        "clients": torch.tensor([[0, 1], [1, 1]]),
        "client-parts": torch.tensor(parts),
    }
    with pytest.raises(WireError, match="client-parts"):
        members_from_tensors(tensors)


# State on disk


def runs_in(root):
    return sorted(p.name.split(".")[1] for p in root.glob("state/partition-0/*"))


def ask_scaffold(mine, run, step=0):
    arrays = sent(run=run, steps=step, **({"clients": [[0, step]]} if step else {}))
    return float(metrics_of(ask(mine, arrays, SCAFFOLD))["state-lost"])


def test_a_server_that_invents_runs_does_not_fill_the_disk(tmp_path):
    mine = client(tmp_path, state_bytes=40 * KB)
    for run in range(100, 113):
        ask_scaffold(mine, run)
    assert runs_in(tmp_path) == [f"{run:x}" for run in range(103, 113)]


def test_the_run_under_way_keeps_what_it_needs(tmp_path):
    mine = client(tmp_path, state_bytes=40 * KB)
    ask_scaffold(mine, 7)
    for step in range(1, 13):
        ask_scaffold(mine, 1000 + step)
        assert ask_scaffold(mine, 7, step) == 0.0
    assert "7" in runs_in(tmp_path)
    assert len(runs_in(tmp_path)) < 12
    assert ask_scaffold(mine, 1001, 1) == 1.0  # was collected: told, as ever


def test_state_that_never_fits_is_refused_before_training(tmp_path):
    def never(*args):
        raise AssertionError("trained")

    loop = LocalSGD(momentum=0.0, loss_fn=never)
    scaffold = client(tmp_path, state_bytes=100, train_fn=loop)
    tct = client(tmp_path, state_bytes=2 * P * CLASSES * 4 - 1, untouched=True)
    num_bytes = 2 * 4 * sum(p.numel() for p in tiny_model().parameters())
    for mine, arrays, config, needed in (
        (scaffold, sent(run=255, steps=0), SCAFFOLD, num_bytes),
        (tct, for_tct(run=255), TCT_STEP, 2 * P * CLASSES * 4),
    ):
        with pytest.raises(ClientError, match="state of run ff: ") as caught:
            ask(mine, arrays, config)
        assert f"pass state_bytes={needed} or more" in str(caught.value)
    assert nothing_in(tmp_path)


def test_a_key_from_the_server_cannot_forge_or_fill_a_log(tmp_path):
    key = "\n[INFO] all is well\n" * 10**4
    arrays = ArrayRecord({**tiny_arrays(), **ArrayRecord({key: torch.zeros(1)})})
    with pytest.raises(ClientError, match="the server sent '") as caught:
        ask(client(tmp_path), arrays)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
