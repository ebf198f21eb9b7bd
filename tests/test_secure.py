"""The mathematics of secure sums: what comes out, and what can be seen before."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_fisher.errors import ClientError, ConfigurationError, ParamsError, RoundError
from flwr_fisher.secure import Aggregator, Participant, crypto
from flwr_fisher.secure.aggregator import (
    Sealed,
    degree_for,
    neighbourhoods,
    threshold_of,
)
from flwr_fisher.secure.crypto import noise
from flwr_fisher.secure.fixed_point import (
    LEVELS,
    LOWEST,
    FixedPoint,
    exponent_of,
    highest,
    unary,
)


def added(parts):
    return np.sum(parts, axis=0, dtype=parts[0].dtype)


class Federation:
    """Clients and a server, as messages would join them."""

    def __init__(self, count, sums=1, degree=100, share=0.6):
        self.clients = {n: Participant.new(n, sums) for n in range(10, 10 + count)}
        around = neighbourhoods(list(self.clients), degree, seed=1)
        self.server = Aggregator(
            {n: f"partition-{n}" for n in self.clients},
            {n: client.public() for n, client in self.clients.items()},
            dict(zip(self.clients, around, strict=True)),
            threshold_of(len(around[0]), share),
        )

    def share(self, absent=()):
        """Cut, seal, pass on."""
        server = self.server
        sealed = {
            n: Sealed(*client.share(server.keys_for(n), server.threshold))
            for n, client in self.clients.items()
            if n not in absent
        }
        self.server = server = server.shared(sealed)
        for n in sealed:
            self.clients[n].receive(*server.received_by(n))

    def mask(self, words, index=0, absent=()):
        return {
            n: self.clients[n].mask(index, words[n])
            for n in self.server.sealed
            if n not in absent
        }

    def open(self, masked, index=0, absent=(), change=None):
        survivors = list(masked)
        shares = {
            n: self.clients[n].open(index, *self.server.split(n, survivors))
            for n in survivors
            if n not in absent
        }
        for n, share in (change or {}).items():
            shares[n] = dict.fromkeys(shares[n], share)
        return self.server.unmask(
            index, added(list(masked.values())), survivors, shares
        )


def words_of(count, size=5, dtype=np.uint32):
    generator = np.random.default_rng(0)
    most = np.iinfo(dtype).max
    return {
        n: generator.integers(0, most, size, dtype, endpoint=True)
        for n in range(10, 10 + count)
    }


@given(
    count=st.integers(2, 9),
    size=st.integers(1, 40),
    degree=st.sampled_from([2, 4, 100]),
    bits=st.sampled_from([np.uint32, np.uint64]),
)
@settings(max_examples=15, deadline=None)
def test_masks_cancel(count, size, degree, bits):
    federation = Federation(count, degree=degree)
    federation.share()
    words = words_of(count, size, bits)
    opened = federation.open(federation.mask(words))
    assert (opened == added(list(words.values()))).all()


@given(
    values=st.lists(
        st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=3, max_size=3),
        min_size=2,
        max_size=8,
    ),
    bits=st.sampled_from([32, 64]),
)
@settings(max_examples=200, deadline=None)
def test_sums_are_within_the_stated_error(values, bits):
    tensors = [torch.tensor(own, dtype=torch.float64) for own in values]
    fixed = FixedPoint(bits, len(tensors))
    exponent = max(exponent_of("w", own) for own in tensors)
    total = added([fixed.words(own, exponent) for own in tensors])
    error = (fixed.values(total, exponent) - torch.stack(tensors).sum(0)).abs().max()
    rounding = 1e-15 * sum(float(own.abs().max()) for own in tensors)  # of float64
    assert error <= len(tensors) / 2 * 2.0 ** -fixed.shift(exponent) + rounding


def test_exponents_are_agreed_without_looking():
    every = [[3, -20, LOWEST], [1, 4, LOWEST], [-100, 4, LOWEST]]
    words = [unary(own, noise(bytes([i]), 3 * LEVELS)) for i, own in enumerate(every)]
    assert highest(added(words)) == [3, 4, LOWEST]
    # One client's words and three clients' look alike: random up to the highest.
    parts = [unary([4], noise(bytes([i]), LEVELS)) for i in range(3)]
    one, three = parts[0], added(parts)
    assert ((one != 0) == (three != 0)).all()


def test_what_is_too_large_or_not_finite_is_refused():
    fixed = FixedPoint(32, 2)
    for values in (torch.tensor([2.0]), torch.tensor([torch.nan])):
        with pytest.raises(ParamsError, match="below 2"):
            fixed.words(values, 1)
    with pytest.raises(ParamsError, match="'w'"):
        exponent_of("w", torch.tensor([torch.inf]))
    with pytest.raises(ParamsError, match="'w' is"):
        exponent_of("w", torch.tensor([1e300], dtype=torch.float64))
    with pytest.raises(ConfigurationError, match="bits must be 32 or 64"):
        FixedPoint(16, clients=2)


# What can be seen


def uniform(words):
    """Whether residues are uniform, in their highest, middle and lowest bytes."""
    size = words.itemsize
    for byte in (0, size // 2, size - 1):
        column = words.view(np.uint8).reshape(-1, size)[:, byte]
        seen = np.bincount(column, minlength=256)
        expected = len(words) / 256
        chi = ((seen - expected) ** 2 / expected).sum()
        if not 255 - 6 * 22.6 < chi < 255 + 6 * 22.6:  # of 255 degrees of freedom
            return False
    return True


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_what_the_server_gets_is_uniform(dtype):
    federation = Federation(3)
    federation.share()
    words = {n: np.zeros(2**18, dtype) for n in federation.clients}
    assert not uniform(words[10])
    masked = federation.mask(words)
    assert all(uniform(own) for own in masked.values())
    # And so is the sum of all, until it is opened, and of all but one, then.
    assert uniform(added(list(masked.values())))
    assert (federation.open(masked) == 0).all()
    for left_out in masked:
        others = added([own for n, own in masked.items() if n != left_out])
        survivors = list(masked)
        shares = {
            n: federation.clients[n].open(0, *federation.server.split(n, survivors))
            for n in survivors
        }
        assert uniform(federation.server.unmask(0, others, survivors, shares))


def test_masks_of_two_sums_are_not_alike():
    federation = Federation(3, sums=2)
    federation.share()
    zeros = {n: np.zeros(2**16, np.uint32) for n in federation.clients}
    first, second = federation.mask(zeros, 0)[10], federation.mask(zeros, 1)[10]
    assert uniform(first - second)


# Who leaves


@pytest.mark.parametrize("degree", [6, 100])
def test_who_leaves_changes_the_set_and_nothing_else(degree):
    words = words_of(8)
    federation = Federation(8, degree=degree, share=0.5)
    federation.share(absent=[12])  # after it sent its keys
    masked = federation.mask(words, absent=[15])  # after it shared its secrets
    opened = federation.open(masked, absent=[16])  # after it sent its summand
    present = [n for n in words if n not in (12, 15)]
    assert (opened == added([words[n] for n in present])).all()


def test_too_few_are_told_by_name():
    federation = Federation(5)
    with pytest.raises(RoundError, match="Missing: partition-12, partition-13, "):
        federation.share(absent=[12, 13, 14])
    federation = Federation(5)
    federation.share()
    masked = federation.mask(words_of(5))
    with pytest.raises(RoundError, match=r"partition-10.* partition-12, partition-13"):
        federation.open(masked, absent=[12, 13, 14])


def test_a_client_opens_nothing_for_too_few():
    federation = Federation(5)
    federation.share()
    masked = federation.mask(words_of(5), absent=[11, 12, 13])
    with pytest.raises(ClientError, match="2 of this client's neighbours"):
        federation.open(masked)


# What is refused


def test_nothing_is_masked_or_opened_twice_in_two_ways():
    federation = Federation(4, share=0.5)
    federation.share()
    words = words_of(4)
    masked = federation.mask(words)
    assert (federation.clients[10].mask(0, words[10]) == masked[10]).all()
    with pytest.raises(ClientError, match="other content"):
        federation.clients[10].mask(0, words[10] + np.uint32(1))
    federation.open(masked)
    federation.open(masked)
    with pytest.raises(ClientError, match="another set of clients"):
        federation.open({n: own for n, own in masked.items() if n != 13})


def test_a_share_that_is_wrong_is_named_and_does_no_harm(caplog):
    words = words_of(5)
    federation = Federation(5)
    federation.share()
    opened = federation.open(federation.mask(words), change={11: bytes(crypto.SHARE)})
    assert (opened == added(list(words.values()))).all()
    assert "from partition-11" in caplog.text


def test_sealed_shares_are_for_one_reader():
    federation = Federation(3)
    server = federation.server
    sealed = {
        n: Sealed(*client.share(server.keys_for(n), server.threshold))
        for n, client in federation.clients.items()
    }
    client = federation.clients[10]
    right = {n: sealed[n].shares[10] for n in (11, 12)}
    commitments = {n: sealed[n].commitments[10] for n in (11, 12)}
    own = {11: sealed[10].shares[11], 12: right[12]}  # sent back to its sender
    with pytest.raises(ClientError, match="from 11 are not for 10"):
        client.receive(own, commitments)
    with pytest.raises(ClientError, match=r"from 11 .*sealed with another key"):
        client.receive({11: right[12], 12: right[12]}, commitments)
    with pytest.raises(ClientError, match="from 11 do not fit its commit"):
        client.receive(right, {11: commitments[12], 12: commitments[12]})
    with pytest.raises(ClientError, match="no neighbour"):
        client.receive({99: right[11]}, commitments)
    with pytest.raises(ClientError, match="1 of 3 neighbours"):
        client.receive({}, {})


def test_keys_that_cannot_be_are_refused():
    federation = Federation(3)
    client, right = federation.clients[10], federation.server.keys_for(10)
    with pytest.raises(ClientError, match="this client's own"):
        client.share({**right, 10: right[11]}, 2)
    with pytest.raises(ClientError, match="the same public key for two"):
        client.share({**right, 11: right[12]}, 2)
    with pytest.raises(ClientError, match="threshold is 1 of 3"):
        client.share(right, 1)
    client.share(right, 2)
    others = Federation(3).server.keys_for(11)
    with pytest.raises(ClientError, match="another neighbourhood"):
        client.share({**right, 11: others[11]}, 2)


def test_a_participant_survives_its_process():
    federation = Federation(4, sums=2)
    federation.share()
    words = words_of(4)
    masked = federation.mask(words)
    for n, client in federation.clients.items():
        federation.clients[n] = Participant(**crypto.from_json(crypto.to_json(client)))
    assert (federation.open(masked) == added(list(words.values()))).all()


# Who is whose neighbour


def test_a_ring_joins_all_and_is_mutual():
    numbers = list(range(100, 200))
    around = dict(zip(numbers, neighbourhoods(numbers, 6, seed=3), strict=True))
    assert {len(own) for own in around.values()} == {7}
    assert all(n in around[other] for n in numbers for other in around[n])
    assert around != dict(zip(numbers, neighbourhoods(numbers, 6, seed=4), strict=True))


def test_the_number_of_neighbours_follows_from_chances():
    assert degree_for(40, 0.55) == 39
    assert 60 < degree_for(300, 0.55) < degree_for(1000, 0.55) < 150
    assert degree_for(100, 0.99) == 99  # a fifth may leave: no number is safe
