"""What every error of this library owes those who catch it."""

import pickle

import pytest

from flwr_fisher import errors

MADE = {
    errors.UnknownNameError: ("structure", "kfca", ["diagonal", "kfac"]),
    errors.MissingExtraError: ("sklearn", "tasks"),
}
EVERY = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.FlwrFisherError)
]


def made(kind):
    if kind is errors.WireError:
        return kind("holds NaN", field="fc.weight")
    return kind(*MADE.get(kind, ("what is wrong",)))


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_an_error_is_the_same_in_another_process(kind):
    """Without it a pool of processes hangs, and Ray tells another error."""
    error = made(kind)
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is kind
    assert str(other) == str(error)
    assert vars(other) == vars(error)
