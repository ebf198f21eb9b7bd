"""The tools, on something small."""

import secrets
from functools import partial

import pytest
from same_bits import federation

from flwr_fisher.strategies import FedFish


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
