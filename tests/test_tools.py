"""The tools, on something small."""

import secrets
from functools import partial
from pathlib import Path

import pytest
from same_bits import APPS, cases, federation

from flwr_fisher.strategies import FedFish

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def same_nodes(monkeypatch):
    monkeypatch.setattr(secrets, "randbits", lambda bits: 12345 % 2**bits)


def test_the_same_code_gives_the_same_bits_and_other_options_do_not():
    run = partial(federation, FedFish, rounds=1, momentum=0.0)
    digests = run()
    assert digests == run()
    other = run(server_lr=0.5)
    assert digests.keys() == other.keys()
    assert digests["model"] != other["model"]
    uploads = [key for key in digests if key.startswith("upload train")]
    assert uploads
    assert all(digests[key] == other[key] for key in uploads)


def test_every_case_has_a_name_of_its_own_and_every_app_is_in_one():
    names = [name for name, _ in cases(ROOT / "apps")]
    assert len(set(names)) == len(names) > 35
    assert all(any(name.startswith(f"app {app}") for name in names) for app in APPS)
