"""Random numbers that depend on a seed and names, never on what ran before.

Only a run's number is new each time.
"""

import hashlib
import random
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from flwr_fisher.devices import accelerator, random_states, set_random_states


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on all parts and on nothing else.

    Parameters
    ----------
    *parts : int | str
        The purpose of the seed, such as a run's seed, a round and a client.

    Returns
    -------
    int
        In [0, 2^63).

    Examples
    --------
    >>> derive_seed(0, 1, 2) == derive_seed(0, 1, 2) != derive_seed(0, 2, 1)
    True
    """
    return int.from_bytes(hashlib.sha256(_joined(parts)).digest()[:8]) >> 1


def seed_of_clients(seed: int) -> int:
    """Return the seed that the server sends to clients in place of the run's own.

    The run's own seed decides which clients take part in a round. A client cannot
    compute it from this one, unless it is so small that it can be guessed.

    Examples
    --------
    >>> seed_of_clients(3) == seed_of_clients(3) != 3
    True
    """
    return derive_seed(seed, "clients")


def new_run_number() -> int:
    """Return a new run's number, which no other run has.

    It comes from the operating system, so two runs with one seed differ in it. Clients
    keep their files of a run under its number.
    """
    return secrets.randbits(62)


def random_stream(*parts: int | str) -> np.random.Generator:
    """Return a generator whose numbers depend on all parts and on nothing else.

    It is NumPy's, which draws the same numbers with every version of torch.

    Parameters
    ----------
    *parts : int | str
        The purpose of the numbers: a seed, and names that distinguish its streams.

    Examples
    --------
    >>> draws = [random_stream(0, name).random() for name in ("a", "a", "b")]
    >>> draws[0] == draws[1] != draws[2]
    True
    """
    return np.random.Generator(np.random.PCG64(list(_joined(parts))))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch, NumPy and ``random`` in a ``with`` block; restore them afterwards.

    Parameters
    ----------
    seed : int
        The seed of all three, and of torch's generator on an accelerator.
    """
    before = generator_states()
    try:
        if accelerator() is not None:
            torch.manual_seed(seed)
        else:  # torch's own notes its caller's stack, once for each kind of device
            torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        yield
    finally:
        set_generator_states(before)


def generator_states() -> dict[str, Any]:
    """Return the states of all generators that :func:`seeded` seeds.

    They are plain numbers and tensors, which ``torch.load(weights_only=True)`` can
    read.
    """
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "accelerator": random_states(),
        "python": random.getstate(),
        "numpy": (str(name), np.asarray(keys).tolist(), *map(float, rest)),
    }


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Restore the states that :func:`generator_states` returned."""
    torch.set_rng_state(states["torch"])
    set_random_states(states["accelerator"])
    random.setstate(states["python"])
    name, keys, position, has_gauss, gauss = states["numpy"]
    numpy = (name, np.array(keys, np.uint32), int(position), int(has_gauss), gauss)
    np.random.set_state(numpy)  # noqa: NPY002


def _joined(parts: tuple[int | str, ...]) -> bytes:
    return "/".join(str(part) for part in parts).encode()
