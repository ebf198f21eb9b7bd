"""A strategy that is added has a row in every table of tests that it belongs into."""

import hostile
import pytest
import test_client_limits as limits
import test_strategy_contract as contract
from kinds import KINDS

# FedFisher's and FedFish's options, and TCT's, are objects with tests of their own.
OF_OBJECTS = {"FedFisherOneShot", "FedFish", "TCT"}
WITHOUT = {
    "test_strategy_contract.STRATEGIES": {"TCT"},  # of two stages: test_tct
    "test_strategy_contract.WRONG": OF_OBJECTS,
    "test_client_limits.NO_NUMBERS": OF_OBJECTS,
    "hostile.VICTIMS": set(),
}


def name_of(kind):
    """What a strategy is called; nothing, if it is a user's own."""
    return next((name for name, known in KINDS.items() if known is kind), "")


def numbers(options):
    return [key for key, value in options.items() if type(value) in (int, float)]


def tables():
    """By table, what must be in it, and what is: a strategy, or one and its option."""
    strategies = {name: kind() for name, kind in KINDS.items()}
    settings = {name: own.settings() for name, own in strategies.items()}
    asked = [
        (name, exchange.options.get("job", "train"), exchange.options)
        for name, own in strategies.items()
        for exchange in own.exchanges(1)
    ]
    rows = {name: name_of(type(row())) for name, row in contract.STRATEGIES.items()}
    tried = {(c.get("job", "train"), list(c)[-1]) for _, _, c in limits.NO_NUMBERS}
    return {
        "test_strategy_contract.STRATEGIES": (set(KINDS), set(rows.values())),
        "test_strategy_contract.WRONG": (
            {(name, key) for name, own in settings.items() for key in numbers(own)},
            {(name_of(k), key) for k, own in contract.WRONG.items() for key in own},
        ),
        "test_client_limits.NO_NUMBERS": (
            {(name, key) for name, _, sent in asked for key in numbers(sent)},
            {(name, key) for name, job, _ in asked for j, key in tried if j == job},
        ),
        "hostile.VICTIMS": (
            set(KINDS),
            {name_of(type(victim.make())) for victim in hostile.VICTIMS.values()},
        ),
    }


@pytest.mark.parametrize("table", WITHOUT)
def test_no_strategy_is_forgotten(table):
    needed, there = tables()[table]
    missing = {
        row
        for row in needed - there
        if not WITHOUT[table] & {row, row[0] if isinstance(row, tuple) else row}
    }
    assert not missing, f"add to tests/{table}: {sorted(missing)}"
